"""Weights: conversion of every kind of file, and the checkpoint that a run starts from.

The tensors of the whole files hold counting numbers. So a conversion of the whole file tells which
number of which tensor goes where. What a changed file must become follows from what torch,
safetensors, pickle or a few lines of protobuf read of it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import example, given, strategies as st
from safetensors.numpy import load_file

pytest.importorskip("torch")

import torch

from common.config.schema import ModelConfig
from common.conversion.convert import convert
from common.log import LOG
from common.resolve.derive import resolve_config
from common.run_config import load_config
from common.systems.table import FORMATS
from common.systems.weights import Weight, Weights
from common.training.loss_scale import LossScale
from common.training.start import where_to_start
from common.weights.names import parameter_shapes
from tests.fuzz.faults import (
    FAULTS,
    NUMBERS,
    TREE_FAULTS,
    TREES,
    YAML_FAULTS,
    Fault,
    changed_json,
    changed_tree,
    spoiled,
    to_yaml,
)
from tests.fuzz.judge import Judge
from tests.fuzz.readers import Arrays, read_mindspore, read_torch
from tests.tiny import tiny_run, train_here

MODEL = ModelConfig(
    num_layers=2, hidden_size=8, num_heads=2, seq_length=5, vocab_size=11, ffn_hidden_size=24,
    max_positions=5, embedding_dropout=0.0, attention_dropout=0.0, hidden_dropout=0.0,
)  # fmt: skip
FILE = "model.safetensors"
RANKS = [f"release/mp_rank_{n}/model_optim_rng.pt" for n in ("00", "01")]
WRITTEN: dict[str, tuple[str, list[str], list[str], Callable[[Path], Arrays]]] = {
    "hf": ("hf", [FILE], ["config.json"], load_file),
    "ours": ("torch_gpt2", [FILE], ["manifest.json"], load_file),
    "mindformers": ("mindformers", ["gpt2.ckpt"], ["model.yaml"], read_mindspore),
    "megatron of 2 ranks": ("megatron", RANKS, ["model.yaml"], read_torch),
    "hf old bin": ("hf", ["pytorch_model.bin"], ["config.json"], read_torch),
}
"""Format, files of tensors, files of settings, and their independent reader."""


@dataclass
class Source:
    """A whole folder of one format. target: weights that it becomes."""

    folder: Path
    format: str
    files: list[str]
    settings: list[str]
    reader: Callable[[Path], Arrays]
    target: Arrays

    def read(self, folder: Path) -> Arrays:
        """Raises anything for a file that is none."""
        return {f"{file}:{name}": array for file in self.files
                for name, array in self.reader(folder / file).items()}  # fmt: skip


def _counting() -> Weights:
    first, tensors = itertools.count(1), {}
    for name, shape in parameter_shapes(MODEL).items():
        numbers = [next(first) for _ in range(int(np.prod(shape)))]
        array = np.array(numbers, np.float32).reshape(shape)
        tensors[name] = Weight(dtype="float32", shape=shape, load=lambda array=array: array)
    return Weights(path=Path("made.here"), format="made", model=MODEL, tensors=tensors)


def _write(name: str, folder: Path, hugging_face: Path, weights: Weights) -> None:
    format, files, *_ = WRITTEN[name]
    folder.mkdir()
    if name == "hf old bin":
        shutil.copy(hugging_face / "config.json", folder)
        state = {k: torch.from_numpy(v) for k, v in load_file(hugging_face / FILE).items()}
        torch.save(state, folder / files[0], _use_new_zipfile_serialization=False)
    elif name.startswith("megatron"):
        FORMATS[format].write_shards(folder, weights, None, 2, 1)
    else:
        FORMATS[format].write(folder, weights, None)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Source]]:
    folder, weights, made = tmp_path_factory.mktemp("whole"), _counting(), {}
    level = LOG.level
    LOG.setLevel(logging.CRITICAL)
    for name, (format, files, settings, reader) in WRITTEN.items():
        _write(name, folder / name, folder / "hf", weights)
        target = folder / f"{name} converted"
        convert(folder / name, target, target_format="hf", source_format=format)
        source = Source(folder / name, format, files, settings, reader, load_file(target / FILE))
        require_same(source, source.read(source.folder), source.target)
        made[name] = source
    yield made
    LOG.setLevel(level)


def _same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    one, other = (np.ascontiguousarray(array, np.float32) for array in (one, other))
    return np.array_equal(one.view(np.uint32), other.view(np.uint32))


def require_same(source: Source, values: Arrays, found: Arrays) -> None:
    """Follow each number from its place in the whole source to that in the target."""
    places: dict[int, tuple[str, int]] = {}
    for name, array in source.read(source.folder).items():
        if array.dtype.kind == "f":
            places |= {int(n): (name, at) for at, n in enumerate(array.reshape(-1).tolist())}
    for name in source.target.keys() & found.keys():
        numbers = source.target[name][: len(found[name])].reshape(-1).tolist()
        there = [places[int(number)] for number in numbers]
        expected = np.array([values[tensor].reshape(-1)[at] for tensor, at in there], np.float32)
        # a vocabulary up to the padded rows may be named
        assert _same_bits(found[name].reshape(-1)[: len(numbers)], expected), name


def convert_or_refuse(
    judge: Judge, source: Source, path: str, fault: Fault, change: Any, to: str = "hf"
) -> None:
    """The target is whole or absent. path: of the file that gets the fault."""
    with judge.folder() as folder:
        work, target = folder / "source", folder / "target"
        shutil.copytree(source.folder, work)
        with judge(str(work), "a weight of"):
            try:
                with spoiled(work / path, fault, change):
                    convert(work, target, target_format=to, source_format=source.format)
            finally:
                left = {entry.name for entry in folder.iterdir()}
                whole = (target / "conversion.json").is_file()
                assert left == ({"source", "target"} if whole else {"source"})
            if to != "hf":  # its own reader is held against independent ones above
                convert(target, folder / "again", target_format="hf", source_format=to)
                target = folder / "again"
            heads = json.loads((target / "config.json").read_text())["n_head"]
            if heads != MODEL.num_heads:  # another arrangement of the same numbers
                assert str(heads) in (work / path).read_text(), f"{heads} heads: no file says so"
                return
            try:
                values = source.read(work)
            except Exception:  # the independent reader refuses it
                values = source.read(source.folder)
            require_same(source, values, load_file(target / FILE))


def _header(content: bytes, fault: Fault) -> bytes:
    """Change the tree of a safetensors header."""
    length = int.from_bytes(content[:8], "little")
    text = changed_json(content[8 : 8 + length], fault)
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


@pytest.mark.parametrize("name", WRITTEN)
@given(file=NUMBERS, fault=st.one_of(FAULTS, TREE_FAULTS), to=st.sampled_from(
       ("hf", "hf", "torch_gpt2", "mindformers", "megatron")))  # fmt: skip
@example(file=0, fault=Fault("cut short", 4000, 1), to="hf")
@example(file=0, fault=Fault("value moved", 91, 3), to="hf")  # tensors overlap
@example(file=0, fault=Fault("bytes behind the end", 0, 1), to="hf")
@example(file=0, fault=Fault("deleted bytes", 3000, 6), to="hf")
def test_tensors_with_a_fault(judge, sources, name, file, fault, to) -> None:
    judge.needed = {"refused"} if name == "ours" else judge.needed  # which has checksums
    source = sources[name]
    path = source.files[file % len(source.files)]
    if fault.kind in TREES and path != FILE:
        fault = Fault("edge number", fault.at, fault.number)
    if path.endswith(".ckpt") and "GiB" in fault.kind:
        return  # whose messages it would hold one by one
    convert_or_refuse(judge, source, path, fault, _header, to)


def _other_settings(content: bytes, fault: Fault) -> bytes:
    tree = changed_tree(yaml.safe_load(content), fault)
    return to_yaml(tree).encode("utf-8", "surrogatepass")


@given(name=st.sampled_from(list(WRITTEN)), file=NUMBERS,
       fault=st.one_of(YAML_FAULTS, TREE_FAULTS, FAULTS))  # fmt: skip
@example(name="hf", file=0, fault=Fault("nearby value", 0, 0))
def test_settings_with_a_fault(judge, sources, name, file, fault) -> None:
    source = sources[name]
    path = source.settings[file % len(source.settings)]
    change = changed_json if path.endswith(".json") else _other_settings
    convert_or_refuse(judge, source, path, fault, change)


# ---- the checkpoint of a run: what is accepted is the state that was saved ----

OLDER, NEWEST = "step_00000010", "step_00000020"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, corpus_prefix: Path) -> Path:
    sizes = {"num_layers": 1, "hidden_size": 8, "num_heads": 2, "seq_length": 4, "vocab_size": 101}
    tree = tiny_run(
        tmp_path_factory.mktemp("whole") / "run", corpus_prefix, model=sizes, precision="fp16",
        loss_scale={"mode": "dynamic", "initial": 1024.0, "window": 15}, validation__interval=0,
        optimizer={"learning_rate": 1e-3}, train={"max_steps": 20, "micro_batch_size": 2},
        checkpoint={"interval": 10},
    )  # fmt: skip
    run = train_here(tree)
    manifest = json.loads((run / "checkpoints" / NEWEST / "manifest.json").read_text())
    (run / "fingerprint").write_text(manifest["data"])
    return run


@pytest.fixture(scope="module")
def stands(run: Path) -> list[Any]:
    """Where the run stands after each of its checkpoints."""
    return [start(run, str(run / "checkpoints" / name)) for name in (OLDER, NEWEST)]


def start(run: Path, resume: str) -> dict[str, Any] | None:
    """Do what a start does, and return where it stands, None for a fresh start."""
    words = [f"output_dir={run}", f"checkpoint.resume={resume}"]
    config = resolve_config(load_config(run / "config.yaml", words))
    data: Any = SimpleNamespace(
        tokenizer_record=None, fingerprint=(run / "fingerprint").read_text(), samples_per_epoch=100,
        no_validation=None,
    )  # fmt: skip
    found = where_to_start(config, data).resume
    if found is None:
        return None
    scale = LossScale(config.loss_scale)
    state, engine = found.states(config, scale)
    arrays = hashlib.sha256()
    for _, values in found.weights(config.model):
        arrays.update(values.tobytes())
    for *_, values in found.moments(config, engine.optimizer_steps):
        arrays.update(values.tobytes())
    # as text, in which 1, 1.0 and True differ
    state_text = json.dumps([state.to_dict(), vars(engine), scale.state()], sort_keys=True)
    return {"state": state_text, "arrays": arrays.hexdigest()}


PATHS = ("latest", NEWEST, *(f"{NEWEST}/{name}" for name in
         ("manifest.json", "manifest.json", FILE, "optimizer.safetensors")))  # fmt: skip
TEXTS = (OLDER, "step_00000099", "", ".", "..", f"../checkpoints/{OLDER}", "a\0b", "\u0663")
RESUME = st.sampled_from(("auto", "auto", "latest", f"checkpoints/{NEWEST}", ""))
"""A word, or a folder in that of the run."""


@given(path=st.sampled_from(PATHS), fault=st.one_of(TREE_FAULTS, FAULTS), resume=RESUME)
@example(path=PATHS[-1], fault=Fault("cut short", 999, 1), resume="auto")
@example(path=PATHS[-2], fault=Fault("bytes behind the end", 0, 1), resume="auto")
@example(path="latest", fault=Fault("a FIFO"), resume="latest")
@example(path=NEWEST, fault=Fault("a stale network file"), resume="auto")
@example(path=PATHS[2], fault=Fault("flipped bit", 17, 0), resume="auto")
def test_a_checkpoint_with_a_fault(judge, run, stands, caplog, path, fault, resume) -> None:
    if path == NEWEST and (fault.kind in TREES or fault.kind not in FOLDER_FAULTS):
        fault = Fault("missing file")
    assert None not in stands and stands[0] != stands[1]

    def change(content: bytes, fault: Fault) -> bytes:
        if path == "latest":
            return TEXTS[fault.number % len(TEXTS)].encode()
        return (_header if path.endswith(".safetensors") else changed_json)(content, fault)

    with judge.folder() as folder:
        work = folder / "run"
        shutil.copytree(run, work)
        at = resume if resume in ("auto", "latest") else str(work / resume)
        caplog.set_level(logging.WARNING, LOG.name)
        caplog.clear()
        with judge(str(work)):
            with spoiled(work / "checkpoints" / path, fault, change):
                stand = start(work, at)
            assert stand in stands, "another state was resumed, or the run starts over"
            # it goes back to the older one with a word, unless that is named
            text = TEXTS[fault.number % len(TEXTS)] if fault.kind in TREES else ""
            older_is_meant = path == NEWEST or (path == "latest" and text == OLDER)
            assert stand == stands[1] or caplog.records or older_is_meant


FOLDER_FAULTS = ("empty file", "missing file", "a FIFO", "a link to itself", "permission denied",
                 "a stale network file")  # fmt: skip
