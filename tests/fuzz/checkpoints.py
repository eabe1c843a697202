"""Checkpoints as a start reads them: found, judged, then state, weights and moments, without a
framework.
"""

from __future__ import annotations

import json
import logging
import shutil
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from common.checkpoint.snapshot import EngineState, make_snapshot
from common.checkpoint.state import TrainState
from common.checkpoint.writer import CheckpointWriter
from common.config.load import build_config
from common.config.schema import RunConfig
from common.log import LOG
from common.resolve.derive import resolve_config
from common.training.loss_scale import LossScale
from common.training.start import where_to_start
from common.weights.names import parameter_shapes
from tests.fuzz.dice import Dice
from tests.fuzz.engine import Case
from tests.fuzz.mutations import (
    UNREADABLE,
    hostile_value,
    remove,
    spoil_file,
    spoil_json,
    spoil_one,
    to_json,
    unreadable,
)

CLASSES = {
    "manifest": "manifest.json: bytes, special files, faults of its tree",
    "known place": "hostile values where the manifest holds what is resumed: step, samples, loss"
    " scale, generators, pieces, files, sizes",
    "weights": "model.safetensors: bytes, its header's tree, special files, that of another step",
    "moments": "optimizer.safetensors: the same",
    "latest": "bytes, special files, names that are no checkpoint, a name with separators",
    "folders": "files and folders removed, exchanged, emptied, renamed, replaced by links; names"
    " that look like checkpoints",
    "unreadable": "a file or folder that cannot be opened, which a later start could",
}
STEPS = (10, 20)
LOSS_SCALE = {"mode": "dynamic", "initial": 1024.0}
TREE: dict[str, Any] = {
    "output_dir": "?", "seed": 5, "precision": "fp16", "loss_scale": LOSS_SCALE,
    "model": {"num_layers": 1, "hidden_size": 8, "num_heads": 2, "seq_length": 4, "vocab_size": 11},
    "optimizer": {"learning_rate": 1e-3}, "train": {"max_steps": 100, "micro_batch_size": 2},
}  # fmt: skip


@dataclass
class Stand:
    """State that a resumed run starts from."""

    state: dict[str, Any]
    engine: dict[str, Any]
    scale: dict[str, Any]
    weights: dict[str, bytes]
    moments: dict[str, bytes]

    def differences(self, other: Stand) -> list[str]:
        found = [
            name
            for name in ("state", "engine", "scale")
            if not same(getattr(self, name), getattr(other, name))
        ]
        for mine, theirs in ((self.weights, other.weights), (self.moments, other.moments)):
            found += [
                name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name)
            ]
        return sorted(found)


