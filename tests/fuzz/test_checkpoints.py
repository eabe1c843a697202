"""Checkpoints as a start reads them: found, judged, then state, weights and moments, without a
framework. What is accepted is the state that was saved; an older one only with a warning.
"""

from __future__ import annotations

import json
import logging
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

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
from tests.fuzz.faults import (
    EDGES,
    FAULTS,
    FILES,
    NUMBERS,
    UNREADABLE,
    VALUES,
    Fault,
    changed_json,
    remove,
    spoiled,
    to_json,
    tree_faults,
    unreadable,
)
from tests.fuzz.judge import Judge

OLDER, NEWEST = "step_00000010", "step_00000020"
LOSS_SCALE = {"mode": "dynamic", "initial": 1024.0}
TREE: dict[str, Any] = {
    "output_dir": "?", "seed": 5, "precision": "fp16", "loss_scale": LOSS_SCALE,
    "model": {"num_layers": 1, "hidden_size": 8, "num_heads": 2, "seq_length": 4, "vocab_size": 11},
    "optimizer": {"learning_rate": 1e-3}, "train": {"max_steps": 100, "micro_batch_size": 2},
}  # fmt: skip


class Stand:
    """State that a resumed run starts from: of the run, engine and loss scale, and arrays."""

    def __init__(self, *states: dict[str, Any], arrays: dict[str, bytes]) -> None:
        self.state, self.engine, self.scale = states
        self.arrays = arrays

    def __eq__(self, other: object) -> bool:
        """Compare with types: 1, 1.0 and True differ here."""
        return isinstance(other, Stand) and self.arrays == other.arrays and self.text == other.text

    def __repr__(self) -> str:
        return f"Stand(step {self.state['step']})"

    @property
    def text(self) -> str:
        return json.dumps([self.state, self.engine, self.scale], sort_keys=True)


def _config(run: Path, resume: str = "auto") -> RunConfig:
    tree = TREE | {"output_dir": str(run), "checkpoint": {"resume": resume}}
    return resolve_config(build_config(tree))


def _save(run: Path, step: int) -> None:
    config, generator = _config(run), np.random.default_rng(step)
    shapes = parameter_shapes(config.model).items()
    scale = LossScale(config.loss_scale)
    scale.value, scale.finite_steps = 512.0 * step, step
    state = TrainState(
        step=step, consumed_samples=2 * step, sample_hash=f"{step:016x}", skipped_steps=1,
        losses=[2.5, 2.25], grad_norms=[1.0, 0.5],
    )  # fmt: skip
    engine = EngineState(
        optimizer_steps=step - 1, loss_scale=scale.state(), rng={"torch": [{"cpu": "QUJD" * 20}]}
    )

    def array(shape: tuple[int, ...]) -> np.ndarray:
        return np.square(generator.standard_normal(shape)).astype(np.float32)

    snapshot = make_snapshot(
        config, state, engine=engine, versions={"backend": "torch"},
        weights={name: array(shape) for name, shape in shapes},
        moments={f"{name}.{part}": array(shape) for name, shape in shapes
                 for part in ("exp_avg", "exp_avg_sq")},
        extra={"data": "f" * 16, "tokenizer": None},
    )  # fmt: skip
    with CheckpointWriter(run / "checkpoints", asynchronous=False) as writer:
        writer.save(snapshot)


@contextmanager
def warnings() -> Iterator[list[logging.LogRecord]]:
    records: list[logging.LogRecord] = []
    handler, level = logging.Handler(logging.WARNING), LOG.level
    handler.emit = records.append  # type: ignore[method-assign]
    LOG.setLevel(logging.WARNING)
    LOG.addHandler(handler)
    try:
        yield records
    finally:
        LOG.removeHandler(handler)
        LOG.setLevel(level)


