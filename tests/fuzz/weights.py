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
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from safetensors.numpy import load_file, save_file

from common.config.schema import ModelConfig
from common.conversion.convert import convert
from common.log import LOG
from common.systems.table import FORMATS
from common.systems.weights import Weight, Weights
from common.weights.names import parameter_shapes
from tests.fuzz.dice import Dice
from tests.fuzz.engine import Case
from tests.fuzz.mutations import (
    ALIAS_BOMB,
    UNREADABLE,
    spoil_json,
    spoil_one,
    spoil_tree,
    to_yaml,
    unreadable,
)
from tests.fuzz.weight_files import (
    FIXTURES,
    FLEETX,
    Arrays,
    count_paddle,
    damaged_record,
    read_mindspore,
    read_paddle,
    read_torch,
)

CLASSES = {
    "weights": "tensors in .safetensors, .bin (zip, old, shards), .ckpt, .pt, .pdparams:"
    " bytes, special files, headers",
    "values": "whole Hugging Face files of other numbers, types, strides, shared storages, tied"
    " heads, masks, padded vocabularies",
    "archive": "a torch file with a record's bits flipped, and its CRC left as it is",
    "pickle": "a .bin, .pt or .pdparams whose pickle was changed, or runs code",
    "settings": "the JSON or YAML of each format: bytes, special files, faults of the tree, alias"
    " bombs",
    "folder": "files missing, twice, exchanged with those of another format",
    "unreadable": "a file that cannot be opened",
}
MODEL = ModelConfig(
    num_layers=2, hidden_size=8, num_heads=2, seq_length=5, vocab_size=11, ffn_hidden_size=24,
    max_positions=5, embedding_dropout=0.0,
    attention_dropout=0.0, hidden_dropout=0.0,
)  # fmt: skip


@dataclass
class Source:
    """A whole folder of one format."""

    folder: Path
    format: str
    files: list[str]
    """Files of tensors."""
    settings: list[str]
    read: Callable[[Path], Arrays]
    """The tensors of a folder, without code of the project. Raises anything for a file that is
    none.
    """
    values: Arrays
    target: Arrays
    """Weights that the whole folder becomes."""


# ---- independent readers ----


def _reader(files: list[str], one: Callable[[Path], Arrays]) -> Callable[[Path], Arrays]:
    return lambda folder: {
        f"{file}:{name}": array for file in files for name, array in one(folder / file).items()
    }


# ---- whole folders ----


def _counting() -> Weights:
    first = itertools.count(1)
    arrays = {
        name: np.array([next(first) for _ in range(int(np.prod(shape)))], np.float32).reshape(shape)
        for name, shape in parameter_shapes(MODEL).items()
    }
    tensors = {
        name: Weight(dtype="float32", shape=array.shape, load=lambda array=array: array)
        for name, array in arrays.items()
    }
    return Weights(path=Path("made.here"), format="made", model=MODEL, tensors=tensors)


def _convert(folder: Path, format: str, target: Path) -> Arrays:
    convert(folder, target, target_format="hf", source_format=format)
    return {name: array for name, array in load_file(target / "model.safetensors").items()}