def same(one: Any, other: Any) -> bool:
    """Compare with types: 1, 1.0 and True differ here."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


@dataclass
class Prepared:
    run: Path
    stands: dict[int, Stand]
    sizes: dict[str, int] = field(default_factory=dict)


def config_of(run: Path) -> RunConfig:
    return resolve_config(build_config(TREE | {"output_dir": str(run)}))


def prepare(folder: Path) -> Prepared:
    run = folder / "run"
    config = config_of(run)
    shapes = parameter_shapes(config.model)
    for step in STEPS:
        generator = np.random.default_rng(step)
        weights = {
            name: generator.standard_normal(shape).astype(np.float32)
            for name, shape in shapes.items()
        }
        moments = {
            f"{name}.{part}": np.square(generator.standard_normal(shape)).astype(np.float32)
            for name, shape in shapes.items()
            for part in ("exp_avg", "exp_avg_sq")
        }
        scale = LossScale(config.loss_scale)
        scale.value, scale.finite_steps = 512.0 * step, step
        state = TrainState(
            step=step,
            consumed_samples=2 * step,
            sample_hash=f"{step:016x}",
            skipped_steps=1,
            losses=[2.5, 2.25],
            grad_norms=[1.0, 0.5],
        )
        engine = EngineState(
            optimizer_steps=step - 1,
            loss_scale=scale.state(),
            rng={"torch": [{"cpu": "QUJD" * 20}]},
        )
        snapshot = make_snapshot(
            config,
            state,
            weights=weights,
            moments=moments,
            engine=engine,
            versions={"backend": "torch"},
            extra={"data": "f" * 16, "tokenizer": None},
        )
        with CheckpointWriter(run / "checkpoints", asynchronous=False) as writer:
            writer.save(snapshot)
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": step, "loss": 2.5}) + "\n" for step in range(STEPS[-1]))
    )
    stands = {}
    for step in STEPS:
        stand = read(run, str(run / "checkpoints" / f"step_{step:08d}"))[0]
        assert stand is not None and stand.state["step"] == step
        stands[step] = stand
    assert not stands[20].differences(read(run)[0] or stands[10])
    return Prepared(run=run, stands=stands)


@contextmanager
def log_lines() -> Iterator[list[logging.LogRecord]]:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    before = LOG.level
    LOG.setLevel(logging.WARNING)
    LOG.addHandler(handler)
    try:
        yield records
    finally:
        LOG.removeHandler(handler)
        LOG.setLevel(before)


def read(run: Path, resume: str = "auto") -> tuple[Stand | None, list[str]]:
    """Do what a start does, and return where it stands, None for a fresh start, with the
    warnings.
    """
    config = config_of(run)
    config = config.model_copy(
        update={"checkpoint": config.checkpoint.model_copy(update={"resume": resume})}
    )
    data: Any = SimpleNamespace(
        tokenizer_record=None, fingerprint="f" * 16, samples_per_epoch=100, no_validation=None
    )
    with log_lines() as records:
        start = where_to_start(config, data)
        warnings = [record.getMessage() for record in records if record.levelno >= logging.WARNING]
        if start.resume is None:
            return None, warnings
        scale = LossScale(config.loss_scale)
        reader = start.resume
        state, engine = reader.states(config, scale)
        weights = {name: values.tobytes() for name, values in reader.weights(config.model)}
        moments = {
            f"{name}.{part}": values.tobytes()
            for name, part, values in reader.moments(config, engine.optimizer_steps)
        }
        warnings = [record.getMessage() for record in records if record.levelno >= logging.WARNING]
    stand = Stand(
        state=state.to_dict(),
        engine=vars(engine),
        scale=scale.state(),
        weights=weights,
        moments=moments,
    )
    return stand, warnings


def judge_stand(
    found: tuple[Stand | None, list[str]], stands: dict[int, Stand], *, older: bool = False
) -> str | None:
    """Accept the newest checkpoint, or with a warning an older one; ``older``: the folder itself
    says that this one is meant.
    """
    stand, warnings = found
    if stand is None:
        return "the run starts over in the folder of a run"
    if not stand.differences(stands[STEPS[-1]]):
        return None
    if not stand.differences(stands[STEPS[0]]):
        return (
            None
            if warnings or older
            else "the run goes back to the older checkpoint without a word"
        )
    nearest = stands.get(stand.state.get("step"), stands[STEPS[-1]])
    return f"another state was resumed: {', '.join(stand.differences(nearest)[:5])}"


KNOWN = (
    ("state", "step"), ("state", "consumed_samples"), ("state", "sample_hash"),
    ("state", "skipped_steps"), ("state", "skipped_in_a_row"), ("state", "updated_samples"),
    ("state", "losses"),
    ("state", "grad_norms"), ("engine", "optimizer_steps"), ("engine", "loss_scale"),
    ("engine", "loss_scale", "value"), ("engine",
    "loss_scale", "mode"),
    ("engine", "loss_scale", "finite_steps"), ("engine", "rng"), ("engine", "rng", "torch"),
    ("engine", "rng", "torch", 0), ("config",),
    ("config", "model"), ("config", "optimizer"),
    ("config", "optimizer", "name"), ("config", "model", "num_heads"),
    ("config", "model", "layer_norm_epsilon"), ("tokenizer",),
    ("data",), ("format_version",), ("files",),
    ("files", "model.safetensors"), ("files", "model.safetensors", "bytes"),
    ("files", "model.safetensors", "crc32"), ("files",
    "optimizer.safetensors"),
    ("files", "model.safetensors", "pieces"), ("files", "optimizer.safetensors", "pieces"),
)  # fmt: skip


def _known_place(dice: Dice, content: bytes) -> tuple[bytes, str, str]:
    tree = json.loads(content)
    place = dice.pick(KNOWN)
    parent = tree
    for key in place[:-1]:
        parent = parent[key]
    kind, value = hostile_value(dice)
    if "pieces" in place and dice.chance(0.7):
        span = dice.pick(
            (
                [[0, 4]],
                [[0, 0]],
                [[4, 0]],
                [[-1, 2]],
                [[0, 2**63]],
                [[0.5, 1]],
                [],
                None,
                5,
                [[0]],
                [[0, 1, 2]],
                [["a", "b"]],
                [[0, 11], [0, 8]],
                [[0, 5], [0, 8]],
            )
        )
        kind, value = "pieces", {dice.pick(("wte.weight", "wte.weight.exp_avg", "x")): span}
    elif place == ("files",) and dice.chance(0.7):
        name = dice.pick(
            (
                "../x",
                "/etc/hostname",
                "",
                ".",
                "model.rank_00000.safetensors",
                "model.rank_../../x.safetensors",
                "a\0b",
                "manifest.json",
                "latest",
            )
        )
        kind, value = (
            "a name of a file",
            {**parent["files"], name: {"bytes": dice.pick((0, 9, 300)), "crc32": 0}},
        )
    elif place[-1] in (
        "step",
        "consumed_samples",
        "optimizer_steps",
        "skipped_steps",
    ) and dice.chance(0.5):
        kind, value = "another number", dice.pick((0, 1, 9, 21, 11, 2**31, 19, 38, 20.0, True))
    parent[place[-1]] = value
    return to_json(tree).encode("utf-8", "surrogatepass"), kind, ".".join(map(str, place))


SEAL = b',\n "crc32": '


def _sealed(content: bytes) -> bytes:
    """Return a manifest whose last key is the CRC-32 of what is before it, as one is that was
    forged with care.
    """
    tree = json.loads(content)
    tree.pop("crc32", None)
    before = json.dumps(tree, indent=1).encode().rstrip(b"\n}")
    return before + SEAL + str(zlib.crc32(before)).encode() + b"\n}"


def _as_written(
    path: Path, found: tuple[Stand | None, list[str]], stands: dict[int, Stand]
) -> str | None:
    """Compare a forged manifest that was accepted with what it says itself."""
    stand = found[0]
    if stand is None:
        return "the run starts over in the folder of a run"
    words = json.loads(path.read_bytes())
    for key, value in stand.state.items():
        if key in words["state"] and not same(words["state"][key], value):
            return f"state.{key} was written as {words['state'][key]!r} and read as {value!r}"
    for key in (
        "step", "consumed_samples", "updated_samples", "skipped_steps", "skipped_in_a_row",
    ):  # fmt: skip
        if type(stand.state[key]) is not int or stand.state[key] < 0:
            return f"state.{key} is {stand.state[key]!r}"
    if type(stand.engine["optimizer_steps"]) is not int or not stand.engine["optimizer_steps"] >= 0:
        return f"optimizer_steps is {stand.engine['optimizer_steps']!r}"
    if not 0 < stand.scale["value"] < float("inf"):
        return f"the loss scale is {stand.scale['value']!r}"
    known = [
        other
        for other in stands.values()
        if other.weights == stand.weights and other.moments == stand.moments
    ]
    return None if known else "other weights or moments were read"


def _header(dice: Dice, content: bytes) -> tuple[bytes, str, str]:
    """Change the tree of a safetensors header."""
    length = int.from_bytes(content[:8], "little")
    text, kind, key = spoil_json(dice, content[8 : 8 + length])
    return len(text).to_bytes(8, "little") + text + content[8 + length :], kind, key


def make(dice: Dice, prepared: Prepared, folder: Path) -> Case:
    kind = dice.pick(
        (
            "manifest",
            "manifest",
            "known place",
            "known place",
            "weights",
            "moments",
            "latest",
            "folders",
            "folders",
            "unreadable",
        )
    )
    run = folder / "run"
    shutil.copytree(prepared.run, run)
    checkpoints = run / "checkpoints"
    newest = checkpoints / f"step_{STEPS[-1]:08d}"
    opened: tuple[str, Path] | None = None
    forged = False
    if kind == "manifest":
        about = spoil_one(dice, newest / "manifest.json", structured=spoil_json)
    elif kind == "known place":
        path = newest / "manifest.json"
        content, fault, place = _known_place(dice, path.read_bytes())
        forged = SEAL in path.read_bytes() and dice.chance(0.7)
        about = f"{fault} at {place}{', sealed again' if forged else ''}"
        try:
            path.write_bytes(_sealed(content) if forged else content)
        except (ValueError, RecursionError):  # no JSON that could be sealed
            path.write_bytes(content)
            forged = False
    elif kind in ("weights", "moments"):
        name = {"weights": "model.safetensors", "moments": "optimizer.safetensors"}[kind]
        if dice.chance(0.1):
            shutil.copy(checkpoints / f"step_{STEPS[0]:08d}" / name, newest / name)
            about = "of another step"
        else:
            about = spoil_one(dice, newest / name, structured=_header)
    elif kind == "latest":
        about = _spoil_latest(dice, checkpoints / "latest")
    elif kind == "folders":
        about = _spoil_folders(dice, run, checkpoints, newest)
    else:
        path = dice.pick(
            (
                checkpoints,
                newest,
                newest / "manifest.json",
                checkpoints / "latest",
                newest / "model.safetensors",
                newest / "optimizer.safetensors",
                run,
            )
        )
        opened = (dice.pick(list(UNREADABLE)), path)
        about = f"{path.name}: {opened[0]}"
    resume = dice.pick(("auto", "auto", "auto", "latest", str(newest), str(run), str(checkpoints)))

    def start() -> tuple[Stand | None, list[str]]:
        with ExitStack() as stack:
            if opened is not None:
                stack.enter_context(unreadable(*opened))
            return read(run, resume)

    named = (
        (checkpoints / "latest").read_bytes()[:100]
        if kind == "latest" and _is_small(checkpoints / "latest")
        else b""
    )
    older = (
        about in ("exchanged", "latest and a manifest removed") or named.strip() == b"step_00000010"
    )

    def check(found: tuple[Stand | None, list[str]]) -> str | None:
        if forged:
            return _as_written(newest / "manifest.json", found, prepared.stands)
        return judge_stand(found, prepared.stands, older=older)

    return Case(
        kind=kind,
        run=start,
        names=(str(run),),
        check=check,
        about=f"resume={Path(resume).name}: {about}",
    )


def _is_small(path: Path) -> bool:
    return path.is_file() and path.stat().st_size < 10_000


def _spoil_latest(dice: Dice, path: Path) -> str:
    if dice.chance(0.5):
        return spoil_one(dice, path)
    name = dice.pick(("step_00000010", "step_00000099", "", "\n", ".", "..",
    "../checkpoints/step_00000010",
    "step_00000020/manifest.json", "step_20", "x" * 5000, "a\0b", "\u0663",
                      "step_00000020\nstep_00000010", "/etc", "step_00000020\0"))  # fmt: skip
    path.write_text(name)
    return f"names {name[:40]!r}"


def _spoil_folders(dice: Dice, run: Path, checkpoints: Path, newest: Path) -> str:
    older = checkpoints / f"step_{STEPS[0]:08d}"
    kind = dice.pick(("a file removed", "a special file", "both manifests removed", "newest"
        " removed", "all removed", "newest emptied",
    "exchanged", "newest a file", "checkpoints a file", "newest a link",
                      "a link to itself", "an odd name", "a left-over", "renamed", "latest removed",
                      "latest and a manifest removed"))  # fmt: skip
    if kind == "a file removed":
        dice.pick(
            (
                newest / "manifest.json",
                newest / "model.safetensors",
                newest / "optimizer.safetensors",
            )
        ).unlink()
    elif kind == "a special file":
        path = dice.pick(
            (
                newest / "manifest.json",
                newest / "model.safetensors",
                newest / "optimizer.safetensors",
                checkpoints / "latest",
            )
        )
        spoil_file(
            dice.pick(
                ("a folder", "a FIFO", "a link to itself", "a link to /dev/zero", "empty file")
            ),
            path,
        )
    elif kind == "both manifests removed":
        (newest / "manifest.json").unlink()
        (older / "manifest.json").unlink()
    elif kind == "newest removed":
        remove(newest)
    elif kind == "all removed":
        remove(newest)
        remove(older)
    elif kind == "newest emptied":
        remove(newest)
        newest.mkdir()
    elif kind == "exchanged":
        newest.rename(checkpoints / "x")
        older.rename(newest)
        (checkpoints / "x").rename(older)
    elif kind == "newest a file":
        remove(newest)
        newest.write_text("x")
    elif kind == "checkpoints a file":
        remove(checkpoints)
        checkpoints.write_text("x")
    elif kind == "newest a link":
        newest.rename(run / "elsewhere")
        newest.symlink_to("../elsewhere")
    elif kind == "a link to itself":
        remove(newest)
        newest.symlink_to(newest.name)
    elif kind == "an odd name":
        shutil.copytree(
            older,
            checkpoints
            / dice.pick(
                (
                    "step_\u0663\u0663\u0663\u0663\u0663\u0663\u0663\u0663",
                    "step_99999999999999999999",
                    "step_000000020",
                    "step_x",
                    "step_-0000001",
                )
            ),
        )
    elif kind == "a left-over":
        shutil.copytree(
            older,
            checkpoints
            / dice.pick(
                (".step_00000030.tmp", ".step_00000020.replaced.tmp", ".step_00000010.doomed.tmp")
            ),
        )
    elif kind == "renamed":
        newest.rename(checkpoints / "step_00000030")
    elif kind == "latest removed":
        (checkpoints / "latest").unlink()
    else:
        (checkpoints / "latest").unlink()
        (newest / "manifest.json").unlink()
    return kind
