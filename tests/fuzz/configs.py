"""Configurations: YAML files with their base files, words of the command line, and what a plan
makes of them.
"""

from __future__ import annotations

import json
import math
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from pydantic import BaseModel

from common.config.load import save_config
from common.config.schema import RunConfig
from common.planner.plan import describe_plan, make_plan
from common.resolve.derive import resolve_mode, written_ranks
from common.systems.config import open_config
from tests.fuzz.dice import Dice
from tests.fuzz.engine import ROOT, Case
from tests.fuzz.mutations import (
    ALIAS_BOMB,
    BYTES,
    FILES,
    UNREADABLE,
    Raw,
    copy_tree,
    hostile_value,
    spoil_file,
    spoil_tree,
    to_yaml,
    unreadable,
)

CLASSES = {
    "tree": "1 to 3 faults in the tree of one of the project's configs",
    "schema key": "1 to 4 keys of the schema, each with a hostile or a plausible value",
    "override": "words of the command line: hostile values, sections, broken words",
    "MindFormers name": "keys by MindFormers' names, beside ours or not, hostile",
    "bytes": "a fault of bytes in a config's text",
    "file": "a special file, or one that cannot be opened, as the config or its base",
    "bases": "files that name each other, themselves, the next one twice, a chain, or no text as"
    " base",
    "alias bomb": "eight levels of nine aliases, in a section or at the top",
    "contradiction": "sizes that do not divide, of any magnitude",
}

RUN_MODES = ("train", "finetune", "eval", "predict", "serve", "export", "plan")
# A number that training turns into float32: what float32 cannot hold trains something else.
FLOAT32 = (
    ("optimizer", "learning_rate"), ("optimizer", "epsilon"), ("optimizer", "weight_decay"),
    ("model", "layer_norm_epsilon"),
    ("model", "initializer_range"), ("loss_scale", "initial"),
)  # fmt: skip
MINDFORMERS = {
    "parallel_config": (
        "data_parallel", "model_parallel", "pipeline_stage", "micro_batch_num", "use_seq_parallel",
        "optimizer_shard", "expert_parallel",
        "vocab_emb_dp", "gradient_aggregation_group",
    ),
    "recompute_config": ("recompute", "mp_comm_recompute", "parallel_optimizer_comm_recompute",
    "recompute_slice_activation"),
    "parallel": ("strategy_ckpt_save_file", "loss_repeated_mean"),
}  # fmt: skip


@dataclass
class Prepared:
    trees: list[dict[str, Any]]
    keys: dict[str, Any]