def prepare(folder: Path) -> list[Source]:
    LOG.setLevel(logging.CRITICAL)
    weights = _counting()
    made: list[tuple[str, str, list[str], list[str], Callable[[Path], Arrays]]] = []

    def written(
        name: str,
        format: str,
        files: list[str],
        settings: list[str],
        one: Callable[[Path], Arrays],
        **ranks: int,
    ) -> Path:
        (folder / name).mkdir()
        if ranks:
            FORMATS[format].write_shards(
                folder / name, weights, None, ranks["tensor"], ranks["stages"]
            )
        else:
            FORMATS[format].write(folder / name, weights, None)
        made.append((name, format, files, settings, _reader(files, one)))
        return folder / name

    hugging_face = written("hf", "hf", ["model.safetensors"], ["config.json"], load_file)
    written("ours", "torch_gpt2", ["model.safetensors"], ["manifest.json"], load_file)
    written("mindformers", "mindformers", ["gpt2.ckpt"], ["model.yaml"], read_mindspore)
    written("mindformers 0.3", "mindformers_r0.3", ["gpt2.ckpt"], ["model.yaml"], read_mindspore)
    for name in ("megatron", "megatron_core"):
        file = "release/mp_rank_00/model_optim_rng.pt"
        written(name, name, [file], ["model.yaml", "latest_checkpointed_iteration.txt"], read_torch)
        ranks = ["release/mp_rank_00/model_optim_rng.pt", "release/mp_rank_01/model_optim_rng.pt"]
        written(f"{name} of 2 ranks", name, ranks, ["model.yaml"], read_torch, tensor=2, stages=1)
    written(
        "megatron of 2 stages",
        "megatron",
        [f"release/mp_rank_00_00{n}/model_optim_rng.pt" for n in range(2)],
        ["model.yaml"],
        read_torch,
        tensor=1,
        stages=2,
    )
    state = {
        name: torch.from_numpy(array)
        for name, array in load_file(hugging_face / "model.safetensors").items()
    }
    halves = [dict(list(state.items())[:9]), dict(list(state.items())[9:])]
    for name, options in (
        ("hf bin", {}),
        ("hf old bin", {"_use_new_zipfile_serialization": False}),
    ):
        (folder / name).mkdir()
        shutil.copy(hugging_face / "config.json", folder / name)
        torch.save(state, folder / name / "pytorch_model.bin", **options)
        made.append(
            (
                name,
                "hf",
                ["pytorch_model.bin"],
                ["config.json"],
                _reader(["pytorch_model.bin"], read_torch),
            )
        )
    (folder / "hf shards").mkdir()
    shutil.copy(hugging_face / "config.json", folder / "hf shards")
    shards = [f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2)]
    for shard, half in zip(shards, halves, strict=True):
        torch.save(half, folder / "hf shards" / shard)
    places = {name: shard for shard, half in zip(shards, halves, strict=True) for name in half}
    (folder / "hf shards" / "pytorch_model.bin.index.json").write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": places})
    )
    made.append(
        (
            "hf shards",
            "hf",
            shards,
            ["config.json", "pytorch_model.bin.index.json"],
            _reader(shards, read_torch),
        )
    )
    (folder / "fleetx").mkdir()
    shutil.copy(FIXTURES / "fleetx" / "model.pdparams", folder / "fleetx")
    count_paddle(folder / "fleetx" / "model.pdparams")
    (folder / "fleetx" / "pretrain.yaml").write_text(FLEETX)
    made.append(
        (
            "fleetx",
            "fleetx",
            ["model.pdparams"],
            ["pretrain.yaml"],
            _reader(["model.pdparams"], read_paddle),
        )
    )
    sources = []
    for name, format, files, settings, read in made:
        values = read(folder / name)
        target = _convert(folder / name, format, folder / f"{name} converted")
        sources.append(
            Source(
                folder=folder / name,
                format=format,
                files=files,
                settings=settings,
                read=read,
                values=values,
                target=target,
            )
        )
        if values:
            assert _differs(sources[-1], values, target) is None, name
    return sources


# ---- inputs ----


