"""A GPT-2 folder of transformers' into training here and back: each side writes the same tokens as the other."""

import json
import shutil
from pathlib import Path
from typing import Any

import transformers

from common.backends import make_run, run_backend
from common.checkpoint.manifest import write_manifest
from common.cluster.environment import ALONE
from common.config.load import build_config
from common.conversion.convert import REPORT
from tests.reference import MERGES, POSITIONS, save_model, write_vocabulary
from tests.tiny import tiny_run
from tools.convert_weight import main
from torch_gpt2.train import train

PROMPTS = ["To be, or not to be", "The", "naïve café, hello 日本"]
NEW_TOKENS, SIZE = 12, 262


def tree(folder: Path, vocabulary: Path, **sections: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {"model__seq_length": POSITIONS, "model__vocab_size": SIZE}
    usual |= {"optimizer": {"learning_rate": 0.001, "clip_grad": 1.0}}
    data = {"tokenizer": str(vocabulary), **sections.pop("data", {})}
    return tiny_run(folder, **(usual | sections), data=data)


def ours(weights: Path, folder: Path, vocabulary: Path) -> list[tuple[list[int], str]]:
    """Tokens and text of --run_mode predict, in one batch."""
    wish = {"prompt": PROMPTS, "max_new_tokens": NEW_TOKENS, "output_file": str(folder / "out.jsonl")}
    config = build_config(tree(folder, vocabulary, predict=wish, checkpoint={"load": str(weights)}))
    run_backend("predict", config, ALONE)
    rows = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    return [(row["tokens"], row["continuation"]) for row in rows]


def theirs(folder: Path) -> list[tuple[list[int], str]]:
    """Generation equals transformers' own of the folder, with no option that says what it is."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    found = []
    for prompt in PROMPTS:
        given = tokenizer(prompt, return_tensors="pt")
        [row] = model.generate(**given, **settings)
        ids = row[given["input_ids"].shape[1] :].tolist()
        tokens = ids[:-1] if ids[-1] == tokenizer.eos_token_id else ids  # the end is among theirs
        found.append((tokens, tokenizer.decode(tokens)))
    return found


def converted(source: Path, target: Path, to: str) -> Path:
    assert main(["--to", to, "--input", str(source), "--output", str(target)]) == 0
    return target


def test_from_hugging_face_to_training_and_back(tmp_path: Path, corpus_prefix: Path, capsys: Any) -> None:
    vocabulary = write_vocabulary(tmp_path / "vocabulary", MERGES)
    source = save_model(tmp_path / "hf", vocabulary, SIZE)
    weights = converted(source, tmp_path / "ours", "torch_gpt2")
    before = ours(weights, tmp_path, vocabulary)
    assert before == theirs(source)
    data, run = {"train": str(corpus_prefix), "split": "100,0,0"}, tmp_path / "run"
    words = tree(run, vocabulary, data=data, checkpoint={"init_from": str(weights)}, train__max_steps=2)
    train(*make_run(build_config(words), "finetune"))
    back = converted(run, tmp_path / "back", "hf")
    after = ours(run, tmp_path, vocabulary)
    assert after == theirs(back) and after != before
    for found in (before, after):
        assert len({len(tokens) for tokens, _ in found}) > 1, "some end early"
    tokenizer = transformers.AutoTokenizer.from_pretrained(back)
    assert len(tokenizer) == SIZE and tokenizer.model_max_length == POSITIONS
    assert (back / "merges.txt").read_text().startswith("#version"), "transformers 4 skips the first line"
    assert tokenizer.eos_token_id == SIZE - 1 and tokenizer.bos_token == "<|endoftext|>"
    assert "tokenizer" not in json.loads((back / REPORT).read_text())["ignored"]

    def stays_behind(name: str, why: str) -> None:
        """A tokenizer that is gone or another than the run's is named and not written."""
        reason = json.loads((converted(run, tmp_path / name, "hf") / REPORT).read_text())["ignored"]["tokenizer"]
        assert f"not written: tokenizer ({reason})\n" in capsys.readouterr().out
        assert reason.startswith("files of the tokenizer: ") and why in reason
        files = {path.name for path in (tmp_path / name).iterdir()}
        assert files == {"config.json", "model.safetensors", REPORT}
        own = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert own.config.eos_token_id is None

    shutil.rmtree(vocabulary)
    stays_behind("gone", "vocabulary: does not exist")
    write_vocabulary(vocabulary, MERGES[::-1])
    stays_behind("another", "vocabulary: its content (sha256 ")
    folder = run / "checkpoints" / "step_00000002"
    words = json.loads((folder / "manifest.json").read_text())
    write_manifest(folder, words | {"config": words["config"] | {"data": {"tokenizer": None}}})
    stays_behind("nameless", "names none")
    write_manifest(folder, words | {"tokenizer": words["tokenizer"] | {"kind": "Other"}})
    stays_behind("other", "tokenizer kind 'Other' is not known")