def schema_keys(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        options = (field.annotation, *typing.get_args(field.annotation))
        sections = [
            option
            for option in options
            if isinstance(option, type) and issubclass(option, BaseModel)
        ]
        yield prefix + name
        for section in sections:
            yield from schema_keys(section, f"{prefix}{name}.")


KEYS = sorted(set(schema_keys()))
LEAVES = [key for key in KEYS if not any(other.startswith(f"{key}.") for other in KEYS)]
NAMES = (
    "command line",
    "parallel sizes",
    str(ROOT / "configs"),
    *(f"{key}: " for key in KEYS),
    *MINDFORMERS["parallel_config"],
    *MINDFORMERS["recompute_config"],
    *(key for key in KEYS if "." in key),
)


def _scalars(value: Any) -> Any:
    """PyYAML reads 6e-4 as text, the project's configs mean a number."""
    if isinstance(value, dict):
        return {key: _scalars(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_scalars(item) for item in value]
    try:
        return float(value) if isinstance(value, str) and "e" in value else value
    except ValueError:
        return value


def prepare(folder: Path) -> Prepared:
    trees = []
    base = {
        "output_dir": "run",
        "model": {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "seq_length": 8,
        "vocab_size": 101},
        "optimizer": {"learning_rate": 1e-3}, "train": {"max_steps": 10, "micro_batch_size": 2},
    }  # fmt: skip
    for path in sorted((ROOT / "configs" / "gpt2").glob("run_*.yaml")):
        tree = _scalars(yaml.safe_load(path.read_bytes()))
        bases = tree.get("base", [])
        if bases:
            tree["base"] = [
                str(path.parent / name) for name in ([bases] if isinstance(bases, str) else bases)
            ]
        trees.append(tree)
    assert len(trees) > 10
    return Prepared(trees=[*trees, *[base] * len(trees)], keys=base)


def _options(annotation: Any) -> list[Any]:
    """Return values that a field may have, as far as its annotation says."""
    if annotation in (bool, int, float, str):
        return {
            bool: [True, False],
            int: [1, 2, 3, 4, 8, 64, 1000],
            float: [0.0, 0.1, 0.5, 1.0, 1e-3, 3.0],
            str: ["x", "a/b"],
        }[annotation]
    if typing.get_origin(annotation) is typing.Literal:
        return list(typing.get_args(annotation))
    return [option for part in typing.get_args(annotation) for option in _options(part)]


def _annotations(model: type[BaseModel] = RunConfig, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        found[prefix + name] = field.annotation
        for option in (field.annotation, *typing.get_args(field.annotation)):
            if isinstance(option, type) and issubclass(option, BaseModel):
                found |= _annotations(option, f"{prefix}{name}.")
    return found


OPTIONS = {key: _options(annotation) for key, annotation in _annotations().items()}


def _plausible(dice: Dice, key: str = "") -> Any:
    if OPTIONS.get(key) and dice.chance(0.8):
        return dice.pick(OPTIONS[key])
    return dice.pick((
        1, 2, 3, 4, 7, 8, 16, 64, 100, 1000, 12345, 2**20, 10**9, 0.1, 0.5, 0.9, 1e-3, 1e-8, 1.0,
        True, False, None, "auto", "none", "full",
        "bf16", "fp16", "float16", "mindspore", "torch", "npu", "cpu", "dynamic", "static",
        "interleaved_1f1b", "gpipe", "deepspeed",
        "semi_auto_parallel", "adamw", "sgd", "cosine", "949,50,1", "x", [1, 1], ["a", "b"],
        [0.5, "a", 0.5, "b"], "greedy", "mindir",
    ))  # fmt: skip


def _set(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *sections, key = dotted.split(".")
    for section in sections:
        below = tree.get(section)
        if not isinstance(below, dict):
            below = tree[section] = {}
        tree = below
    tree[key] = value


def make(dice: Dice, prepared: Prepared, folder: Path) -> Case:
    kind = dice.pick(("tree", "tree", "tree", "schema key", "schema key", "schema key", "override",
    "override", "override",
                      "MindFormers name", "bytes", "file", "bases", "alias bomb", "contradiction",
                      "contradiction"))  # fmt: skip
    path, words, about = folder / "config.yaml", list[str](), ""
    tree = copy_tree(dice.pick(prepared.trees))
    plain = True  # the tree says what the config is
    opened: tuple[str, Path] | None = None
    if kind == "tree":
        for _ in range(dice.pick((1, 1, 1, 2, 3))):
            tree, fault, key = spoil_tree(dice, tree, yaml=True)
            about += f"{fault} at {key}; "
            if type(tree) is not dict or any(
                type(node) not in (dict, list) and isinstance(node, list) for node in _nodes(tree)
            ):
                break  # a key twice: no tree to change further
        plain = False
    elif kind == "schema key":
        for key in dice.some(KEYS, dice.pick((1, 1, 4))):
            value = (
                _plausible(dice, key) if dice.chance(0.75) else hostile_value(dice, yaml=True)[1]
            )
            _set(tree, key, value)
            about += f"{key}={str(value)[:40]}; "
    elif kind == "override":
        words = [_word(dice) for _ in range(dice.pick((1, 1, 2, 4)))]
        about = str([word[:60] for word in words])
    elif kind == "MindFormers name":
        for _ in range(dice.between(1, 3)):
            section = dice.pick(list(MINDFORMERS))
            value = _plausible(dice) if dice.chance(0.6) else hostile_value(dice, yaml=True)[1]
            if dice.chance(0.15):
                tree[section] = value
            else:
                _set(tree, f"{section}.{dice.pick(MINDFORMERS[section])}", value)
        if dice.chance(0.2):
            tree[dice.pick(("train", "parallel"))] = hostile_value(dice)[1]
        plain = False
    elif kind == "contradiction":
        for key in dice.some(("model.num_layers", "model.hidden_size", "model.num_heads",
        "model.ffn_hidden_size", "model.seq_length",
                              "model.max_positions", "model.vocab_size", "model.vocab_multiple",
                              "parallel.model_parallel",
                              "parallel.pipeline_stage",
                              "parallel.data_parallel", "parallel.virtual_stages",
                              "parallel.shard_size", "train.micro_batch_size",
                              "train.global_batch_size", "train.accumulation_steps",
                              "parallel.zero_stage", "parallel.stage_layers"),
                              5):  # fmt: skip
            value = dice.pick(
                (1, 2, 3, 7, 12, 64, 1000, 999_999_937, 10**6, 2**31, 2**40 - 1, 2**40)
            )
            words.append(f"{key}={[1, value] if key.endswith('stage_layers') else value}")
        about = " ".join(words)
    path.write_text(to_yaml(tree), encoding="utf-8", errors="surrogatepass")
    if kind == "bytes":
        fault = dice.pick(list(BYTES))
        path.write_bytes(BYTES[fault](dice, path.read_bytes()))
        plain, about = False, fault
    elif kind == "file":
        target = path
        if dice.chance(0.5):
            target = folder / "base.yaml"
            target.write_text("seed: 1\n")
            path.write_text(
                to_yaml(
                    {
                        "base": "base.yaml",
                        **{key: value for key, value in tree.items() if key != "base"},
                    }
                )
            )
        about = dice.pick([*FILES, *UNREADABLE])
        if about in FILES:
            spoil_file(about, target)
        else:
            opened = (about, target)
        plain, about = False, f"{target.name}: {about}"
    elif kind == "bases":
        about, plain = _write_bases(dice, path, tree), False
    elif kind == "alias bomb":
        path.write_text(
            ALIAS_BOMB
            + (to_yaml(tree) if dice.chance(0.5) else "")
            + dice.pick(("", "model: *a8\n", "data: {train: *a8}\n"))
        )
        plain, about = False, "nine lines"
    run_mode, world_size, all_ranks = (
        dice.pick(RUN_MODES),
        dice.pick((None, None, None, 1, 2, 8, 64)),
        dice.chance(0.1),
    )

    def run() -> RunConfig:
        if opened is not None:
            with unreadable(*opened):
                return _run(path, words, run_mode, world_size, all_ranks)
        return _run(path, words, run_mode, world_size, all_ranks)

    def check(config: RunConfig) -> str | None:
        save_config(config, folder / "again.yaml")
        if open_config(folder / "again.yaml").config != config:
            return "what is written is read back as another config"
        return (
            _not_float32(config)
            or (_differs(tree, config) if plain and not words else None)
            or _words_differ(words, config)
        )

    return Case(
        kind=kind,
        run=run,
        names=(str(folder), *NAMES),
        check=check,
        about=f"{run_mode} {about}"[:300],
    )


def _nodes(tree: Any) -> Iterator[Any]:
    yield tree
    for child in (
        tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    ):
        if not isinstance(child, tuple):
            yield from _nodes(child)


def _run(
    path: Path, words: list[str], run_mode: str, world_size: int | None, all_ranks: bool
) -> RunConfig:
    config = open_config(path, words).config  # without the checkpoint that a preset names
    size = world_size or written_ranks(config)
    resolved = resolve_mode(config, run_mode, world_size=size)
    if run_mode == "plan":
        describe_plan(make_plan(resolved), resolved, all_ranks=all_ranks)
    return config


def _word(dice: Dice) -> str:
    key = dice.pick(KEYS if dice.chance(0.1) else LEAVES)
    if dice.chance(0.1):
        return dice.pick(
            (
                key,
                f"={key}",
                f"--{key}=1",
                f"{key}x=1",
                f"{key}.x=1",
                f"{key}..x=1",
                "=",
                "",
                "a\0b=1",
                "\u0663=1",
                f" {key}=1",
                f"{key}=\0",
            )
        )
    if dice.chance(0.7):
        plausible = _plausible(dice, key)
        return f"{key}={plausible if isinstance(plausible, str) else json.dumps(plausible)}"
    value = hostile_value(dice, yaml=True)[1]
    if isinstance(value, Raw):
        return f"{key}={value.text}"
    return f"{key}={value if isinstance(value, str) else json.dumps(value)}"


def _write_bases(dice: Dice, path: Path, tree: dict[str, Any]) -> str:
    folder = path.parent
    own = to_yaml({key: value for key, value in tree.items() if key != "base"})
    kind = dice.pick(
        (
            "itself",
            "each other",
            "twice",
            "a chain",
            "no text",
            "a link to itself",
            "through a link",
        )
    )
    if kind == "itself":
        path.write_text(own + "base: config.yaml\n")
    elif kind == "each other":
        path.write_text(own + "base: other.yaml\n")
        (folder / "other.yaml").write_text("base: [config.yaml]\n")
    elif kind in ("twice", "a chain"):
        last = dice.pick((2, 5, 30, 200))
        for number in range(last):
            names = [f"{number + 1}.yaml"] * (2 if kind == "twice" else 1)
            (folder / f"{number}.yaml").write_text(f"base: {json.dumps(names)}\n")
        (folder / f"{last}.yaml").write_text("seed: 3\n")
        path.write_text(own + "base: 0.yaml\n")
    elif kind == "no text":
        path.write_text(own + to_yaml({"base": hostile_value(dice, yaml=True)[1]}))
    elif kind == "a link to itself":
        (folder / "loop.yaml").symlink_to("loop.yaml")
        path.write_text(own + "base: loop.yaml\n")
    else:
        (folder / "link.yaml").symlink_to("config.yaml")
        path.write_text(own + "base: link.yaml\n")
    return kind


def _not_float32(config: RunConfig) -> str | None:
    for section, name in FLOAT32:
        value = getattr(getattr(config, section), name)
        with np.errstate(over="ignore", under="ignore"):
            held = float(np.float32(value))
        if value and (held == 0 or not math.isfinite(held)):
            return f"{section}.{name}={value!r} was accepted, which float32 holds as {held}"
    return None


def _differs(tree: Any, config: Any, prefix: str = "") -> str | None:
    """Compare the numbers of a tree, as they were written, with those of the config."""
    for key, value in tree.items():
        found = getattr(config, key, None)
        if isinstance(value, dict):
            if isinstance(found, BaseModel) and (
                problem := _differs(value, found, f"{prefix}{key}.")
            ):
                return problem
        elif (
            type(value) in (int, float, bool)
            and hasattr(config, key)
            and not isinstance(found, (list, str, BaseModel))
            and found != value
        ):
            return f"{prefix}{key}={value!r} was read as {found!r}"
    return None


def _words_differ(words: list[str], config: RunConfig) -> str | None:
    """Compare numbers given as ASCII digits with those of the config; the last word for a key
    counts.
    """
    given = dict(word.split("=", 1) for word in words)
    for key, text in given.items():
        if not (text.isascii() and text.isdigit()) or any(
            other != key and (other.startswith(f"{key}.") or key.startswith(f"{other}."))
            for other in given
        ):
            continue
        found: Any = config
        for part in key.split("."):
            found = getattr(found, part, None)
        if type(found) is int and found != int(text):
            return f"{key}={text} was read as {found!r}"
    return None
