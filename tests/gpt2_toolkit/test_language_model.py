"""The Python interface: one folder on torch, MindSpore and ONNX, against transformers and against
``--run_mode predict``.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from common.config.load import build_config  # noqa: E402
from common.config.schema import ModelConfig  # noqa: E402
from common.errors import TokenizerError, UserError  # noqa: E402
from common.run_config import fill_model, load_config  # noqa: E402
from common.tokenizer import load_tokenizer  # noqa: E402
from gpt2_toolkit import load_model  # noqa: E402
from run_gpt2 import main  # noqa: E402
from tests.reference import MERGES, POSITIONS, save_model, write_vocabulary  # noqa: E402
from tests.tiny import tiny_run  # noqa: E402
from tools.convert_weight import main as convert  # noqa: E402
from tools.inference import main as inference  # noqa: E402

PROMPTS = ["To be, or not to be", "The", "naïve café, hello 日本"]
TEXT = "hello, the café is there"
VOCABULARY = 262
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model as transformers' folder, as weights of ours, and as exports; and a config of it."""
    root = tmp_path_factory.mktemp("models")
    source = save_model(root / "hf", write_vocabulary(root / "vocabulary", MERGES), size=VOCABULARY)
    words = ["--to", "torch_gpt2", "--input", str(source), "--output", str(root / "own")]
    assert convert(words) == 0
    config = root / "run.yaml"
    tree = tiny_run(root, model__seq_length=POSITIONS, model__vocab_size=VOCABULARY)
    tree |= {"data": {"tokenizer": str(source)}, "checkpoint": {"load": str(source)}}
    config.write_text(json.dumps(tree))
    for format in ("onnx", "safetensors", "pt2"):
        words = ["--config", str(config), "--run_mode", "export", f"export.format={format}"]
        assert main(words) == 0
    return {
        "hf": source, "own": root / "own", "onnx": root / "onnx",
        "weights": root / "weights", "pt2": root / "pt2", "config": config,
    }  # fmt: skip


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, Any]:
    """Greedy tokens of the prompts, and log-probabilities of the text, by transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folders["hf"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders["hf"])
    tokens = []
    for prompt in PROMPTS:
        given = tokenizer(prompt, return_tensors="pt")
        found = model.generate(**given, max_new_tokens=12, do_sample=False, pad_token_id=0)
        ids = found[0, given["input_ids"].shape[1] :].tolist()
        tokens.append(ids[:-1] if ids[-1] == VOCABULARY - 1 else ids)
    ids = torch.tensor([[VOCABULARY - 1, *tokenizer(TEXT)["input_ids"]]])
    with torch.no_grad():
        logprobs = model(ids).logits.log_softmax(-1)[0, :-1]
    return {
        "tokens": tokens,
        "ids": ids[0, 1:].tolist(),
        "logprobs": logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist(),
        "greedy": (logprobs.argmax(-1) == ids[0, 1:]).tolist(),
    }


@pytest.mark.parametrize(
    ("name", "backend"),
    [("hf", "torch"), ("own", "torch"), ("weights", "auto"), ("hf", "mindspore"), ("onnx", "auto"), ("pt2", "auto")],
)
def test_every_folder_says_what_transformers_says(folders, expected, name, backend, request) -> None:
    if backend == "mindspore":
        request.getfixturevalue("mindspore")
    model = load_model(folders[name], backend=backend, device="cpu")
    width, path = 32, model.source.path
    count = (VOCABULARY + POSITIONS + 2) * width + 2 * (12 * width**2 + 13 * width)
    said = f"{str(path)!r}, 2 layers x 32, {count:,} parameters, {model.backend}"
    assert repr(model) == f"LanguageModel({said})"
    found = model.generate(PROMPTS, max_new_tokens=12)
    assert [each.tokens for each in found] == expected["tokens"]
    assert len({each.finish_reason for each in found}) > 1, "some end early"
    assert str(found[1]) == PROMPTS[1] + model.decode(expected["tokens"][1])
    score = model.score(TEXT)
    assert score.tokens == expected["ids"] and score.greedy.tolist() == expected["greedy"]
    # float32, added in other orders: 1e-5 of log-probabilities of up to 40
    assert score.logprobs == pytest.approx(expected["logprobs"], abs=4e-4)
    rows = [[VOCABULARY - 1, *expected["ids"]], expected["ids"][:6]]
    whole, part = model.score_ids(rows, [len(rows[0]) - 3, 1])
    assert whole.logprob == pytest.approx(sum(expected["logprobs"][-3:]), abs=1e-3)
    assert len(part.tokens) == 5


def test_the_words_of_one_model(folders: dict[str, Path], expected: dict[str, Any]) -> None:
    model = load_model(folders["hf"], backend="torch", device="cpu")

    def tokens(**settings: Any) -> list[int]:
        return model.generate(PROMPTS[0], max_new_tokens=12, **settings)[0].tokens

    drawn, greedy = tokens(top_k=40, seed=1), tokens()
    assert drawn == tokens(strategy="sampling", top_k=40, seed=1) != greedy
    assert greedy == tokens(temperature=0)
    for ids in (model.encode(PROMPTS[0]), np.array(model.encode(PROMPTS[0]))):
        assert model.generate(ids, max_new_tokens=12)[0].tokens == greedy
    pieces = model.stream(PROMPTS[0], max_new_tokens=12)
    first = next(pieces)
    with pytest.raises(Exception, match="the model is at work"):
        model.score(TEXT)
    assert first + "".join(pieces) == model.decode(greedy)
    several = {"strategy": "sampling", "num_sequences": 2, "seed": 3, "max_new_tokens": 5}
    found = model.generate(["The", "hello"], **several)
    assert [(each.index, each.number) for each in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    # a text of many windows, in which the first token of each has the one before it as context
    long = "hello the " * 100
    ids = [VOCABULARY - 1, *model.encode(long)]
    by_hand = []
    for start in range(0, len(ids) - 1, POSITIONS):
        window = ids[start : start + POSITIONS + 1]
        by_hand += model.score_ids([window], [1])[0].logprobs.tolist()
    assert model.score(long).logprobs == pytest.approx(by_hand, abs=1e-5)
    both = model.score([TEXT, long])
    assert both[0].logprob == pytest.approx(sum(expected["logprobs"]), abs=4e-3)


def test_the_same_as_the_run_mode_predict(folders: dict[str, Path], tmp_path, capsys) -> None:
    words = ["predict.strategy=sampling", "predict.top_k=20", "predict.max_new_tokens=12"]
    file = tmp_path / "out.jsonl"
    prompts = json.dumps(PROMPTS)
    command = ["--config", str(folders["config"]), "--run_mode", "predict", *words]
    assert main([*command, f"predict.prompt={prompts}", f"predict.output_file={file}"]) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    model = load_model(folders["hf"], backend="torch", device="cpu")
    found = model.generate(PROMPTS, strategy="sampling", top_k=20, max_new_tokens=12)
    texts = [(row["tokens"], row["continuation"]) for row in rows]
    assert [(each.tokens, each.text) for each in found] == texts
    capsys.readouterr()
    printed = []
    for name in ("hf", "onnx"):
        load = [f"checkpoint.load={folders[name]}", f"predict.prompt={prompts}"]
        assert main([*command, *load]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert printed[0].count("Prompt: ") == printed[0].count("Generation: ") == len(PROMPTS)


@pytest.mark.parametrize("name", ["onnx", "weights", "hf"])
def test_the_tool_prints_prompt_and_generation(folders, expected, name, capsys) -> None:
    command = ["--model_dir", str(folders[name]), "--prompt", PROMPTS[1], "--verify"]
    assert inference([*command, "max_new_tokens=12"]) == 0
    text = PROMPTS[1] + load_tokenizer(None, folders["hf"]).decode(expected["tokens"][1])
    out = capsys.readouterr().out
    assert out[out.index("Prompt:") :] == f"Prompt: {PROMPTS[1]}\nGeneration: {text}\n\n"
    assert inference([*command, "max_new_token=3"]) == 2
    error = capsys.readouterr().err
    assert "did you mean predict.max_new_tokens" in error and error.count("\n") == 1


def test_eval_of_an_export_is_that_of_its_checkpoint(folders, tmp_path, corpus_prefix) -> None:
    (tmp_path / "text.txt").write_text(TEXT * 20)
    text = ["evaluation.task=text", f"evaluation.file={tmp_path / 'text.txt'}"]
    validation = [f"data.validation={corpus_prefix}", "validation.max_samples=3"]
    found: dict[tuple[str, str], float] = {}
    for name in ("hf", "onnx"):
        where = tmp_path / name
        where.mkdir()
        load = [f"checkpoint.load={folders[name]}", f"output_dir={where}"]
        command = ["--config", str(folders["config"]), "--run_mode", "eval", *load]
        assert main([*command, *text]) == main([*command, *validation]) == 0
        found[name, "text"] = json.loads((where / "evaluation_text.json").read_text())["loss"]
        record = json.loads((where / "evaluation.json").read_text())
        found[name, "validation"] = record["validation_loss"]
    for task in ("text", "validation"):
        assert found["onnx", task] == pytest.approx(found["hf", task], rel=1e-5)


def test_an_export_of_another_model_or_tokenizer_is_refused(folders, tmp_path, capsys) -> None:
    command = ["--config", str(folders["config"]), "--run_mode", "predict", "predict.prompt=a"]
    other = write_vocabulary(tmp_path / "other", MERGES[::-1])
    export = shutil.copytree(folders["onnx"], tmp_path / "onnx")
    _change(tokenizer={"kind": "GPT2BPETokenizer", "vocab_size": 262, "sha256": "0" * 64})(export)
    for load, word, message in (
        (folders["onnx"], "model.num_heads=2", "add: model=from_checkpoint, or model.num_heads=4"),
        (export, f"data.tokenizer={other}", "give the files it was trained"),
    ):
        assert main([*command, f"checkpoint.load={load}", word]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    larger = write_vocabulary(tmp_path / "larger", [*MERGES, "t h"])
    with pytest.raises(TokenizerError, match="the model has 262 tokens and the tokenizer 263"):
        load_model(folders["onnx"], tokenizer=larger)


_WITHOUT_FRAMEWORK = """
import json, sys
for name in ("torch", "mindspore", "transformers", "onnx"):
    sys.modules[name] = None
