"""Perplexity and last words on both backends against transformers, window by window; what the commands refuse."""

import json
import math
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import GPT2LMHeadModel

import run_gpt2
from common.checkpoint.folders import require_checkpoint
from common.evaluation.rows import ScoredRow, score_rows
from common.resolve.derive import resolve_config
from common.run_config import load_config
from common.tokenizer import load_tokenizer
from tests.reference import hugging_face_model
from tests.tiny import tiny_config, tiny_run
from tests.twins import mindspore_mode, mindspore_twin, random_model
from torch_gpt2.model import GPT2


@pytest.fixture(scope="module")
def model() -> GPT2:
    return random_model(positions=None, seq_length=12, max_positions=16)


@pytest.fixture(scope="module")
def reference(model: GPT2) -> GPT2LMHeadModel:
    return hugging_face_model(model.config, dict(model.named_parameters()))


@torch.no_grad()
def guide_nats(model: GPT2LMHeadModel, tokens: np.ndarray, max_length: int, stride: int) -> float:
    """Summed loss of Hugging Face's guide on the perplexity of fixed-length models: labels of the overlap are -100."""
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    total, previous_end = 0.0, 0
    for begin in range(0, ids.shape[1], stride):
        end = min(begin + max_length, ids.shape[1])
        labels = ids[:, begin:end].clone()
        labels[:, : previous_end - begin] = -100
        total += model(ids[:, begin:end], labels=labels).loss.item() * int((labels[:, 1:] != -100).sum())
        previous_end = end
        if end == ids.shape[1]:
            break
    return total


@torch.no_grad()
def alone(model: GPT2LMHeadModel, row: ScoredRow) -> tuple[float, int]:
    """Loss and greedy hits of a row's last targets, from log-probabilities of the unpadded row."""
    ids = torch.from_numpy(row.tokens.astype(np.int64))
    found = F.log_softmax(model(ids[None, :-1]).logits[0], -1)[-row.scored :]
    targets = ids[-row.scored :]
    return -found.gather(1, targets[:, None]).sum().item(), int((found.argmax(1) == targets).sum())


@pytest.mark.parametrize(("mode", "rows_at_once"), [("torch", 1024), ("torch", 3), ("graph", 7), ("pynative", 7)])
def test_rows_of_any_length_equal_unpadded_ones(
    model: GPT2, reference: GPT2LMHeadModel, request: Any, monkeypatch: Any, mode: str, rows_at_once: int
) -> None:
    """Rows as LAMBADA has them, of 1 to 3 scored tokens; every other one ends as the model would
    continue, or almost. mode: torch, or one of MindSpore's.
    """
    generator, rows = np.random.default_rng(0), []
    for number, length in enumerate(generator.integers(3, 10, 11)):
        ids, scored = generator.integers(0, 101, length).tolist(), min(1 + number % 3, length - 1)
        for _ in range(scored * (number % 2)):
            with torch.no_grad():
                ids.append(int(reference(torch.tensor([ids])).logits[0, -1].argmax()))
        ids[-1] = (ids[-1] + (number % 4 == 3)) % 101
        rows.append(ScoredRow(tokens=np.array(ids, np.int32), scored=scored))
    expected = [alone(reference, row) for row in rows]
    misses = [row.scored - hits for (_, hits), row in zip(expected, rows, strict=True)]
    assert {*misses[1::2]} == {0, 1}
    own: Any = model
    if mode != "torch":
        request.getfixturevalue("mindspore")
        sizes = {"seq_length": 12, "max_positions": 16, "vocab_multiple": 16}
        own = mindspore_twin(tiny_config(**{f"model__{key}": value for key, value in sizes.items()}), model)
    package = "torch_gpt2" if mode == "torch" else "mindformers_gpt2"
    module, device = (import_module(f"{package}.{name}") for name in ("evaluate", "device"))
    monkeypatch.setattr(module, "ROWS_AT_ONCE", rows_at_once)
    with nullcontext() if mode == "torch" else mindspore_mode(mode):
        scorer = module.make_scorer(own, device.select_device("cpu"))
        for batch_size in (1, 4, 32) if mode == "torch" else (4,):  # a graph each
            found = score_rows(rows, scorer, batch_size)
            np.testing.assert_allclose(found.losses, [nats for nats, _ in expected], rtol=1e-5)
            assert found.hits.tolist() == [hits for _, hits in expected]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, corpus_prefix: Path, gpt2_vocab_files: tuple[Path, Path]) -> Path:
    """The config of a run that has a checkpoint, GPT-2's vocabulary and windows of 32."""
    folder = tmp_path_factory.mktemp("trained")
    files = {"vocab_file": str(gpt2_vocab_files[0]), "merge_file": str(gpt2_vocab_files[1])}
    small = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "seq_length": 32}
    model = small | {"max_positions": 64, "vocab_size": 50257}
    words = {"train": {"max_steps": 1, "micro_batch_size": 2}, "validation__max_samples": 2}
    tree = tiny_run(folder / "run", corpus_prefix, model=model, data__tokenizer=files, **words)
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    assert run_gpt2.main(["--config", str(path), "--run_mode", "train"]) == 0
    return path


