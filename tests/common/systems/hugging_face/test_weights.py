"""Weights as people have them: a GPT-2 of transformers, old or new, or almost, or not at all."""

import json
import re
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from common.conversion.convert import convert  # noqa: E402
from common.errors import ConfigError, UserError  # noqa: E402
from common.inference.source import find_source  # noqa: E402
from common.systems.hugging_face.weights import open_hugging_face, read_config  # noqa: E402
from common.systems.table import FORMATS, detect, explain  # noqa: E402
from tests.common.systems.tiny_weights import Evil  # noqa: E402
from tools.convert_weight import main  # noqa: E402

HEAD, TABLE = "lm_head.weight", "transformer.wte.weight"
IDS = torch.arange(16)[None]
SIZES = {"n_layer": 2, "n_embd": 12, "n_head": 3, "n_positions": 16, "vocab_size": 40}


def model_of(**fields: Any) -> Any:
    torch.manual_seed(0)
    ends = {"bos_token_id": None, "eos_token_id": None}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES, **ends, **fields)).eval()


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of()


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(IDS).logits


def opened(folder: Path) -> Any:
    return transformers.GPT2LMHeadModel.from_pretrained(folder).eval()


def sharp_logits(**fields: Any) -> Any:
    """Return those of weights that are so large that the activation and the scores matter."""
    model = model_of(**fields, attn_implementation="eager")
    for parameter in model.parameters():
        parameter.data.mul_(10)
    return logits(model)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("reorder_and_upcast_attn", True),
        ("activation_function", "gelu_pytorch_tanh"),
        ("activation_function", "gelu_fast"),
        ("scale_attn_weights", False),
        ("scale_attn_by_inverse_layer_idx", True),
        ("tie_word_embeddings", False),
    ],
)
def test_a_field_is_taken_if_the_function_is_the_same(tmp_path: Path, name: str, value: Any) -> None:
    same = torch.allclose(sharp_logits(**{name: value}), sharp_logits(), rtol=0, atol=1e-4)
    (tmp_path / "config.json").write_text(json.dumps(SIZES | {name: value}))
    refused = pytest.raises(ConfigError, match=f"{name}=.* it would compute otherwise")
    with nullcontext() if same else refused:
        assert read_config(tmp_path / "config.json").num_heads == 3


@pytest.mark.parametrize("activation", ["gelu_new", "gelu", "quick_gelu"])
def test_each_activation_is_written_as_it_was_read(tmp_path: Path, activation: str) -> None:
    model = model_of(activation_function=activation)
    model.save_pretrained(tmp_path / "theirs")
    words = ["--to", "hf", "--input", str(tmp_path / "theirs"), "--output", str(tmp_path / "back")]
    assert open_hugging_face(tmp_path / "theirs").model.activation == activation and main(words) == 0
    assert torch.equal(logits(opened(tmp_path / "back")), logits(model))


