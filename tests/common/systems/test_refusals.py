"""What other systems' files and flags are refused for, one row of refusals.yaml each."""

import functools
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.errors import ConfigError
from common.systems.config import COMMAND_LINES, open_config, open_flags
from common.systems.run_state import MODEL_YAML, read_model_yaml
from tests.common.systems.test_config import ORIGINALS
from tests.common.systems.test_flags import SCRIPT, SMALL

MODEL = {
    "num_layers": 1, "hidden_size": 4, "num_heads": 2, "seq_length": 8, "vocab_size": 11,
    "ffn_hidden_size": 8, "max_positions": 8,
}  # fmt: skip
RUN: dict[str, Any] = {
    "state": {
        "step": 3, "consumed_samples": 6, "sample_hash": "", "skipped_steps": 0,
        "skipped_in_a_row": 0, "updated_samples": 12,
    },
    "engine": {"optimizer_steps": 3, "loss_scale": {}, "rng": {}},
    "config": {"optimizer": {"name": "adamw", "decay_steps": 9}, "train": {"global_batch_size": 2}},
}  # fmt: skip


def rows() -> Iterator[Any]:
    table = yaml.safe_load(Path(__file__).with_name("refusals.yaml").read_text(encoding="utf-8"))
    for kind, listed in table.items():
        for *given, message in listed:
            yield pytest.param(kind, given, message, id=f"{kind}: {message[:60]}")


def put(tree: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a copy with other values at dotted keys."""
    tree = json.loads(json.dumps(tree))
    for dotted, value in changes.items():
        *sections, key = dotted.split(".")
        functools.reduce(dict.__getitem__, sections, tree)[key] = value
    return tree


def read(kind: str, given: list[Any]) -> object:
    """Read what is given, in the folder of the process."""
    text = given[0]
    if kind in COMMAND_LINES:
        return open_flags(kind, shlex.split(text))
    if kind == "small":
        words = f"{SMALL} --lr 1e-4 --micro-batch-size 4 --train-iters 5 {text}"
        return open_flags("megatron", words.split())
    if kind == "words":
        return open_config(ORIGINALS / "fleetx" / "pretrain_gpt_1.3B_dp8.yaml", [text])
    if kind == "model_yaml":
        Path(MODEL_YAML).write_text(yaml.safe_dump(put({"model": MODEL, "run": RUN}, text)))
        return read_model_yaml(Path(MODEL_YAML))
    if kind == "model_config":
        sizes = {} if "n_embd" in text else {"n_ctx": 8, "n_head": 1, "vocab_size": 5}
        Path("model.json").write_text(json.dumps(sizes | text))
        return open_config(Path("model.json"), ["data.train=x"])
    if kind == "ds_config":
        folder = ORIGINALS / "modelzoo"
        tree = json.loads((folder / "ds_config.json").read_text())
        if text is not None:
            Path("ds_config.json").write_text(json.dumps(put(tree, text)))
        return open_config(folder / "train_345M.sh")
    if kind == "files":
        for name, text in zip("ab", given, strict=False):
            Path(f"{name}.yaml").write_text(text)
        return open_config(Path("a.yaml"))
    text = f"{SCRIPT}\npython pretrain_gpt.py {text}\n" if kind == "script" else text
    Path("flags.txt").write_text(text)
    return open_config(Path("flags.txt"))


@pytest.mark.parametrize(("kind", "given", "message"), [*rows()])
def test_refused(kind: str, given: list[Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        read(kind, given)
