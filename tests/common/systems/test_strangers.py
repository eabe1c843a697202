"""Weights as people have them: almost, or not at all, those of a GPT-2 of transformers."""

import re
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from common.conversion.convert import convert  # noqa: E402
from common.conversion.foreign import explain  # noqa: E402
from common.errors import UserError  # noqa: E402
from common.inference.source import find_source  # noqa: E402
from common.systems.table import FORMATS, detect  # noqa: E402

HEAD, TABLE = "lm_head.weight", "transformer.wte.weight"
IDS = torch.arange(9)[None]


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 12, "n_head": 3, "n_positions": 16, "vocab_size": 40}
    ends = {"bos_token_id": None, "eos_token_id": None}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ends)).eval()


def put(folder: Path, model: Any, content: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    torch.save(content, folder / "pytorch_model.bin")
    return folder


def plain(model: Any) -> dict[str, Any]:
    return {name: value for name, value in model.state_dict().items() if name != HEAD}


def prefixed(prefix: str, model: Any) -> dict[str, Any]:
    return {f"{prefix}{name}": value for name, value in plain(model).items()}


OPENED: dict[str, tuple[Any, list[str]]] = {
    "only the head": (
        lambda model: {HEAD if name == TABLE else name: v for name, v in plain(model).items()},
        [HEAD],
    ),
    "DialoGPT's head": (
        lambda model: plain(model) | {"lm_head.decoder.weight": model.lm_head.weight},
        ["lm_head.decoder.weight"],
    ),
    "value head": (
        lambda model: plain(model) | {f"v_head.summary.{n}": torch.ones(1) for n in "ab"},
        ["v_head.summary.a", "v_head.summary.b"],
    ),
    "class head": (
        lambda model: plain(model) | {"score.weight": torch.ones(2, 12)},
        ["score.weight"],
    ),
    "DistributedDataParallel, torch.compile": (
        lambda model: prefixed("module._orig_mod.", model),
        ["module._orig_mod."],
    ),
    "state_dict": (
        lambda model: {"state_dict": prefixed("model.", model), "extra": torch.ones(1)},
        ["extra", "state_dict.model."],
    ),
}


@pytest.mark.parametrize("kind", OPENED)
def test_other_heads_and_wrappers_are_opened(tmp_path: Path, model: Any, kind: str) -> None:
    content, left_out = OPENED[kind]
    source = put(tmp_path / "source", model, content(model))
    result = convert(source, tmp_path / "hf", target_format="hf")
    assert sorted(result["ignored"]) == sorted(left_out)
    found = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        assert torch.equal(found(IDS).logits, model(IDS).logits)


def test_a_folder_of_the_hubs_cache_stands_for_its_snapshot(tmp_path: Path, model: Any) -> None:
    folder = tmp_path / "models--openai-community--gpt2"
    snapshot = put(folder / "snapshots" / "607a30d7", model, plain(model))
    put(folder / "snapshots" / "older", model, {})
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("607a30d7")
    assert detect(folder) == "hf"
    assert find_source(folder).folder == snapshot, "where its tokenizer is"
    with FORMATS["hf"].open(folder) as weights:  # type: ignore[misc]
        assert weights.path == snapshot and weights.tensors["wte.weight"].shape == (40, 12)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:607a\nsize 548105171\n"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "weights in Git LFS": ({"pytorch_model.bin": POINTER}, "pytorch_model.bin: is a Git LFS poi"),
    "tokenizer in Git LFS": ({"vocab.json": POINTER}, r"vocab.json: is a Git LFS pointer; run git"),
    "config in Git LFS": ({"config.json": POINTER}, r"config.json: is a Git LFS pointer; run git"),
    "an unknown tensor": (
        {"pytorch_model.bin": lambda model: plain(model) | {"my.thing": torch.ones(1)}},
        r"unexpected my.thing \[1\]. Give the model section .*, or save it without what a GPT-2",
    ),
    "nanoGPT": (
        {"config.json": None, "pytorch_model.bin": None, "ckpt.pt": b""},
        "it is nanoGPT's, whose GELU is the exact one",
    ),
    "nanoGPT beside a config": (
        {"pytorch_model.bin": lambda model: {"model": plain(model), "model_args": {"n_layer": 2}}},
        "pytorch_model.bin: it is nanoGPT's",
    ),
    "PEFT": (
        {"pytorch_model.bin": None, "adapter_config.json": b"{}"},
        "it is an adapter of PEFT.*merge_and_unload",
    ),
    "OpenAI": (
        {"pytorch_model.bin": None, "hparams.json": b"{}", "model.ckpt.index": b""},
        r"OpenAI's own TensorFlow checkpoint; .*hf://openai-community/gpt2",
    ),
    "TensorFlow": (
        {"pytorch_model.bin": None, "tf_model.h5": b""},
        r"for TensorFlow only; .*from_tf=True",
    ),
    "no config": ({"config.json": None}, "its weights lack config.json"),
    "DeepSpeed": (
        {
            "pytorch_model.bin": None,
            "latest": b"global_step5",
            "global_step5/mp_rank_00_model_states.pt": lambda model: {
                "module": prefixed("module.", model), "mp_world_size": 1, "dp_world_size": 1,
            },
        },
        "below DeepSpeed; run DeepSpeed's own python .*source/zero_to_fp32.py .*source OUTPUT",
    ),
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
    if "DeepSpeed" not in kind and files.get("pytorch_model.bin", b"") is None:
        with pytest.raises(UserError, match=message):
            find_source(source)
        assert re.search(message, explain(source, "checkpoint.init_from"))