def start(run: Path, resume: str = "auto") -> Stand | None:
    """Do what a start does, and return where it stands, None for a fresh start."""
    config = _config(run, resume)
    data: Any = SimpleNamespace(
        tokenizer_record=None, fingerprint="f" * 16, samples_per_epoch=100, no_validation=None
    )
    found = where_to_start(config, data).resume
    if found is None:
        return None
    scale = LossScale(config.loss_scale)
    state, engine = found.states(config, scale)
    arrays = {name: values.tobytes() for name, values in found.weights(config.model)}
    for name, part, values in found.moments(config, engine.optimizer_steps):
        arrays[f"{name}.{part}"] = values.tobytes()
    return Stand(state.to_dict(), vars(engine), scale.state(), arrays=arrays)


@dataclass
class Whole:
    run: Path
    older: Stand | None
    newest: Stand | None


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    run = tmp_path_factory.mktemp("whole") / "run"
    for step in (10, 20):
        _save(run, step)
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n' * 20)
    stands = [start(run, str(run / "checkpoints" / name)) for name in (OLDER, NEWEST)]
    assert [stand and stand.state["step"] for stand in stands] == [10, 20]
    return Whole(run, *stands)


RESUME = st.sampled_from(("auto", "auto", "auto", "latest", "newest", "run", "checkpoints"))
"""A word, or a folder."""


def resume_or_refuse(
    judge: Judge, whole: Whole, resume: str, change: Any, *, older_is_meant: bool = False
) -> None:
    """change(run) makes a context in which the changed run starts."""
    with judge.folder() as folder:
        run = folder / "run"
        shutil.copytree(whole.run, run)
        places = {"newest": run / "checkpoints" / NEWEST, "run": run,
                  "checkpoints": run / "checkpoints"}  # fmt: skip
        with judge(str(run)), warnings() as said:
            with change(run):
                stand = start(run, str(places.get(resume, resume)))
            assert stand is not None, "the run starts over in the folder of a run"
            if stand != whole.newest:
                assert stand == whole.older, f"another state was resumed: {stand.text[:300]}"
                assert said or older_is_meant, "it goes back to the older one without a word"


def _header(content: bytes, fault: Fault) -> bytes:
    """Change the tree of a safetensors header."""
    length = int.from_bytes(content[:8], "little")
    text = changed_json(content[8 : 8 + length], fault)
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


PARTS = ("manifest.json", "manifest.json", "model.safetensors", "optimizer.safetensors")


@given(part=st.sampled_from(PARTS), fault=st.one_of(tree_faults(), FAULTS), resume=RESUME)
@example(part="optimizer.safetensors", fault=Fault("cut short", 999, 1), resume="auto")
@example(part="model.safetensors", fault=Fault("bytes behind the end", 0, 1), resume="auto")
def test_a_file_with_a_fault(judge, whole, part, fault, resume) -> None:
    judge.needed = {"refused"}

    def change(run: Path) -> Any:
        path = run / "checkpoints" / NEWEST / part
        return spoiled(path, fault, _header if path.suffix == ".safetensors" else changed_json)

    resume_or_refuse(judge, whole, resume, change)


