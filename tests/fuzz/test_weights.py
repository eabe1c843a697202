"""Conversion of every format of weights. An accepted file gives, bit for bit, what an independent
reader finds in the same file.

The tensors of the whole files hold counting numbers. So a conversion of the whole file tells which
number of which tensor goes where. What a changed file must become follows from what torch,
safetensors, pickle or a few lines of protobuf read of it.
"""

from __future__ import annotations

import itertools
import json
import logging
import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import example, given, strategies as st
from safetensors.numpy import load_file, save_file

pytest.importorskip("torch")

import torch

from common.config.schema import ModelConfig
from common.conversion.convert import convert
from common.log import LOG
from common.systems.table import FORMATS
from common.systems.weights import Weight, Weights
from common.weights.names import parameter_shapes
from tests.fuzz.faults import (
    ALIAS_BOMB,
    BYTE_FAULTS,
    FAULTS,
    NUMBERS,
    UNREADABLE,
    YAML_VALUES,
    Fault,
    changed_bytes,
    changed_json,
    changed_tree,
    faults,
    spoiled,
    to_yaml,
    tree_faults,
)
from tests.fuzz.judge import Judge
from tests.fuzz.weight_files import (
    Arrays,
    count_paddle,
    damaged_record,
    read_mindspore,
    read_paddle,
    read_torch,
)

FIXTURE = Path(__file__).parents[1] / "common/tensor_files/data/fleetx/model.pdparams"
MODEL = ModelConfig(
    num_layers=2, hidden_size=8, num_heads=2, seq_length=5, vocab_size=11, ffn_hidden_size=24,
    max_positions=5, embedding_dropout=0.0, attention_dropout=0.0, hidden_dropout=0.0,
)  # fmt: skip
FLEETX = """\
Model: {vocab_size: 11, hidden_size: 8, num_layers: 1, num_attention_heads: 2, \
ffn_hidden_size: , hidden_dropout_prob: 0.1,
  attention_probs_dropout_prob: 0.2, max_position_embeddings: 5, initializer_range: 0.02}
"""
RANK = "release/mp_rank_{}/model_optim_rng.pt"
YAML, CONFIG = ["model.yaml"], ["config.json"]
SHARDS = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
WRITTEN: dict[str, tuple[str, list[str], list[str], Callable[[Path], Arrays], dict[str, int]]] = {
    "hf": ("hf", ["model.safetensors"], CONFIG, load_file, {}),
    "ours": ("torch_gpt2", ["model.safetensors"], ["manifest.json"], load_file, {}),
    "mindformers": ("mindformers", ["gpt2.ckpt"], YAML, read_mindspore, {}),
    "mindformers 0.3": ("mindformers_r0.3", ["gpt2.ckpt"], YAML, read_mindspore, {}),
    "megatron": ("megatron", [RANK.format("00")],
                 [*YAML, "latest_checkpointed_iteration.txt"], read_torch, {}),
    "megatron_core": ("megatron_core", [RANK.format("00")], YAML, read_torch, {}),
    "megatron of 2 ranks": ("megatron", [RANK.format(n) for n in ("00", "01")], YAML, read_torch,
                            {"tensor": 2, "pipeline": 1}),
    "megatron_core of 2 ranks": ("megatron_core", [RANK.format(n) for n in ("00", "01")], YAML,
                                 read_torch, {"tensor": 2, "pipeline": 1}),
    "megatron of 2 stages": ("megatron", [RANK.format(n) for n in ("00_000", "00_001")], YAML,
                             read_torch, {"tensor": 1, "pipeline": 2}),
    "hf bin": ("hf", ["pytorch_model.bin"], CONFIG, read_torch, {}),
    "hf old bin": ("hf", ["pytorch_model.bin"], CONFIG, read_torch, {}),
    "hf shards": ("hf", SHARDS, [*CONFIG, "pytorch_model.bin.index.json"], read_torch, {}),
    "fleetx": ("fleetx", ["model.pdparams"], ["pretrain.yaml"], read_paddle, {}),
}  # fmt: skip
"""Format, files of tensors, files of settings, and their independent reader."""


