"""Configurations: YAML files with their base files, words of the command line, and what a plan makes of them."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

import yaml
from hypothesis import example, given, strategies as st
from pydantic import BaseModel

from common.config.load import save_config
from common.config.schema import RunConfig
from common.planner.plan import describe_plan, make_plan
from common.resolve.derive import resolve_mode, written_ranks
from common.systems.config import open_config
from tests.fuzz.faults import FAULTS, YAML_FAULTS, YAML_VALUES, Fault, Raw, changed_tree, spoil, to_json, to_yaml, write

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "gpt2"
RUN_MODES = ("train", "finetune", "eval", "predict", "serve", "export", "plan")
MINDFORMERS = [
    *("parallel_config.model_parallel", "parallel_config.pipeline_stage"),
    *("parallel_config.use_seq_parallel", "recompute_config.recompute"),
    "parallel.strategy_ckpt_save_file",
]
HOSTILE = st.sampled_from(YAML_VALUES)


# ---- trees and keys to choose from ----


def _annotations(model: type[BaseModel] = RunConfig, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        found[prefix + name] = field.annotation
        for option in (field.annotation, *typing.get_args(field.annotation)):
            if isinstance(option, type) and issubclass(option, BaseModel):
                found |= _annotations(option, f"{prefix}{name}.")
    return found


def _options(annotation: Any) -> list[Any]:
    """Return values that a field may have, as far as its annotation says."""
    plain: dict[Any, list[Any]] = {
        bool: [True, False], int: [1, 2, 3, 4, 8, 64, 1000],
        float: [0.0, 0.1, 0.5, 1.0, 1e-3, 3.0], str: ["x", "a/b"],
    }  # fmt: skip
    if annotation in plain:
        return plain[annotation]
    parts = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return list(parts)
    return [option for part in parts for option in _options(part)]


KEYS = {key: _options(annotation) for key, annotation in _annotations().items()}
OPTIONS = [*{repr(value): value for values in KEYS.values() for value in values}.values()]
LEAVES = [key for key in KEYS if not any(other.startswith(f"{key}.") for other in KEYS)]
PLAIN = {
    "output_dir": "run", "optimizer": {"learning_rate": 1e-3},
    "model": {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "seq_length": 8,
              "vocab_size": 101},
    "train": {"max_steps": 10, "micro_batch_size": 2},
}  # fmt: skip
PATHS = sorted(CONFIGS.glob("run_*.yaml"))
PRESETS = [yaml.safe_load(path.read_bytes()) | {"base": [str(path)]} for path in PATHS]
TREES = st.one_of(st.just(PLAIN), st.sampled_from(PRESETS))
NAMES = (
    "command line", "parallel sizes", "/etc/passwd: ", str(CONFIGS),
    *(f"{key}: " for key in KEYS),
    *(key.partition(".")[2] for key in MINDFORMERS), *(key for key in KEYS if "." in key),
)  # fmt: skip


def _pairs(keys: list[str]) -> st.SearchStrategy[tuple[str, Any]]:
    """A key with a value that its type knows, one of another key, or a hostile one."""
    key, others = st.sampled_from(keys), st.sampled_from(OPTIONS)
    known = key.flatmap(lambda key: st.tuples(st.just(key), st.sampled_from(KEYS[key] or [1])))
    theirs = st.tuples(st.sampled_from(MINDFORMERS), others | HOSTILE)
    return st.one_of(known, known, st.tuples(key, others), st.tuples(key, HOSTILE), theirs)


def _word(pair: tuple[str, Any]) -> str:
    key, value = pair
    return f"{key}={value if isinstance(value, str) else to_json(value)}"


SIZES = [
    key for key in LEAVES if key.partition(".")[0] in ("model", "parallel", "train")
    and 1000 in KEYS[key]
]  # fmt: skip
SIZE = st.sampled_from((1, 2, 3, 7, 12, 64, 1000, 999_999_937, 10**6, 2**31, 2**40 - 1, 2**40))
SIZED = st.tuples(st.sampled_from(SIZES), SIZE).map(
    lambda pair: (pair[0], [1, pair[1]] if pair[0].endswith("stage_layers") else pair[1])
)
BROKEN = ("{}", "={}", "--{}=1", "{}x=1", "{}.x=1", "{}..x=1", "=", "", "a\0b=1", "\u0663=1",
          " {}=1", "{}=\0")  # fmt: skip
WORDS = st.one_of(
    _pairs(LEAVES).map(_word),
    SIZED.map(_word),
    _pairs(list(KEYS)).map(_word),
    st.builds(str.format, st.sampled_from(BROKEN), st.sampled_from(LEAVES)),
)
MODE = "train", 1, False
MODES = st.tuples(st.sampled_from(RUN_MODES), st.sampled_from((None, None, None, 1, 2, 8, 64)), st.booleans())
"""Run mode, number of ranks, and whether a plan shows every rank."""


def put(tree: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return the tree with a value at a dotted key."""
    name, _, rest = key.partition(".")
    below = tree.get(name)
    if rest:
        value = put(below if isinstance(below, dict) else {}, rest, value)
    return tree | {name: value}