def make(dice: Dice, sources: list[Source], folder: Path) -> Case:
    source = dice.pick(sources)
    kind = dice.pick(
        (
            "weights",
            "weights",
            "weights",
            "values",
            "archive",
            "pickle",
            "settings",
            "settings",
            "settings",
            "folder",
            "unreadable",
        )
    )
    torch_like = [name for name in source.files if name.endswith((".bin", ".pt"))]
    if kind == "archive" and (not torch_like or source.folder.name == "hf old bin"):
        kind = "weights"
    if kind == "pickle" and not torch_like and source.format != "fleetx":
        kind = "settings"
    if kind == "values":
        source = dice.pick(
            [item for item in sources if item.folder.name in ("hf", "hf bin", "hf old bin")]
        )
    work = folder / "source"
    shutil.copytree(source.folder, work)
    opened: tuple[str, Path] | None = None
    settings_changed = kind in ("settings", "folder")
    if kind == "weights":
        path = work / dice.pick(source.files)
        about = f"{path.name}: " + spoil_one(
            dice,
            path,
            structured=_header if path.suffix == ".safetensors" else None,
            huge=path.suffix != ".ckpt",
        )
    elif kind == "values":
        path = work / source.files[0]
        about = _other_values(dice, path)
    elif kind == "archive":
        path = work / dice.pick(torch_like)
        content = bytearray(path.read_bytes())
        for _ in range(dice.pick((1, 1, 4))):
            content[dice.below(len(content))] ^= 1 << dice.below(8)
        path.write_bytes(content)
        about = f"{path.name}: flipped bits"
    elif kind == "pickle":
        path = work / dice.pick(torch_like or source.files)
        about = f"{path.name}: {_spoil_pickle(dice, path)}"
    elif kind == "settings":
        path = work / dice.pick(source.settings)
        about = f"{path.name}: {_spoil_settings(dice, path)}"
    elif kind == "folder":
        about = _spoil_folder(dice, source, work, dice.pick(sources))
    else:
        path = work / dice.pick([*source.files, *source.settings])
        opened = (dice.pick(list(UNREADABLE)), path)
        about = f"{path.name}: {opened[0]}"
    marker = folder / "executed"
    to = dice.pick(("hf", "hf", "hf", "hf", "torch_gpt2", "mindformers", "megatron"))

    def run() -> Path:
        with ExitStack() as stack:
            if opened is not None:
                stack.enter_context(unreadable(*opened))
            target = folder / "target"
            source_format = None if dice.number % 5 == 0 else source.format
            try:
                convert(
                    work,
                    target,
                    target_format=to,
                    source_format=source_format,
                    verify=dice.number % 3 == 0,
                )
            finally:
                left = [
                    path.name
                    for path in folder.iterdir()
                    if path.name not in ("source", "target")
                    or (path.name == "target" and not _whole(path))
                ]
                if left:
                    raise AssertionError(f"left over: {left}")
        return target

    def check(target: Path) -> str | None:
        if marker.exists():
            return "code of the file was run"
        if to != "hf":  # its own reader is held against independent ones above
            again = Path(tempfile.mkdtemp(dir=folder)) / "hf"
            return _judge(source, work, _convert(target, to, again), settings_changed, again)
        return _judge(
            source, work, load_file(target / "model.safetensors"), settings_changed, target
        )

    names = (str(work), "--model_parallel", "a weight of")
    return Case(
        kind=kind, run=run, names=names, check=check, about=f"{source.folder.name} to {to}, {about}"
    )


def _whole(target: Path) -> bool:
    return (target / "conversion.json").is_file()


def _judge(
    source: Source, work: Path, found: Arrays, settings_changed: bool, target: Path
) -> str | None:
    for name in source.files:
        if (
            name.endswith((".bin", ".pt"))
            and (work / name).is_file()
            and (record := damaged_record(work / name))
        ):
            return f"{name}: {record} is damaged by its CRC-32, and was taken"
    try:
        values = source.read(work)
    except BaseException as error:
        if isinstance(error, (MemoryError, KeyboardInterrupt)):
            raise
        values = None
    if settings_changed:
        words = json.loads((target / "config.json").read_text())
        if words["n_head"] != MODEL.num_heads and (
            values is None or words["n_head"] != _heads(source, work)
        ):
            return f"n_head={words['n_head']}, which no file says"
        if words["n_head"] != MODEL.num_heads:
            return None  # another arrangement of the same numbers
    if values is None or not source.values:  # the independent reader refuses, or there is none
        return _differs_from(source.target, found)
    return _differs(source, values, found, settings_changed)