def evaluate(config: Path, *words: str) -> int:
    return run_gpt2.main(["--config", str(config), "--run_mode", "eval", *words])


@pytest.mark.parametrize("backend", ["torch", "mindspore"])
def test_the_three_tasks_as_commands(
    trained: Path, english: str, tmp_path: Path, capsys: Any, request: Any, backend: str
) -> None:
    if backend == "mindspore":
        request.getfixturevalue("mindspore")
    config = resolve_config(load_config(trained))
    settings, run = config.data.tokenizer, Path(config.output_dir)
    assert settings is not None and settings.vocab_file is not None
    tokenizer = load_tokenizer(settings.type, settings.vocab_file, settings.merge_file)
    checkpoint = require_checkpoint(run, "test")
    for other in run.glob("evaluation*.json"):  # of the other backend
        other.unlink()
    reference = hugging_face_model(config.model, load_file(checkpoint / "model.safetensors"))

    text = english[:2000]
    (tmp_path / "part.txt").write_text(text)
    words = [f"backend={backend}", f"evaluation.file={tmp_path / 'part.txt'}", "evaluation.task=text"]
    assert evaluate(trained, *words, "evaluation.stride=20", "evaluation.batch_size=4") == 0
    found = json.loads((run / "evaluation_text.json").read_text())
    ids = tokenizer.encode(text)
    nats = guide_nats(reference, ids, 33, 20)
    assert found["scored_tokens"] == len(ids) - 1 and found["checkpoint"] == str(checkpoint)
    assert found["loss"] == pytest.approx(nats / (len(ids) - 1), rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(nats / (len(ids) - 1)), rel=1e-4)
    bits = nats / math.log(2) / len(text.encode())
    assert found["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    out = capsys.readouterr().out
    for words in ("validation results on part.txt | avg loss:", "adjusted ppl:", "token ratio:"):
        assert words in out

    passages = tmp_path / "passages.jsonl"
    starts = (english[at : at + 300].rpartition(" ")[0] for at in range(5000, 17000, 1000))
    passages.write_text("".join(json.dumps({"text": start}) + "\n" for start in starts))
    words = [f"evaluation.file={passages}", "evaluation.task=lambada", "evaluation.max_samples=12"]
    assert evaluate(trained, f"backend={backend}", *words) == 0
    found = json.loads((run / "evaluation_lambada.json").read_text())
    nats, right, tokens = 0.0, 0, 0
    for line in passages.read_text().splitlines()[:12]:
        context, _, word = json.loads(line)["text"].rpartition(" ")
        target = tokenizer.encode(" " + word)
        ids = np.concatenate((tokenizer.encode(context), target))[-33:]
        loss, hits = alone(reference, ScoredRow(tokens=ids, scored=len(target)))
        nats, right, tokens = nats + loss, right + (hits == len(target)), tokens + len(target)
    counts = found["passages"], found["last_word_tokens"], found["correct"]
    assert counts == (12, tokens, right) and tokens > 12
    assert found["loss"] == pytest.approx(nats / 12, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(nats / 12), rel=1e-4)

    assert evaluate(trained, f"backend={backend}") == 0
    assert json.loads((run / "evaluation.json").read_text())["tokens"] == 64
    assert len(list(run.glob("evaluation*.json"))) == 3


BAD: list[tuple[str, bytes, str, str]] = [
    ("text", b"a\xff\xe9 word", "", "is not UTF-8"),
    ("text", b"Hello", "", "holds a single token"),
    ("text", b'{"text": "a b"}\n{"text": \n', "", "line 2, column 10"),
    ("text", b"some text", "data.tokenizer=null", "data.tokenizer is not given"),
    ("text", b"some text", "output_dir={folder}/absent", "no whole checkpoint here"),
    ("lambada", b"some text", "", "is plain text; LAMBADA is read from JSON Lines"),
    ("text", b"some text", "data.tokenizer.vocab_file={folder}/swapped.json", "files it was trained with"),
]


def test_bad_input_is_one_message_and_exit_code_2(
    trained: Path, tmp_path: Path, gpt2_vocab_files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    vocabulary = json.loads(gpt2_vocab_files[0].read_text(encoding="utf-8"))
    vocabulary["!"], vocabulary["#"] = vocabulary["#"], vocabulary["!"]
    (tmp_path / "swapped.json").write_text(json.dumps(vocabulary))
    for task, content, word, message in BAD:
        file = tmp_path / ("input.jsonl" if content.startswith(b"{") else "input.txt")
        file.write_bytes(content)
        words = [f"evaluation.task={task}", f"evaluation.file={file}"]
        words += [word.format(folder=tmp_path)] if word else []
        assert evaluate(trained, *words) == 2
        [error] = capsys.readouterr().err.strip().splitlines()
        assert error.startswith("error: ") and message in error
