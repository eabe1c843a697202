"""Weights: conversion of every kind of file.

The tensors of the whole files hold counting numbers. So a conversion of the whole file tells which
number of which tensor goes where. What a changed file must become follows from what torch,
safetensors, pickle or a few lines of protobuf read of it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
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
from common.systems.table import FORMATS
from common.systems.weights import Weight, Weights
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
    spoil,
    to_yaml,
)

Arrays = dict[str, np.ndarray]
MODEL = ModelConfig(
    num_layers=2, hidden_size=8, num_heads=2, seq_length=5, vocab_size=11, ffn_hidden_size=24,
    max_positions=5, embedding_dropout=0.0, attention_dropout=0.0, hidden_dropout=0.0,
)  # fmt: skip
FILE = "model.safetensors"


def read_torch(path: Path) -> Arrays:

    def flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, np.ndarray]]:
        if isinstance(tree, torch.Tensor):
            bits = tree.view(torch.uint16) if tree.dtype is torch.bfloat16 else tree.detach()
            yield prefix, bits.numpy()
        for key, value in tree.items() if isinstance(tree, dict) else ():
            yield from flat(value, f"{prefix}/{key}")

    with torch.serialization.safe_globals([argparse.Namespace]):  # which Megatron's files hold
        return dict(flat(torch.load(path, map_location="cpu", weights_only=True)))


def _protobuf(data: bytes) -> Iterator[tuple[int, Any]]:
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        value, at = _varint(data, at)
        if key & 7:  # of which value was the length
            assert key & 7 == 2 and at + value <= len(data)
            at, value = at + value, data[at : at + value]
        yield key >> 3, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return value, at


def read_mindspore(path: Path) -> Arrays:
    """Checkpoint: repeated value = 1 {tag = 1, tensor = 2 {dims = 1, type = 2, content = 3}}."""
    types = {b"Float32": "<f4", b"Float16": "<f2", b"Int32": "<i4", b"Int64": "<i8"}
    found: Arrays = {}
    for _, message in _protobuf(path.read_bytes()):
        record = dict(_protobuf(message))
        fields = list(_protobuf(record[2]))
        dims = [value for number, value in fields if number == 1 and value]
        name, words = record[1].decode(), dict(fields)
        array = np.frombuffer(words.get(3, b""), types[words[2]])
        array = np.concatenate([found[name].reshape(-1), array]) if name in found else array
        found[name] = array.reshape(dims if array.size == np.prod(dims) else -1)
    return found


RANKS = [f"release/mp_rank_{n}/model_optim_rng.pt" for n in ("00", "01")]
WRITTEN: dict[str, tuple[str, list[str], list[str], Callable[[Path], Arrays]]] = {
    "hf": ("hf", [FILE], ["config.json"], load_file),
    "mindformers": ("mindformers", ["gpt2.ckpt"], ["model.yaml"], read_mindspore),
    "megatron of 2 ranks": ("megatron", RANKS, ["model.yaml"], read_torch),
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


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Source]]:
    folder, weights, made = tmp_path_factory.mktemp("whole"), _counting(), {}
    level = LOG.level
    LOG.setLevel(logging.CRITICAL)
    for name, (format, files, settings, reader) in WRITTEN.items():
        (folder / name).mkdir()
        if name.startswith("megatron"):
            FORMATS[format].write_shards(folder / name, weights, None, 2, 1)
        else:
            FORMATS[format].write(folder / name, weights, None)
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
    judge: Any, source: Source, path: str, fault: Fault, change: Any, to: str = "hf"
) -> None:
    """The target is whole or absent. path: of the file that gets the fault."""
    with judge.folder() as folder:
        work, target = folder / "source", folder / "target"
        shutil.copytree(source.folder, work)
        spoil(work / path, fault, change)
        with judge(str(work), "a weight of"):
            try:
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