# ---- what is done with an input, and what must hold ----


def use(folder: Path, words: list[str], run_mode: str, ranks: int | None, all_ranks: bool) -> RunConfig:
    """Do what a run mode does; the config is the same where it is written and read again."""
    config = open_config(folder / "config.yaml", words).config  # without the checkpoint that a preset names
    resolved = resolve_mode(config, run_mode, world_size=ranks or written_ranks(config))
    if run_mode == "plan":
        describe_plan(make_plan(resolved), all_ranks=all_ranks)
    save_config(config, folder / "again.yaml")
    assert open_config(folder / "again.yaml").config == config
    return config


def require_numbers(tree: Any, config: Any) -> None:
    """The numbers of a tree, as they were written, are those of the config."""
    for key, value in tree.items():
        found = getattr(config, key, None)
        if isinstance(value, dict) and isinstance(found, BaseModel):
            require_numbers(value, found)
        elif type(value) in (int, float, bool) and hasattr(config, key):
            assert isinstance(found, (list, str, BaseModel)) or found == value, f"{key}={value!r}"


@given(tree=TREES, faults=st.lists(YAML_FAULTS, max_size=3), mode=MODES,
       faulty=st.sampled_from(("config.yaml", "base.yaml")), of_file=st.none() | FAULTS)  # fmt: skip
@example(PLAIN, [Fault("value", 3, 0, Raw("!!timestamp x"))], MODE, "base.yaml", None)
@example(PLAIN, [Fault("value", 3, 0, Raw('"\\ud800"'))], MODE, "base.yaml", None)
@example(PLAIN, [Fault("key twice", 13, 1)], MODE, "base.yaml", None)
@example(PLAIN, [], MODE, "base.yaml", Fault("missing file"))
@example(PLAIN, [], MODE, "base.yaml", None)
def test_files_with_faults(judge, tree, faults, mode, faulty, of_file) -> None:
    """of_file: of the configuration, or of one that it is based on."""
    bases = {"base": [*tree.get("base", []), "base.yaml"]} if faulty == "base.yaml" else {}
    with judge.folder() as folder:
        write(folder / "config.yaml", to_yaml(changed_tree(tree | bases, *faults)))
        write(folder / "base.yaml", "seed: 1\n")
        spoil(folder / faulty, of_file)
        with judge(str(folder), *NAMES):
            use(folder, [], *mode)


PAIRS = st.lists(st.one_of(_pairs(list(KEYS)), SIZED), max_size=4)


@given(tree=TREES, mode=MODES, pairs=PAIRS, words=st.lists(WORDS, max_size=4))
@example(tree=PLAIN, mode=MODE, pairs=[("parallel_config.pipeline_stage", "x")], words=[])
@example(tree=PLAIN, mode=MODE, pairs=[("parallel_config", 5)], words=[])
@example(tree=PLAIN, mode=MODE, pairs=[], words=["optimizer.learning_rate=1e-320"])
@example(tree=PLAIN, mode=MODE, pairs=[], words=["model.num_layers=\u0663"])
@example(tree=PLAIN, mode=MODE, pairs=[], words=["seed=" + "9" * 5000])
def test_keys_of_the_schema_in_a_file_or_as_words(judge, tree, mode, pairs, words) -> None:
    """Numbers are those that were written, of words those of ASCII digits."""
    for key, value in () if words else pairs:
        tree = put(tree, key, value)
    with judge.folder() as folder:
        write(folder / "config.yaml", to_yaml(tree))
        with judge(str(folder), *NAMES):
            config = use(folder, words, *mode)
            wanted = {} if words else tree
            for key, _, text in (word.partition("=") for word in words):
                is_number = text.isascii() and text.isdigit() and len(text) < 20
                wanted = put(wanted, key, int(text) if is_number else text)
            require_numbers(wanted, config)