@given(bit=NUMBERS)
def test_a_bit_of_the_manifest(judge, whole, bit) -> None:
    judge.needed = {"refused"}

    def change(run: Path) -> Any:
        path = run / "checkpoints" / NEWEST / "manifest.json"
        content = bytearray(path.read_bytes())
        content[bit // 8 % len(content)] ^= 1 << bit % 8
        path.write_bytes(content)
        return nullcontext()

    resume_or_refuse(judge, whole, "auto", change)


@pytest.mark.campaign
def test_every_bit_of_the_manifest(judge: Judge, whole: Whole) -> None:
    size = (whole.run / "checkpoints" / NEWEST / "manifest.json").stat().st_size
    for bit in range(8 * size):
        test_a_bit_of_the_manifest.hypothesis.inner_test(judge, whole, bit)  # type: ignore


KNOWN = (
    "state.step", "state.consumed_samples", "state.sample_hash", "state.skipped_steps",
    "state.skipped_in_a_row", "state.updated_samples", "state.losses", "state.grad_norms",
    "engine.optimizer_steps", "engine.loss_scale", "engine.loss_scale.value",
    "engine.loss_scale.mode", "engine.loss_scale.finite_steps", "engine.rng", "engine.rng.torch",
    "config", "config.model", "config.optimizer", "config.optimizer.name", "tokenizer",
    "config.model.num_heads", "config.model.layer_norm_epsilon", "data", "format_version", "files",
    "files.model_safetensors", "files.model_safetensors.bytes", "files.model_safetensors.crc32",
    "files.optimizer_safetensors",
)  # fmt: skip
SPANS = st.sampled_from((
    [[0, 4]], [[0, 0]], [[4, 0]], [[-1, 2]], [[0, 2**63]], [[0.5, 1]], [], None, 5, [[0]],
    [[0, 1, 2]], [["a", "b"]], [[0, 11], [0, 8]], [[0, 5], [0, 8]],
))  # fmt: skip
FILE_NAMES = st.sampled_from((
    "../x", "/etc/hostname", "", ".", "model.rank_00000.safetensors", "a\0b", "manifest.json",
    "model.rank_../../x.safetensors", "latest",
))  # fmt: skip
PLACES = st.one_of(
    st.tuples(st.sampled_from(KNOWN), st.sampled_from(VALUES)),
    st.tuples(st.sampled_from(KNOWN[:7]), st.sampled_from((0, 1, 9, 21, 11, 19, 38, 20.0, *EDGES))),
    st.tuples(st.sampled_from(("files.model_safetensors.pieces",
              "files.optimizer_safetensors.pieces")),
              st.dictionaries(st.sampled_from(("wte.weight", "wte.weight.exp_avg", "x")), SPANS,
                              min_size=1)),
    st.tuples(FILE_NAMES.map(lambda name: f"files.{name.replace('.', '_')}"),
              st.sampled_from([{"bytes": size, "crc32": 0} for size in (0, 9, 300)])),
)  # fmt: skip


def _sealed(tree: Any) -> bytes:
    """Return a manifest whose last key is the CRC-32 of what is before it, as a writer does."""
    text = json.dumps({key: tree[key] for key in tree if key != "crc32"}, indent=1).encode()[:-2]
    return text + b',\n "crc32": ' + str(zlib.crc32(text)).encode() + b"\n}"


@given(place=PLACES, resume=RESUME)
@example(place=("state.step", 20.0), resume="auto")
@example(place=("state.step", True), resume="auto")
@example(place=("engine.loss_scale.value", 0.0), resume="auto")
def test_a_forged_manifest(judge, whole, place, resume) -> None:
    """A manifest that was changed and sealed again. What is taken is what it says."""
    with judge.folder() as folder:
        run = folder / "run"
        shutil.copytree(whole.run, run)
        path = run / "checkpoints" / NEWEST / "manifest.json"
        tree = parent = json.loads(path.read_bytes())
        *sections, key = [
            part.replace("_safetensors", ".safetensors") for part in place[0].split(".")
        ]
        for section in sections:
            parent = parent[section]
        parent[key] = place[1]
        try:  # text of Raw is not always JSON that can be sealed
            path.write_bytes(_sealed(json.loads(to_json(tree))))
        except (ValueError, RecursionError):
            return
        places = {"newest": path.parent, "run": run, "checkpoints": run / "checkpoints"}
        with judge(str(run)):
            stand = start(run, str(places.get(resume, resume)))
            assert stand is not None, "the run starts over in the folder of a run"
            # which a new start counts from 0
            written = json.loads(path.read_bytes())["state"] | {"skipped_in_a_row": 0}
            for name in stand.state.keys() & written.keys():
                assert json.dumps(stand.state[name]) == json.dumps(written[name])
            numbers = ("step", "consumed_samples", "updated_samples", "skipped_steps",
                       "skipped_in_a_row")  # fmt: skip
            for number in (*(stand.state[n] for n in numbers), stand.engine["optimizer_steps"]):
                assert type(number) is int and number >= 0
            assert 0 < stand.scale["value"] < float("inf")
            assert stand.arrays in (whole.newest.arrays, whole.older.arrays)


LATEST = (OLDER, "step_00000099", "", "\n", ".", "..", f"../checkpoints/{OLDER}",
          f"{NEWEST}/manifest.json", "step_20", "x" * 5000, "a\0b", "\u0663", f"{NEWEST}\n{OLDER}",
          "/etc", f"{NEWEST}\0")  # fmt: skip


@given(change=st.sampled_from(LATEST) | FAULTS, resume=RESUME)
@example(change=Fault("a FIFO"), resume="latest")
def test_latest(judge, whole, change, resume) -> None:
    def changed(run: Path) -> Any:
        path = run / "checkpoints" / "latest"
        if isinstance(change, Fault):
            return spoiled(path, change)
        path.write_text(change)
        return nullcontext()

    resume_or_refuse(judge, whole, resume, changed, older_is_meant=change == OLDER)


PATHS = (
    "", "checkpoints", "checkpoints/latest", f"checkpoints/{OLDER}", f"checkpoints/{NEWEST}",
    *(f"checkpoints/{step}/{part}" for step in (OLDER, NEWEST) for part in sorted(set(PARTS))),
)  # fmt: skip
ODD_NAMES = ("step_" + "\u0663" * 8, "step_99999999999999999999", "step_000000020", "step_x",
             "step_-0000001", ".step_00000030.tmp", ".step_00000020.replaced.tmp",
             ".step_00000010.doomed.tmp", "step_00000030")  # fmt: skip
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("remove"), st.sampled_from(PATHS[2:]), st.none()),
        st.tuples(st.just("replace"), st.sampled_from(PATHS[2:]),
                  st.sampled_from([kind for kind in FILES if "GiB" not in kind])),
        st.tuples(st.just("replace"), st.just("checkpoints"),
                  st.sampled_from(("empty file", "a FIFO", "a link to itself"))),
        st.tuples(st.just("move"), st.sampled_from((OLDER, NEWEST)), st.sampled_from(ODD_NAMES)),
        st.tuples(st.just("copy"), st.just(OLDER), st.sampled_from(ODD_NAMES)),
        st.tuples(st.just("link"), st.just(NEWEST), st.none()),
        st.tuples(st.just("exchange"), st.sampled_from(("", *PARTS)), st.none()),
        st.tuples(st.just("refuse"), st.sampled_from(PATHS), st.sampled_from(list(UNREADABLE))),
    ),
    min_size=1, max_size=2, unique_by=lambda step: step[0],
)  # fmt: skip