from gpt2_toolkit import load_model
assert "onnxruntime" not in sys.modules
model = load_model(sys.argv[1])
found = [each.tokens for each in model.generate(json.loads(sys.argv[2]), max_new_tokens=12)]
print(json.dumps([found, model.score(sys.argv[3]).perplexity]))
"""


def test_onnx_needs_no_training_framework(folders, expected, tmp_path) -> None:
    moved = shutil.copytree(folders["onnx"], tmp_path / "elsewhere")
    command = [sys.executable, "-c", _WITHOUT_FRAMEWORK, moved, json.dumps(PROMPTS), TEXT]
    tokens, perplexity = json.loads(subprocess.check_output(command, cwd=ROOT, timeout=120))
    assert tokens == expected["tokens"]
    mean = sum(expected["logprobs"]) / len(expected["logprobs"])
    assert perplexity == pytest.approx(2.718281828459045**-mean, rel=1e-4)


def _change(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        record = json.loads((folder / "export.json").read_text())
        (folder / "export.json").write_text(json.dumps(record | values))

    return change


@pytest.mark.parametrize(
    ("damage", "options", "message"),
    [
        (lambda folder: (folder / "model.onnx.data").unlink(), {},
            "model.onnx.data: missing, export.json names it"),
        (lambda folder: (folder / "model.onnx.data").write_bytes(
            bytes((folder / "model.onnx.data").stat().st_size)),
            {"verify": True}, "its bytes have changed since it was exported"),
        (_change(files={}), {"verify": True}, "export.json: is broken"),
        (_change(format_version=9), {}, "format version 9, this program reads 1"),
        (None, {"backend": "torch"}, "is of format onnx, which onnx runs"),
        (None, {"dtype": "float32"}, "leave dtype out"),
        (None, {"device": "cuda"}, "ONNX runs on a CPU here"),
        (None, {"tokenizer": "nowhere"}, "nowhere: does not exist"),
        (shutil.rmtree, {}, "no such file or folder"),
        (lambda folder: [path.unlink() for path in folder.iterdir()], {},
            "expected a run folder, a checkpoint, an export"),
    ],
)  # fmt: skip
def test_a_bad_export_is_one_message(folders, tmp_path, damage, options, message) -> None:
    folder = shutil.copytree(folders["onnx"], tmp_path / "onnx")
    if damage:
        damage(folder)
    with pytest.raises(Exception, match=message) as error:
        load_model(folder, **options)
    assert getattr(error.value, "exit_code", None) == 2 and "\n" not in str(error.value)


def test_bad_questions(folders) -> None:
    model = load_model(folders["onnx"])
    for ask, message in (
        (lambda: model.generate("hello " * 80), "go beyond the model's 64 positions"),
        (lambda: model.generate(""), "is empty"),
        (lambda: model.generate([1, 262]), "id 262 is outside the vocabulary"),
        (lambda: model.generate("a", top_kk=1), "did you mean predict.top_k"),
        (lambda: model.generate("a", prompt_file="x"), "belongs to --run_mode predict"),
        (lambda: model.stream(["a", "b"]), "continues one prompt once"),
        (lambda: model.score("a", stride=65), "expected 1 to 64"),
        (lambda: model.score_ids([[1, 2]], [0]), "row 0: starts at 0 of 2 tokens"),
        (lambda: model.score_ids([[1, 262]], [1]), "outside 0 to 261"),
    ):
        with pytest.raises(UserError, match=message) as error:
            ask()
        assert error.value.exit_code == 2


def test_stop_strings_and_log_probabilities(folders, expected) -> None:
    model = load_model(folders["onnx"])
    whole = model.decode(expected["tokens"][0])
    stop = whole[5:7]
    settings: dict[str, Any] = {"max_new_tokens": 12, "stop": stop, "logprobs": 2}
    (found,) = model.generate(PROMPTS[0], **settings)
    assert found.text == whole[: whole.index(stop)] and found.finish_reason == "stop_string"
    assert "".join(model.stream(PROMPTS[0], **settings)) == found.text
    ids = model.encode(PROMPTS[0]) + found.tokens
    (score,) = model.score_ids([ids], [len(ids) - len(found.tokens)])
    assert [each.logprob for each in found.logprobs] == pytest.approx(score.logprobs, abs=1e-4)
    assert all(each.id == each.top[0][0] and len(each.top) == 2 for each in found.logprobs)


# ---- a configuration that leaves its model to the checkpoint ----


def model_of(folder: Path, **sections: Any) -> ModelConfig:
    tree = tiny_run(folder / "run")
    del tree["model"]
    return build_config(tree | sections, fill=fill_model).model


def test_sizes_come_from_the_checkpoint_and_given_keys_win(folders, tmp_path) -> None:
    for model in (None, "from_checkpoint", {}):
        found = model_of(tmp_path, checkpoint={"load": str(folders["hf"])}, model=model)
        assert (found.num_layers, found.hidden_size, found.num_heads) == (2, 32, 4)
        assert (found.vocab_size, found.seq_length, found.max_positions) == (262, *[POSITIONS] * 2)
        assert found.attention_dropout == 0.1, "transformers' default"
    given = {"seq_length": 16, "dropout": 0.2}
    found = model_of(tmp_path, checkpoint={"init_from": str(folders["hf"])}, model=given)
    assert (found.seq_length, found.max_positions, found.num_layers) == (16, POSITIONS, 2)
    assert found.dropout == 0.2 and found.attention_dropout is None
    file = tmp_path / "run.yaml"
    file.write_text("output_dir: x\noptimizer: {learning_rate: 1.0}\nmodel: from_checkpoint\n")
    words = [f"checkpoint.load={folders['hf']}", "model.seq_length=8"]
    assert load_config(file, words).model.seq_length == 8


def test_a_whole_section_is_not_changed(folders: dict[str, Path], tmp_path: Path) -> None:
    section = {"num_layers": 1, "hidden_size": 8, "num_heads": 2, "seq_length": 4, "vocab_size": 100}
    found = model_of(tmp_path, checkpoint={"load": str(folders["hf"])}, model=section)
    assert found == ModelConfig.model_validate(section)


def test_finetune_then_eval_and_predict_without_a_model(folders, tmp_path, corpus_prefix, capsys) -> None:
    """The run's own checkpoint is what eval and predict then take, with its tokenizer."""
    file = tmp_path / "run.yaml"
    tree = tiny_run(tmp_path / "run", corpus_prefix, train__max_steps=1)
    del tree["model"]
    file.write_text(json.dumps(tree))
    command = ["--config", str(file), "--run_mode"]
    tuned = [f"checkpoint.init_from={folders['hf']}", "model.seq_length=16"]
    assert main([*command, "finetune", *tuned]) == 0
    assert main([*command, "eval", "model.seq_length=16"]) == 0
    capsys.readouterr()
    assert main([*command, "predict", "predict.prompt=hello", "predict.max_new_tokens=2"]) == 0
    assert capsys.readouterr().out.startswith("Prompt: hello\nGeneration: hello")


def test_without_a_checkpoint(tmp_path: Path) -> None:
    for sections, message in (
        ({"model": "from_checkpoint"}, "model: its sizes come from the checkpoint, and none is"),
        ({"model": "from_nowhere"}, "'from_nowhere': expected from_checkpoint"),
        ({}, "model: required"),
        ({"checkpoint": {"load": "nothing"}}, "nothing: no model here: there is no such file"),
    ):
        with pytest.raises(UserError, match=message) as error:
            model_of(tmp_path, **sections)
        assert error.value.exit_code == 2 and "\n" not in str(error.value)