@dataclass
class Source:
    """A whole folder of one format."""

    folder: Path
    format: str
    files: list[str]
    settings: list[str]
    reader: Callable[[Path], Arrays]
    values: Arrays
    target: Arrays
    """Weights that the whole folder becomes."""

    def read(self, folder: Path) -> Arrays:
        """Raises anything for a file that is none."""
        return {f"{file}:{name}": array for file in self.files
                for name, array in self.reader(folder / file).items()}  # fmt: skip


# ---- whole folders ----


def _counting() -> Weights:
    first = itertools.count(1)
    tensors = {}
    for name, shape in parameter_shapes(MODEL).items():
        numbers = [next(first) for _ in range(int(np.prod(shape)))]
        array = np.array(numbers, np.float32).reshape(shape)
        tensors[name] = Weight(dtype="float32", shape=shape, load=lambda array=array: array)
    return Weights(path=Path("made.here"), format="made", model=MODEL, tensors=tensors)


def _write(name: str, folder: Path, hugging_face: Path, weights: Weights) -> None:
    format, files, *_, ranks = WRITTEN[name]
    folder.mkdir()
    if name == "fleetx":
        count_paddle(Path(shutil.copy(FIXTURE, folder)))
        (folder / "pretrain.yaml").write_text(FLEETX)
    elif read_torch in WRITTEN[name] and format == "hf":
        shutil.copy(hugging_face / "config.json", folder)
        state = {k: torch.from_numpy(v) for k, v in load_file(hugging_face / FILE).items()}
        per_file = -(-len(state) // len(files))
        for n, file in enumerate(files):
            part = dict(list(state.items())[n * per_file : (n + 1) * per_file])
            torch.save(part, folder / file, _use_new_zipfile_serialization="old" not in name)
        places = {key: files[n // per_file] for n, key in enumerate(state)}
        index = {"metadata": {"total_size": 1}, "weight_map": places}
        if len(files) > 1:
            (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    elif ranks:
        FORMATS[format].write_shards(folder, weights, None, *ranks.values())
    else:
        FORMATS[format].write(folder, weights, None)


FILE = "model.safetensors"


def _converted(folder: Path, format: str, target: Path) -> Arrays:
    convert(folder, target, target_format="hf", source_format=format)
    return load_file(target / FILE)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Source]]:
    folder, weights, made = tmp_path_factory.mktemp("whole"), _counting(), {}
    level = LOG.level
    LOG.setLevel(logging.CRITICAL)
    for name, (format, files, settings, reader, _) in WRITTEN.items():
        _write(name, folder / name, folder / "hf", weights)
        source = Source(folder / name, format, files, settings, reader, {}, {})
        source.values = source.read(source.folder)
        source.target = _converted(source.folder, format, folder / f"{name} converted")
        require_same(source, source.values, source.target)
        made[name] = source
    yield made
    LOG.setLevel(level)


# ---- what must hold ----


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def require_same(source: Source, values: Arrays, found: Arrays, resized: bool = False) -> None:
    """Follow each number from its place in the source to that in the target."""
    places: dict[int, tuple[str, int]] = {}
    for name, array in source.values.items():
        if array.dtype.kind == "f":
            numbers = enumerate(array.reshape(-1).tolist())
            places |= {int(number): (name, place) for place, number in numbers}
    for name in source.target.keys() & found.keys():
        numbers = source.target[name][: len(found[name])].reshape(-1)
        got = found[name].reshape(-1)
        if resized and name.endswith("wte.weight"):
            got = got[: len(numbers)]  # a vocabulary up to the padded rows may be named
        assert len(got) == len(numbers), f"{name} has another shape"
        made = np.empty(len(numbers), np.float32)
        for n, number in enumerate(numbers.tolist()):
            tensor, at = places[int(number)]
            assert tensor in values, f"{name} was read, but {tensor} is not there"
            whole = values[tensor].size == source.values[tensor].size or at < values[tensor].size
            assert whole, f"{name} was read, but {tensor} ends before"
            made[n] = values[tensor].reshape(-1)[at]
        same = np.array_equal(_bits(got.astype(np.float32)), _bits(made))
        assert same, f"{name} holds other numbers than the file"


def require_independent(source: Source, work: Path, target: Path, resized: bool) -> None:
    for name in source.files:
        if name.endswith((".bin", ".pt")) and (work / name).is_file():
            damaged = damaged_record(work / name)
            assert damaged is None, f"{name}: {damaged} is damaged by its CRC-32, and was taken"
    try:
        values = source.read(work)
    except Exception:
        values = None
    heads = json.loads((target / "config.json").read_text())["n_head"] if resized else 2
    if heads != MODEL.num_heads:  # another arrangement of the same numbers
        assert values is not None and heads == _heads(source, work), f"{heads} heads: no file says"
        return
    found = load_file(target / FILE)
    if values is not None:
        require_same(source, values, found, resized)
        return
    for name in source.target.keys() & found.keys():  # which the independent reader refuses
        expected = source.target[name][: len(found[name])]
        assert found[name].dtype == expected.dtype
        assert np.array_equal(_bits(found[name]), _bits(expected)), name


def _heads(source: Source, work: Path) -> int | None:
    """Look for the number of heads in the settings."""
    for name in source.settings:
        words = yaml.safe_load((work / name).read_bytes())
        while isinstance(words, dict):
            for key in ("n_head", "num_heads", "num_attention_heads"):
                if key in words:
                    return int(words[key])
            words = next((words[k] for k in ("config", "model", "Model") if k in words), None)
    return None


def convert_or_refuse(
    judge: Judge, source: Source, change: Callable[[Path], Any], how: tuple[str, bool, bool],
    resized: bool = False,
) -> None:  # fmt: skip
    """change(folder) makes a context in which the changed folder is converted. how: the format to
    write, whether the source's is named, and whether the target is verified. resized: settings
    have changed. The target is whole or absent, and no code of the file runs.
    """
    to, named, verify = how
    with judge.folder() as folder:
        work, target = folder / "source", folder / "target"
        shutil.copytree(source.folder, work)
        with judge(str(work), "--model_parallel", "a weight of"):
            format = source.format if named else None
            try:
                with change(work) or nullcontext():
                    convert(work, target, target_format=to, source_format=format, verify=verify)
            finally:
                left = {path.name for path in folder.iterdir()}
                whole = (target / "conversion.json").is_file()
                assert left == ({"source", "target"} if whole else {"source"})
            if to != "hf":  # its own reader is held against independent ones above
                _converted(target, to, folder / "again")
                target = folder / "again"
            require_independent(source, work, target, resized)


NAMES = st.sampled_from(list(WRITTEN))
HOW = st.tuples(st.sampled_from(("hf", "hf", "hf", "hf", "torch_gpt2", "mindformers", "megatron")),
                st.sampled_from((True, True, True, True, False)),
                st.sampled_from((False, False, True)))  # fmt: skip
PLAINLY = ("hf", True, False)


def _header(content: bytes, fault: Fault) -> bytes:
    """Change the tree of a safetensors header."""
    length = int.from_bytes(content[:8], "little")
    text = changed_json(content[8 : 8 + length], fault)
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


@given(name=NAMES, file=NUMBERS, fault=FAULTS, header=tree_faults(), how=HOW)
@example(name="hf", file=0, fault=Fault("cut short", 4000, 1), header=Fault("value"), how=PLAINLY)
@example("hf", 0, Fault("zeros", 0, 1), Fault("value moved", 91, 3), PLAINLY)  # overlap
@example("mindformers", 0, Fault("cut short", 4000, 1), Fault("value"), PLAINLY)
@example("hf bin", 0, Fault("cut short", 4000, 1), Fault("value"), PLAINLY)
@example("megatron", 0, Fault("bytes behind the end", 0, 1), Fault("value"), PLAINLY)
@example("fleetx", 0, Fault("deleted bytes", 3000, 6), Fault("value"), PLAINLY)
def test_tensors_with_a_fault(judge, sources, name, file, fault, header, how) -> None:
    source = sources[name]
    path = source.files[file % len(source.files)]
    if path == FILE and fault.number % 2:
        fault = header
    if path.endswith(".ckpt") and "GiB" in fault.kind:
        return  # whose messages it would hold one by one
    convert_or_refuse(judge, source, lambda work: spoiled(work / path, fault, _header), how)


@given(name=st.sampled_from([name for name, row in WRITTEN.items() if read_torch in row]),
       bits=st.lists(NUMBERS, min_size=1, max_size=3), how=HOW)  # fmt: skip
def test_flipped_bits_of_an_archive(judge, sources, name, bits, how) -> None:
    """The checksums of its records stay as they are."""

    def change(work: Path) -> None:
        path = work / sources[name].files[0]
        content = bytearray(path.read_bytes())
        for bit in bits:
            content[bit // 8 % len(content)] ^= 1 << bit % 8
        path.write_bytes(content)

    convert_or_refuse(judge, sources[name], change, how)


KINDS = ("edge", "another type", "strides", "tied head", "other head", "mask", "padding",
         "one storage", "order")  # fmt: skip
TYPES = (torch.float16, torch.float64, torch.int32, torch.int8, torch.bool)
SPECIAL = (float("nan"), float("inf"), -float("inf"), -0.0, 1e-45, 3.4e38, 70000.0)


def _other_values(state: dict[str, Any], kind: str, at: int, number: int) -> dict[str, Any]:
    key = sorted(state)[at % len(state)]
    table = next(name for name in state if name.endswith("wte.weight"))
    if kind == "edge":
        flat = state[key].reshape(-1).clone()
        flat[at % len(flat)] = SPECIAL[number % len(SPECIAL)]
        return state | {key: flat.reshape(state[key].shape)}
    if kind == "another type":
        keys = list(state) if at % 2 else [key]
        return state | {key: state[key].to(TYPES[number % len(TYPES)]) for key in keys}
    if kind == "strides" and state[key].dim() == 2:
        return state | {key: state[key].t().contiguous().t()}
    if kind in ("tied head", "other head"):
        return state | {"lm_head.weight": state[table] + (kind == "other head")}
    if kind == "mask":
        return state | {"transformer.h.0.attn.bias": torch.ones(1, 1, 5, 5)}
    if kind == "padding":
        rows = torch.zeros(5, 8, dtype=state[table].dtype)
        return state | {table: torch.cat([state[table], rows])}
    if kind == "one storage":
        joined = torch.cat([value.reshape(-1).to(torch.float32) for value in state.values()])
        parts = joined.split([value.numel() for value in state.values()])
        return {k: part.reshape(state[k].shape) for k, part in zip(state, parts, strict=True)}
    return dict(reversed(state.items()))


@given(name=st.sampled_from(("hf", "hf bin", "hf old bin")), how=HOW,
       kinds=st.lists(st.tuples(st.sampled_from(KINDS), NUMBERS, NUMBERS), min_size=1,
                      max_size=3))  # fmt: skip
def test_whole_files_of_other_values(judge, sources, name, kinds, how) -> None:
    def change(work: Path) -> None:
        path = work / sources[name].files[0]
        state = torch.load(path) if name != "hf" else {
            key: torch.from_numpy(array) for key, array in load_file(path).items()
        }  # fmt: skip
        for kind in kinds:
            state = _other_values(state, *kind)
        if name == "hf":
            arrays = {key: np.ascontiguousarray(value.numpy()) for key, value in state.items()}
            save_file(arrays, path)
        else:
            torch.save(state, path, _use_new_zipfile_serialization="old" not in name)

    convert_or_refuse(judge, sources[name], change, how)


class _Evil:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        import os

        return os.system, (self.command,)


OTHER_TREES: tuple[Any, ...] = (
    {}, [], None, 5, {"a": 1}, {5: torch.zeros(2)}, {"transformer.wte.weight": torch.zeros(2)},
    {"a": {"b": torch.zeros(1)}}, "x",
)  # fmt: skip


PICKLED = [name for name, row in WRITTEN.items() if row[3] in (read_torch, read_paddle)]


@given(name=st.sampled_from(PICKLED),
       what=st.one_of(st.just("code"), BYTE_FAULTS, BYTE_FAULTS,
                      st.sampled_from(range(len(OTHER_TREES)))), how=HOW)  # fmt: skip
@example("hf bin", "code", PLAINLY)
@example("hf old bin", "code", PLAINLY)
@example("fleetx", "code", PLAINLY)
def test_another_pickle(judge, sources, name, what, how) -> None:
    """One that runs code, holds another tree, or has a fault of bytes inside its archive."""
    judge.needed = {"refused"}

    def change(work: Path) -> None:
        path = work / sources[name].files[0]
        evil = _Evil(f"touch {work.parent}/executed")
        if isinstance(what, int) and path.suffix != ".pdparams":
            torch.save(OTHER_TREES[what], path)
        elif isinstance(what, int):
            path.write_bytes(pickle.dumps(("x", {}, [], None)[what % 4]))
        elif not zipfile.is_zipfile(path):
            tree = {"gpt.decoder.norm.weight": np.zeros(3), "x": evil}
            content = (
                pickle.dumps(tree) if what == "code" else changed_bytes(path.read_bytes(), what)
            )
            path.write_bytes(content)
        else:
            with zipfile.ZipFile(path) as archive:
                records = {name: archive.read(name) for name in archive.namelist()}
            with zipfile.ZipFile(path, "w") as archive:
                for record, content in records.items():
                    if record.endswith("data.pkl"):
                        code = what == "code"
                        content = pickle.dumps(evil) if code else changed_bytes(content, what)
                    archive.writestr(record, content)

    convert_or_refuse(judge, sources[name], change, how)


def _other_settings(content: bytes, fault: Fault) -> bytes:
    tree = yaml.safe_load(content)
    if not isinstance(tree, dict):
        return str(fault.value).encode("utf-8", "surrogatepass")
    bomb = ALIAS_BOMB if fault.number % 20 == 0 else ""
    return (bomb + to_yaml(changed_tree(tree, fault))).encode("utf-8", "surrogatepass")


@given(name=NAMES, file=NUMBERS, how=HOW,
       fault=st.one_of(tree_faults(YAML_VALUES), tree_faults(), FAULTS))  # fmt: skip
@example(name="hf", file=0, how=PLAINLY, fault=Fault("nearby value", 0, 0))
def test_settings_with_a_fault(judge, sources, name, file, how, fault) -> None:
    source = sources[name]
    path = source.settings[file % len(source.settings)]
    change = changed_json if path.endswith(".json") else _other_settings
    convert_or_refuse(
        judge, source, lambda work: spoiled(work / path, fault, change), how, resized=True
    )


@given(name=NAMES, other=NAMES, file=NUMBERS, how=HOW, fault=faults(*UNREADABLE),
       kind=st.sampled_from(("missing", "of another format", "twice", "empty folder",
                             "unreadable")))  # fmt: skip
def test_files_of_a_folder(judge, sources, name, other, file, how, fault, kind) -> None:
    source = sources[name]

    def change(work: Path) -> Any:
        files = [*source.files, *source.settings]
        path = work / files[file % len(files)]
        if kind == "unreadable":
            return spoiled(path, fault)
        if kind == "missing":
            path.unlink()
        elif kind == "twice":
            shutil.copy(path, path.with_name(f"other{path.suffix}"))
        elif kind == "empty folder":
            shutil.rmtree(work)
            work.mkdir()
        else:
            theirs = [*sources[other].files, *sources[other].settings]
            shutil.copy(sources[other].folder / theirs[fault.at % len(theirs)], path)
        return None

    convert_or_refuse(judge, source, change, how, resized=True)