def _heads(source: Source, work: Path) -> int | None:
    """Look for the number of heads in the settings."""
    for name in source.settings:
        try:
            words = yaml.safe_load((work / name).read_bytes())
            words = words.get("config", words)
            words = words.get("model", words.get("Model", words))
            return int(
                next(
                    words[key]
                    for key in ("n_head", "num_heads", "num_attention_heads")
                    if key in words
                )
            )
        except Exception:
            continue
    return None


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def _differs_from(expected: Arrays, found: Arrays) -> str | None:
    for name in expected.keys() & found.keys():
        rows = len(found[name])
        if found[name].dtype != expected[name].dtype or not np.array_equal(
            _bits(found[name]), _bits(expected[name][:rows])
        ):
            return f"{name} is not what the whole file held"
    return None


def _differs(
    source: Source, values: Arrays, found: Arrays, settings_changed: bool = False
) -> str | None:
    """Follow each number from its place in the source to that in the target."""
    places: dict[int, tuple[str, int]] = {}
    for name, array in source.values.items():
        if array.dtype.kind == "f":
            places.update(
                {
                    int(number): (name, place)
                    for place, number in enumerate(array.reshape(-1).tolist())
                }
            )
    for name, expected in source.target.items():
        if name not in found:
            continue
        rows = len(found[name])
        numbers = expected[:rows].reshape(-1)
        got = found[name].reshape(-1)
        if settings_changed and name.endswith("wte.weight"):
            got = got[: len(numbers)]  # a vocabulary up to the padded rows may be named
        if len(got) != len(numbers):
            return f"{name} has another shape"
        made = np.empty(len(numbers), np.float32)
        for place, number in enumerate(numbers.tolist()):
            tensor, at = places[int(number)]
            if tensor not in values or (
                values[tensor].size != source.values[tensor].size and at >= values[tensor].size
            ):
                return f"{name} was read, but {tensor} is not there"
            made[place] = values[tensor].reshape(-1)[at]
        if not np.array_equal(_bits(got.astype(np.float32)), _bits(made)):
            return f"{name} holds other numbers than the file"
    return None


def _other_values(dice: Dice, path: Path) -> str:
    """Write a whole file of the same names with other numbers."""
    plain = path.suffix == ".safetensors"
    state = (
        {name: torch.from_numpy(array.copy()) for name, array in load_file(path).items()}
        if plain
        else torch.load(path, weights_only=True)
    )
    kinds = dice.some(
        (
            "edges",
            "another type",
            "strides",
            "tied head",
            "other head",
            "mask",
            "padding",
            "one storage",
            "order",
        ),
        3,
    )
    for kind in kinds:
        name = dice.pick(sorted(state))
        if kind == "edges":
            flat = state[name].reshape(-1).clone()
            flat[dice.below(len(flat))] = dice.pick(
                (float("nan"), float("inf"), -float("inf"), -0.0, 1e-45, 3.4e38, 70000.0)
            )
            state[name] = flat.reshape(state[name].shape)
        elif kind == "another type":
            wanted = dice.pick((torch.float16, torch.float64, torch.int32, torch.int8, torch.bool))
            for key in sorted(state) if dice.chance(0.5) else (name,):
                state[key] = state[key].to(wanted)
        elif kind == "strides" and not plain:
            state[name] = (
                state[name].t().contiguous().t() if state[name].dim() == 2 else state[name]
            )
        elif kind == "tied head":
            state["lm_head.weight"] = next(
                value.clone() for key, value in state.items() if key.endswith("wte.weight")
            )
        elif kind == "other head":
            state["lm_head.weight"] = next(
                value + 1 for key, value in state.items() if key.endswith("wte.weight")
            )
        elif kind == "mask":
            state["transformer.h.0.attn.bias"] = torch.ones(1, 1, 5, 5)
        elif kind == "padding":
            key = next(key for key in sorted(state) if key.endswith("wte.weight"))
            state[key] = torch.cat([state[key], torch.zeros(5, 8, dtype=state[key].dtype)])
        elif kind == "one storage" and not plain:
            joined = torch.cat([value.reshape(-1).to(torch.float32) for value in state.values()])
            at = 0
            for key, value in state.items():
                state[key] = joined[at : at + value.numel()].reshape(value.shape)
                at += value.numel()
        elif kind == "order":
            state = dict(reversed(state.items()))
    if plain:
        save_file({name: value.numpy() for name, value in state.items()}, path)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=dice.chance(0.7))
    return ", ".join(kinds)