def put(folder: Path, model: Any, content: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    torch.save(content, folder / "pytorch_model.bin")
    return folder


def plain(model: Any) -> dict[str, Any]:
    return {name: value for name, value in model.state_dict().items() if name != HEAD}


def prefixed(prefix: str, model: Any) -> dict[str, Any]:
    return {f"{prefix}{name}": value for name, value in plain(model).items()}


MASKS = {f"h.{layer}.attn.bias": torch.ones(1, 1, 16, 16) for layer in range(2)}
OPENED: dict[str, tuple[Any, list[str]]] = {
    # what is saved, and what of it is left out
    "only the head": (
        lambda model: {HEAD if name == TABLE else name: v for name, v in plain(model).items()},
        [HEAD]),
    "a file of 2019": (  # no prefix, masks, no head
        lambda model: dict(model.transformer.state_dict()) | MASKS, [*MASKS]),
    "DialoGPT's head": (
        lambda model: plain(model) | {"lm_head.decoder.weight": model.lm_head.weight},
        ["lm_head.decoder.weight"]),
    "value head": (
        lambda model: plain(model) | {f"v_head.summary.{n}": torch.ones(1) for n in "ab"},
        ["v_head.summary.a", "v_head.summary.b"]),
    "class head": (lambda model: plain(model) | {"score.weight": torch.ones(2)}, ["score.weight"]),
    "DistributedDataParallel, torch.compile": (
        lambda model: prefixed("module._orig_mod.", model), ["module._orig_mod."]),
    "state_dict": (
        lambda model: {"state_dict": prefixed("model.", model), "extra": torch.ones(1)},
        ["extra", "state_dict.model."]),
}  # fmt: skip


@pytest.mark.parametrize("kind", OPENED)
def test_other_heads_and_wrappers_are_opened(tmp_path: Path, model: Any, kind: str) -> None:
    content, left_out = OPENED[kind]
    source = put(tmp_path / "source", model, content(model))
    result = convert(source, tmp_path / "hf", target_format="hf")
    assert sorted(result["ignored"]) == sorted(left_out)
    assert torch.equal(logits(opened(tmp_path / "hf")), logits(model))


def test_a_folder_of_the_hubs_cache_stands_for_its_snapshot(tmp_path: Path, model: Any) -> None:
    folder = tmp_path / "models--openai-community--gpt2"
    snapshot = put(folder / "snapshots" / "607a30d7", model, plain(model))
    put(folder / "snapshots" / "older", model, {})
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("607a30d7")
    assert detect(folder) == "hf"
    assert find_source(folder).folder == snapshot, "where its tokenizer is"
    weights = FORMATS["hf"].open(folder)  # type: ignore[misc]
    assert weights.path == snapshot and weights.tensors["wte.weight"].shape == (40, 12)


CONFIG = Path(__file__).parents[1] / "originals" / "gpt2_chinese" / "config.json"
"""As transformers 2.1.1 writes it, of the small sizes here."""


@pytest.mark.parametrize(("as_zip", "mask"), [(False, torch.float32), (True, torch.uint8)])
def test_a_folder_of_gpt2_chinese_is_read(tmp_path: Path, model: Any, as_zip: bool, mask: torch.dtype) -> None:
    """A config of other fields, torch's old files, masks and a head."""
    state = model.state_dict()
    causal = torch.tril(torch.ones(16, 16, dtype=mask)).view(1, 1, 16, 16)
    for layer in range(2):
        state[f"transformer.h.{layer}.attn.bias"] = causal
        state[f"transformer.h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    head, table = state["lm_head.weight"], state["transformer.wte.weight"]
    assert head.data_ptr() == table.data_ptr(), "one storage, under two names"
    source = tmp_path / "final_model"
    source.mkdir()
    torch.save(state, source / "pytorch_model.bin", _use_new_zipfile_serialization=as_zip)
    fields = json.loads(CONFIG.read_text())
    fields = {name: value for name, value in fields.items() if as_zip or name != "n_positions"}
    (source / "config.json").write_text(json.dumps(fields))
    (source / "vocab.txt").write_text("[SEP]\n[CLS]\n[MASK]\n[PAD]\n[UNK]\n她\n", encoding="utf-8")
    assert detect(source) == "hf"
    result = convert(source, tmp_path / "hf", target_format="hf", verify=True)
    masks = ["causal mask of an old file"] * 4
    assert sorted(result["ignored"].values()) == [*masks, "tied to transformer.wte.weight"]
    assert (tmp_path / "hf" / "vocab.txt").read_bytes() == (source / "vocab.txt").read_bytes()
    assert torch.equal(logits(opened(tmp_path / "hf")), logits(model))


def test_a_checkpoint_of_lightning_is_read(tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The later train.py leaves it. The callbacks' classes are keys, and nothing of them runs.
    config.json may stand beside it, or the model is given.
    """
    module = ModuleType("pytorch_lightning")
    callback = type("ModelCheckpoint", (), {"__module__": module.__name__})
    module.ModelCheckpoint = callback  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    moved = torch.ones(2, requires_grad=True)
    (optimizer := torch.optim.AdamW([moved])).step(lambda: moved.sum().backward())
    file = tmp_path / "epoch=0-step=99.ckpt"
    saved = {
        "epoch": 0, "global_step": 99, "pytorch-lightning_version": "1.2.6",
        "state_dict": {f"model.{name}": value for name, value in model.state_dict().items()},
        "callbacks": {callback: {"best_model_score": torch.tensor(1.0)}},
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [{"lr_lambdas": [None]}],
    }  # fmt: skip
    torch.save(saved, file)
    assert detect(file) == "hf"
    with pytest.raises(ConfigError, match=r"put config\.json beside the weights"):
        convert(file, tmp_path / "none", target_format="hf")
    shutil.copy(CONFIG, tmp_path)
    convert(file, tmp_path / "hf", target_format="hf", verify=True)
    found = opened(tmp_path / "hf")
    (tmp_path / "config.json").rename(tmp_path / "model_config.json")
    own = read_config(tmp_path / "model_config.json")
    table = open_hugging_face(file, own).tensors["wte.weight"].load()
    for state in (found.state_dict(), {"transformer.wte.weight": torch.tensor(table)}):
        assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())


def config(**changes: Any) -> dict[str, bytes]:
    return {"config.json": json.dumps(SIZES | changes).encode()}


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:607a\nsize 548105171\n"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "weights in Git LFS": ({"pytorch_model.bin": POINTER}, "pytorch_model.bin: is a Git LFS poi"),
    "tokenizer in Git LFS": ({"vocab.json": POINTER}, r"vocab.json: is a Git LFS pointer; run git"),
    "config in Git LFS": ({"config.json": POINTER}, r"config.json: is a Git LFS pointer; run git"),
    "an unknown tensor": (
        {"pytorch_model.bin": lambda model: plain(model) | {"my.thing": torch.ones(1)}},
        r"unexpected my.thing \[1\]. Give the model section .*, or save it without what a GPT-2"),
    "nanoGPT": (
        {"config.json": None, "pytorch_model.bin": None, "ckpt.pt": b""},
        "it is nanoGPT's, whose GELU is the exact one"),
    "nanoGPT beside a config": (
        {"pytorch_model.bin": lambda model: {"model": plain(model), "model_args": {"n_layer": 2}}},
        "pytorch_model.bin: it is nanoGPT's"),
    "PEFT": ({"pytorch_model.bin": None, "adapter_config.json": b"{}"}, "it is an adapter of PEFT.*merge_and_unload"),
    "OpenAI": (
        {"pytorch_model.bin": None, "hparams.json": b"{}", "model.ckpt.index": b""},
        r"OpenAI's own TensorFlow checkpoint; .*hf://openai-community/gpt2"),
    "TensorFlow": ({"pytorch_model.bin": None, "tf_model.h5": b""}, r"for TensorFlow only; .*from_tf=True"),
    "another model": (config(model_type="gptj"), "model_type='gptj'; the models here are GPT-2"),
    "no config": ({"config.json": None}, "its weights lack config.json"),
    "an empty config": (
        {"config.json": b"{}"}, "no config of a GPT-2: n_layer, n_embd, n_head, vocab_size, n_positions missing"),
    "more blocks": (config(n_layer=3), r"missing transformer.h.2.ln_1.weight \[12\]"),
    "far more blocks": (config(n_layer=10**9), "1000000000 blocks; expected 10000 at most"),
    "heads in words": (config(n_head="three"), "num_heads='three' of the model: Input should be a valid integer"),
    "no weights": ({"pytorch_model.bin": None}, "source: no weights of a known format here; say --from"),
    "a command in the pickle": (
        {"pytorch_model.bin": lambda _: {TABLE: Evil()}}, "pytorch_model.bin: its pickle names posix.system"),
    "another head": (
        {"pytorch_model.bin": lambda model: plain(model) | {HEAD: torch.ones(40, 12)}},
        "lm_head.weight differs from the embedding"),
    "int8": (
        {"pytorch_model.bin": lambda model: {name: x.to(torch.int8) for name, x in plain(model).items()}},
        "are int8, as a quantized model's"),
    "DeepSpeed": (
        {"pytorch_model.bin": None, "latest": b"global_step5",
         "global_step5/mp_rank_00_model_states.pt": lambda model: {
             "module": prefixed("module.", model), "mp_world_size": 1, "dp_world_size": 1}},
        "below DeepSpeed; run DeepSpeed's own python .*source/zero_to_fp32.py .*source OUTPUT"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_other_files_are_called_by_their_name(tmp_path: Path, model: Any, kind: str) -> None:
    files, message = REFUSED[kind]
    source = put(tmp_path / "source", model, plain(model))
    for name, content in files.items():
        file = source / name
        file.parent.mkdir(exist_ok=True)
        if content is None:
            file.unlink()
        elif callable(content):
            torch.save(content(model), file)
        else:
            file.write_bytes(content)
    with pytest.raises(UserError, match=message):
        convert(source, tmp_path / "hf", target_format="hf")
    assert not (tmp_path / "hf").exists()
    if kind not in ("DeepSpeed", "no weights") and files.get("pytorch_model.bin", b"") is None:
        with pytest.raises(UserError, match=message):
            find_source(source)
        assert re.search(message, explain(source, "checkpoint.init_from"))