@given(steps=STEPS, resume=RESUME)
@example(steps=[("exchange", "", None)], resume="auto")
@example(steps=[("remove", PATHS[2], None), ("remove", PATHS[-2], None)], resume="auto")
@example(steps=[("refuse", "checkpoints", "a stale network file")], resume="auto")
def test_files_and_folders(judge, whole, steps, resume) -> None:
    """Removed, exchanged, replaced, renamed, copied under odd names, linked, or refused."""

    def change(run: Path) -> Any:
        folder, held = run / "checkpoints", nullcontext()
        for verb, name, word in sorted(steps, key=lambda step: step[0] in ("remove", "replace")):
            path = folder / name if verb in ("move", "copy", "link", "exchange") else run / name
            if verb in ("remove", "replace") and path.parent.is_dir():
                remove(path)
                if word:
                    FILES[word](path)
            elif verb == "refuse":
                held = unreadable(UNREADABLE[word], path)
            elif verb == "exchange":
                one, two = folder / OLDER / name, folder / NEWEST / name
                if (one.is_dir() and two.is_dir()) or (one.is_file() and two.is_file()):
                    for source, target in ((one, run / "x"), (two, one), (run / "x", two)):
                        source.rename(target)
            elif path.is_dir() and verb == "link" and not path.is_symlink():
                path.rename(run / "elsewhere")
                path.symlink_to("../elsewhere")
            elif path.is_dir() and not (folder / word).exists():
                (shutil.copytree if verb == "copy" else Path.rename)(path, folder / word)
        return held

    # a left-over of this name is the newest, which was being replaced
    meant = any(step[1] == PATHS[2] or step == ("exchange", "", None) for step in steps)
    meant |= any(step[0] == "copy" and "replaced" in step[2] for step in steps)
    resume_or_refuse(judge, whole, resume, change, older_is_meant=meant)
