"""Weights: conversion of every kind of file.

The tensors of the whole files hold counting numbers, no number twice. A file with other bytes is
refused, or has others in the places of these bytes only; no number moves.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import example, given, strategies as st
from safetensors.numpy import load_file

pytest.importorskip("torch")

from common.config.resolved import ResolvedModel
from common.conversion.convert import convert
from common.log import LOG
from common.systems.table import FORMATS
from common.systems.weights import Weights
from common.weights.names import parameter_shapes
from tests.common.systems.tiny_weights import as_weights
from tests.fuzz.faults import (
    BYTES,
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

MODEL = ResolvedModel(
    num_layers=2, hidden_size=8, num_heads=2, seq_length=5, vocab_size=11, ffn_hidden_size=24,
    max_positions=5, embedding_dropout=0.0, attention_dropout=0.0, hidden_dropout=0.0,
)  # fmt: skip
FILE = "model.safetensors"
RANKS = [f"release/mp_rank_{n}/model_optim_rng.pt" for n in ("00", "01")]
WRITTEN = {
    "hf": ([FILE], "config.json"),
    "mindformers": (["gpt2.ckpt"], "model.yaml"),
    "megatron": (RANKS, "model.yaml"),
}
"""Files of tensors of each format, and that of settings."""
CHANGED_AT_MOST = 27
"""Numbers that a hundred other bytes can touch."""


def _counting() -> Weights:
    first, shapes = itertools.count(1), parameter_shapes(MODEL)
    numbers = {name: list(itertools.islice(first, math.prod(shape))) for name, shape in shapes.items()}
    return as_weights(MODEL, {name: np.array(numbers[name], np.float32).reshape(shapes[name]) for name in shapes})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of each format in two ranks or one, and the weights that all of them hold."""
    folder, weights, level = tmp_path_factory.mktemp("whole"), _counting(), LOG.level
    LOG.setLevel(logging.CRITICAL)
    for name in WRITTEN:
        (folder / name).mkdir()
        if name == "megatron":
            FORMATS[name].write(folder / name, weights, None, 2, 1)
        else:
            FORMATS[name].write(folder / name, weights, None)
    yield folder
    LOG.setLevel(level)


def convert_or_refuse(judge: Any, whole: Path, name: str, path: str, fault: Fault, change: Any, to: str = "hf") -> None:
    """The target is whole or absent, and has the numbers of the source where they belong. path: of
    the file that gets the fault.
    """
    with judge.folder() as folder:
        work, target = folder / "source", folder / "target"
        shutil.copytree(whole / name, work)
        spoil(work / path, fault, change)
        with judge(str(work), "a weight of"):
            try:
                convert(work, target, target_format=to, source_format=name)
            finally:
                left = {entry.name for entry in folder.iterdir()}
                done = (target / "conversion.json").is_file()
                assert left == ({"source", "target"} if done else {"source"})
            if to != "hf":
                convert(target, folder / "again", target_format="hf", source_format=to)
                target = folder / "again"
            heads = json.loads((target / "config.json").read_text())["n_head"]
            if heads != MODEL.num_heads:  # another arrangement of the same numbers
                assert str(heads) in (work / path).read_text(), f"{heads} heads: no file says so"
                return
            found, wanted, changed = load_file(target / FILE), load_file(whole / "hf" / FILE), 0
            for tensor in wanted.keys() & found.keys():
                # a vocabulary up to the padded rows may be named
                rows = min(len(found[tensor]), len(wanted[tensor]))
                changed += int((found[tensor][:rows] != wanted[tensor][:rows]).sum())
            assert changed <= (CHANGED_AT_MOST if fault.kind in BYTES else 0)


def _header(content: bytes, fault: Fault) -> bytes:
    """Change the tree of a safetensors header."""
    length = int.from_bytes(content[:8], "little")
    text = changed_json(content[8 : 8 + length], fault)
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


@pytest.mark.parametrize("name", WRITTEN)
@given(file=NUMBERS, fault=st.one_of(FAULTS, TREE_FAULTS), to=st.sampled_from(
       ("hf", "hf", "torch_gpt2", "mindformers", "megatron")))  # fmt: skip
@example(file=0, fault=Fault("flipped bit", 6000, 1), to="hf")
@example(file=0, fault=Fault("cut short", 4000, 1), to="hf")
@example(file=0, fault=Fault("value moved", 91, 3), to="hf")  # tensors overlap
@example(file=0, fault=Fault("bytes behind the end", 0, 1), to="hf")
@example(file=0, fault=Fault("deleted bytes", 3000, 6), to="hf")
def test_tensors_with_a_fault(judge, whole, name, file, fault, to) -> None:
    files, _ = WRITTEN[name]
    path = files[file % len(files)]
    if fault.kind in TREES and path != FILE:
        fault = Fault("edge number", fault.at, fault.number)
    if path.endswith(".ckpt") and "GiB" in fault.kind:
        return  # whose messages it would hold one by one
    convert_or_refuse(judge, whole, name, path, fault, _header, to)


def _other_settings(content: bytes, fault: Fault) -> bytes:
    tree = changed_tree(yaml.safe_load(content), fault)
    return to_yaml(tree).encode("utf-8", "surrogatepass")


@given(name=st.sampled_from(list(WRITTEN)), fault=st.one_of(YAML_FAULTS, TREE_FAULTS, FAULTS))
@example(name="hf", fault=Fault("nearby value", 0, 0))
def test_settings_with_a_fault(judge, whole, name, fault) -> None:
    _, path = WRITTEN[name]
    change = changed_json if path.endswith(".json") else _other_settings
    convert_or_refuse(judge, whole, name, path, fault, change)