def _header(dice: Dice, content: bytes) -> tuple[bytes, str, str]:
    length = int.from_bytes(content[:8], "little")
    text, kind, key = spoil_json(dice, content[8 : 8 + length])
    return len(text).to_bytes(8, "little") + text + content[8 + length :], kind, key


def _spoil_settings(dice: Dice, path: Path) -> str:
    if path.suffix == ".json":
        return spoil_one(dice, path, structured=spoil_json)
    if path.suffix not in (".yaml", ".yml"):
        return spoil_one(dice, path)

    def tree(dice: Dice, content: bytes) -> tuple[bytes, str, str]:
        if dice.chance(0.05):
            return ALIAS_BOMB.encode() + content, "alias bomb", ""
        words, kind, key = spoil_tree(dice, yaml.safe_load(content), yaml=True)
        return to_yaml(words).encode("utf-8", "surrogatepass"), kind, key

    return spoil_one(dice, path, structured=tree)


class _Evil:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        import os

        return os.system, (self.command,)


def _spoil_pickle(dice: Dice, path: Path) -> str:
    command = f"touch {path.parents[1]}/executed"
    kind = dice.pick(("runs code", "another tree", "bytes"))
    tree: Any = dice.pick(
        (
            {},
            [],
            None,
            5,
            {"a": 1},
            {5: torch.zeros(2)},
            {"transformer.wte.weight": torch.zeros(2)},
            {"a": {"b": torch.zeros(1)}},
            "x",
        )
    )
    if path.suffix == ".pdparams":
        content = pickle.dumps(
            {"gpt.decoder.norm.weight": np.zeros(3), "x": _Evil(command)}
            if kind == "runs code"
            else tree
            if not torch.is_tensor(tree)
            else {}
        )
        path.write_bytes(content)
        if kind == "bytes":
            spoil_one(dice, path, huge=False)
        return kind
    if kind == "another tree":
        torch.save(tree, path)
        return kind
    with zipfile.ZipFile(path) if zipfile.is_zipfile(path) else tempfile.TemporaryFile() as archive:
        if not isinstance(archive, zipfile.ZipFile):
            path.write_bytes(path.read_bytes()[:50] + dice.data(20) + path.read_bytes()[70:])
            return "bytes of an old file"
        records = {name: archive.read(name) for name in archive.namelist()}
    from tests.fuzz.mutations import BYTES

    with zipfile.ZipFile(path, "w") as archive:
        for name, content in records.items():
            if name.endswith("data.pkl"):
                change = dice.pick(list(BYTES))
                content = (
                    pickle.dumps(_Evil(command))
                    if kind == "runs code"
                    else BYTES[change](dice, content)
                )
                kind = kind if kind == "runs code" else f"{kind}: {change}"
            archive.writestr(name, content)
    return kind


def _spoil_folder(dice: Dice, source: Source, work: Path, other: Source) -> str:
    path = work / dice.pick([*source.files, *source.settings])
    kind = dice.pick(("missing", "of another format", "twice", "empty folder"))
    if kind == "missing":
        path.unlink()
    elif kind == "of another format":
        theirs = other.folder / dice.pick([*other.files, *other.settings])
        shutil.copy(theirs, path)
        return f"{path.name} is {other.folder.name}'s {theirs.name}"
    elif kind == "twice":
        shutil.copy(path, path.with_name(f"other{path.suffix}"))
    else:
        shutil.rmtree(work)
        work.mkdir()
    return f"{path.name}: {kind}"
