"""Files and flags of the original systems, whole and key by key: held against the presets that follow
them, and what each becomes in numbers and in messages.
"""

import copy
import fnmatch
import functools
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from common.config.hints import schema_keys
from common.config.load import apply_overrides, build_config, dump_config, flatten
from common.config.schema import QuantizationConfig
from common.dialects.megatron import DEEPSPEED_DEFAULTS
from common.dialects.rules import MapTo, has_rule
from common.errors import ConfigError
from common.parallel.operator_plan import splits_vocabulary
from common.resolve.derive import resolve_config, written_ranks
from common.resolve.engine_checks import check_here
from common.run_config import load_config
from common.systems import config as systems, gpt2_chinese
from common.systems.config import COMMAND_LINES, Opened, open_config, open_flags
from common.systems.dialect import Dialect, read_foreign
from common.systems.flags import read_command, read_flags
from common.systems.fleetx import config as fleetx
from common.systems.megatron import flags as megatron
from common.systems.mindformers import config as mindformers
from common.systems.oneflow import flags as oneflow
from common.weights.names import count_parameters
from tests.common.resolve.test_parallel_mode import TUTORIAL
from tools import convert_config

ORIGINALS = Path(__file__).parent / "originals"
SINGLE_CARD = ORIGINALS / "fleetx" / "pretrain_gpt_345M_single_card.yaml"
PRESETS = Path(__file__).parents[3] / "configs" / "gpt2"
NEUTRAL = Path(__file__).with_name("neutral.yaml")
OURS = {"data.train", "data.tokenizer", "output_dir", "logging", "validation", "checkpoint", "device", "predict"}
"""Choices of the presets: places of the data and the run folder, and how often a run saves and logs."""


def differences(config: Any, preset: str, world_size: int) -> dict[str, tuple[Any, Any]]:
    """The resolved keys in which a configuration differs from a preset, with both values."""
    found, expected = (
        dict(flatten(resolve_config(each, world_size=world_size).model_dump()))
        for each in (config, load_config(PRESETS / f"{preset}.yaml"))
    )
    return {
        key: (found.get(key), expected.get(key))
        for key in sorted(found.keys() | expected.keys())
        if found.get(key) != expected.get(key) and not any(key == name or key.startswith(f"{name}.") for name in OURS)
    }


RUNS = yaml.safe_load((ORIGINALS / "presets.yaml").read_text())


@pytest.mark.parametrize("name", RUNS)
def test_the_originals_runs_are_the_presets(name: str) -> None:
    (system, preset, devices, words), expected = RUNS[name]
    opened = open_config(ORIGINALS / name, words)
    assert opened.system == system
    assert differences(opened.config, preset, devices) == {key: tuple(both) for key, both in expected.items()}
    if system == "PaddleFleetX" and devices > 8:  # it takes dp_degree from its launcher
        assert written_ranks(opened.config) == devices


@pytest.mark.parametrize(
    ("words", "graph", "layout"),
    [
        (["device=npu"], 0, (1, 1, 1)), (["device=npu"], 0, (2, 2, 2)),
        (["device=cpu"], 0, (8, 1, 1)), (["device=cpu"], 1, (2, 2, 2)),
        (["device=auto"], 0, (1, 8, 1)), (["backend=torch", "device=cpu"], 0, (2, 2, 2)),
        (["backend=torch", "device=npu"], 1, (1, 8, 1)),
    ],
)  # fmt: skip
def test_keys_that_change_no_result_pass_everywhere(words, graph, layout, tmp_path) -> None:
    """On every backend and device, in both modes of the context, on one device and several."""
    text = (ORIGINALS / "mindformers_r1.yaml").read_text()
    tree = yaml.safe_load(text) | yaml.safe_load(NEUTRAL.read_text())
    tree["context"]["mode"] = graph
    tree["parallel"]["parallel_mode"] = 3 if graph else 1
    names = ("data_parallel", "model_parallel", "pipeline_stage")
    tree["parallel_config"] |= dict(zip(names, layout, strict=True))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    words = [*words, "model.num_heads=8"]
    opened = open_config(tmp_path / "run.yaml", words)
    found = resolve_config(opened.config, world_size=math.prod(layout))
    assert tuple(getattr(found.parallel, name) for name in names) == layout
    assert found.parallel.zero_stage == (layout[0] > 1)
    assert found.train.recompute == ("none" if graph and "backend=torch" not in words else "full")
    if found.device == "auto":
        assert check_here(found, tmp_path) == "cpu"


@pytest.mark.parametrize("words", [["backend=torch"], ["device=cpu"], ["device=auto"], []])
def test_the_tutorials_sections_below_our_bases_run_everywhere(words, tmp_path) -> None:
    """Keys without effect are named by --show_config and in a line of the log; the rest is kept."""
    path = tmp_path / "tutorial.yaml"
    path.write_text(TUTORIAL.format(folder=PRESETS))
    opened = open_config(path, words)
    found = resolve_config(opened.config, world_size=32)
    shipped = resolve_config(load_config(PRESETS / "run_gpt2_13b.yaml"), world_size=32)
    parts = {"data_parallel", "model_parallel", "pipeline_stage", "zero_stage"}
    assert found.parallel.model_dump(include=parts) == shipped.parallel.model_dump(include=parts)
    assert found.train.global_batch_size == 192 and found.train.recompute == "full"
    # with a pipeline vocab_emb_dp is false in r0.3, whatever the file says
    assert splits_vocabulary(found)
    if words:
        assert "parallel.full_batch" in opened.yaml
        assert "have no effect here" in (opened.remark or "")
    else:  # on Ascends all of it acts
        assert (opened.yaml, opened.remark, found.device) == ("", None, "npu")
        said = {"parallel_mode": "semi_auto_parallel", "full_batch": True, "vocab_emb_dp": True}
        assert found.parallel == shipped.parallel.model_copy(update=said)
        assert found.train == shipped.train
    (tmp_path / "again.yaml").write_text(opened.yaml or dump_config(opened.config))
    assert load_config(tmp_path / "again.yaml") == opened.config


def test_convert_config_takes_flags_and_refuses_another_system(tmp_path, capsys) -> None:
    """That what it writes is the same run, the figures below say of each file."""
    name, own = str(ORIGINALS / "mindformers_r1.yaml"), str(tmp_path / "ours.yaml")
    assert convert_config.main([name, "--output", own]) == 0
    assert open_config(own).system is None
    flags = "--tensor-model-parallel-size 2 --distributed-backend nccl"
    base = SMALLEST.format(rate="--lr")
    assert convert_config.main(["--from", "megatron", "--", *f"{base} {flags}".split()]) == 0
    text = capsys.readouterr().out
    assert "model_parallel: 2  # tensor_model_parallel_size" in text
    assert "#   distributed_backend: the device says how ranks talk" in text
    for words, message in (
        (["--from", "fleetx", name], "not in those of --from fleetx"),
        ([own], "is in the words of this project already"),
        (["--from", "megatron"], "give a file of flags, or the flags behind --"),
    ):
        assert convert_config.main(words) == 2
        assert message in capsys.readouterr().err


def test_a_file_of_fleetx_that_is_not_there_names_the_way_that_works() -> None:
    name = "ppfleetx/configs/nlp/gpt/pretrain_gpt_1.3B_dp8.yaml"
    with pytest.raises(ConfigError) as caught:
        open_config(name)
    said = str(caught.value)
    assert "work in your checkout with PYTHONPATH=" in said
    folder = re.findall(r"PYTHONPATH=(\S+),", said)[0]
    assert (Path(folder) / "paddle" / "distributed" / "launch.py").is_file()
    assert load_config(re.findall(r"the preset of this run is (\S+)", said)[0])


MERGED = """x-sizes: &sizes {hidden_size: 64, num_layers: 2, num_heads: 4}
common: {name: &name x-more, window: &window 32}
model: {model_config: {<<: *sizes, num_layers: 3, seq_length: *window}}
runner_config: {epochs: 1, batch_size: 1}
lr_schedule: {type: constant, learning_rate: 1.0e-4}
"""


def test_merge_keys_and_sections_with_only_anchors(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(MERGED)
    model = open_config(path).config.model
    assert (model.hidden_size, model.seq_length, model.num_layers, model.num_heads) == (64, 32, 3, 4)
    for text, message in (
        (MERGED.replace("{hidden_size", "{hiden_size: 1, hidden_size"), ":1: .*hiden_size: unknown key; did you mean"),
        (f"{MERGED}x-more: *window\n", ":[267]?: x-more: unknown key"),
        (f"{MERGED}*name : 3\n", ":[267]?: x-more: unknown key"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=rf"own\.yaml{message}"):
            open_config(path)
    *lines, last = MERGED.splitlines()
    path.write_text("\n".join((f"x-more: &more {{{last}}}", "<<: *more", *lines)))
    assert open_config(path).config.optimizer.learning_rate == 1e-4
    path.write_text(MERGED.replace(", batch_size: 1", "") + "train_dataset: {batch_size: 3}\n")
    opened = open_config(path)
    assert (opened.config.train.micro_batch_size, opened.ours.without_effect) == (3, {})


def test_a_key_without_a_value_is_absent(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    without = f"{MERGED}parallel_config: {{micro_batch_num: , data_parallel: }}\nrecompute_config: {{recompute: }}\n"
    found = []
    for text in (MERGED, without):
        path.write_text(text)
        ours = open_config(path).ours
        found.append((ours.tree, ours.origins, ours.without_effect))
    assert found[0] == found[1]


def test_quantization_of_release_24(tmp_path: Path) -> None:
    """Compress, layers that stay in float, and pretrained as the prefix of a file."""
    (tmp_path / "model.pdparams").touch()
    text = f"""_base_: {SINGLE_CARD}
Compress:
  pretrained: {tmp_path}/model
  Quantization: {{enable: True, activation_preprocess_type: PACT, weight_bits: 4, freeze_embedding: True,
    skip_tensor_map: {{block_0: [linear2], block_11: [linear1, linear2]}}, quantizable_layer_type: [Linear]}}
"""
    (tmp_path / "run.yaml").write_text(text)
    opened = open_config(tmp_path / "run.yaml")
    found = opened.config
    assert found.checkpoint.init_from == f"{tmp_path}/model.pdparams"
    skip = ["h.0.mlp.c_proj", "h.11.mlp.c_fc", "h.11.mlp.c_proj"]
    assert found.quantization == QuantizationConfig(weight_bits=4, freeze_embedding=True, skip=skip)
    assert "Compress.Quantization.activation_preprocess_type" in opened.ours.without_effect
    disabled = open_config(tmp_path / "run.yaml", ["Compress.Quantization.enable=False"])
    assert disabled.config.quantization is None
    (tmp_path / "23.yaml").write_text(f"_base_: {SINGLE_CARD}\nQuantization: {{enable: False, pretrained: a}}\n")
    assert open_config(tmp_path / "23.yaml").config.checkpoint.init_from is None


def test_a_section_that_inherits_nothing_and_one_that_an_override_fills(tmp_path: Path) -> None:
    """Its base clips gradients; Paddle's optimizer without grad_clip does not."""
    text = f"_base_: {SINGLE_CARD}\nOffline_Eval:\nOptimizer:\n"
    for inherited, norm in ((True, 1.0), (False, 0.0)):
        own = f"  _inherited_: {inherited}\n  lr: {{max_lr: 1.0e-3}}\n"
        (tmp_path / "run.yaml").write_text(text + own)
        found = open_config(tmp_path / "run.yaml", ["Offline_Eval.batch_size=3"]).config
        assert (found.optimizer.learning_rate, found.optimizer.clip_grad) == (1e-3, norm)
        assert found.evaluation.batch_size == 3


FIGURES = yaml.safe_load((ORIGINALS / "figures.yaml").read_text())

SMALLEST = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1"
    " {rate} 1e-4 --train-iters 5"
)
RATES = {"megatron": "--lr", "oneflow": "--learning-rate"}


@pytest.fixture(autouse=True)
def _beside_the_ds_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ORIGINALS / "modelzoo")


@pytest.mark.parametrize("name", FIGURES)
def test_figures_and_the_file_of_ours_that_convert_config_writes(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    """The file is the same run, with a remark for each key."""
    monkeypatch.setattr("common.config.load.ROOT", tmp_path)  # where a clone may have data/
    words, parameters, layout, batch, rate = FIGURES[name]
    source, own, words = ORIGINALS / name, tmp_path / "ours.yaml", [*words, "seed=7"]
    config, ranks = open_config(source, words).config, math.prod(layout)
    found = resolve_config(config, world_size=ranks)
    parallel, train = found.parallel, found.train
    assert count_parameters(found.model) == parameters
    assert [parallel.data_parallel, parallel.model_parallel, parallel.pipeline_stage] == layout
    sizes = [train.micro_batch_size, train.accumulation_steps, train.global_batch_size]
    assert sizes == batch and found.optimizer.learning_rate == rate
    system = re.split("[/_]", name)[0].replace("modelzoo", "megatron")
    command = ["--from", system, str(source), *words, "--output", str(own)]
    assert convert_config.main(command) == 0
    assert resolve_config(load_config(own), world_size=ranks) == found
    lines = own.read_text().splitlines()
    assert any("seed: 7  # command line" in line for line in lines)
    bare = [line for line in lines if "  # " not in line and line[-1:] not in ("", ":")]
    assert [line for line in bare if line.lstrip()[0] not in "#-"] == []


def test_the_modelzoos_ds_config_says_what_its_flags_do_not() -> None:
    """The scale begins at 2 to the 12th, and grows after 500 steps. Behind the file, keys are its own or ours."""
    config = open_config(ORIGINALS / "modelzoo" / "train_345M.sh").config
    scale = config.loss_scale
    assert (config.engine, config.deepspeed.config_file) == ("deepspeed", "./ds_config.json")
    other = open_config(ORIGINALS / "modelzoo" / "train_345M.sh", ["train_iters=7", "train.exit_interval=5"]).config
    assert (other.train.max_steps, other.train.exit_interval) == (7, 5)
    assert (scale.mode, scale.initial, scale.window) == ("dynamic", 4096.0, 500)
    assert (scale.hysteresis, scale.minimum, config.parallel.zero_stage) == (2, 1.0, 0)


def ds_run(tree: dict[str, Any], folder: Path, flags: str = "") -> Opened:
    (folder / "ds.json").write_text(json.dumps(tree))
    words = f"{SMALLEST.format(rate='--lr')} --fp16 --deepspeed {flags}".split()
    return open_flags("megatron", [*words, "--deepspeed_config", str(folder / "ds.json")])


def test_a_ds_config_without_a_key_is_that_with_deepspeeds_default(tmp_path) -> None:
    bare = {"fp16": {"enabled": True}, "zero_optimization": {}}
    without = ds_run(bare, tmp_path).config
    assert (without.loss_scale.initial, without.optimizer.clip_grad) == (65536.0, 1.0)
    for key, value in DEEPSPEED_DEFAULTS.items():
        tree, (*sections, name) = copy.deepcopy(bare), key.split(".")
        (tree[sections[0]] if sections else tree)[name] = value
        assert ds_run(tree, tmp_path).config == without, key


def test_flags_that_deepspeed_does_not_read_are_listed(tmp_path) -> None:
    """Its engine has a file of its own, and Megatron gives it none of these."""
    flags = "--clip-grad 0.5 --initial-loss-scale 1024 --hysteresis 7 --zero-stage 1"
    opened = ds_run({"fp16": {"enabled": True}}, tmp_path, flags)
    assert opened.config == ds_run({"fp16": {"enabled": True}}, tmp_path).config
    assert {"clip_grad", "initial_loss_scale", "hysteresis", "zero_stage"} <= {*opened.ours.without_effect}
    assert "DeepSpeed reads gradient_clipping of" in opened.ours.without_effect["clip_grad"]


@pytest.mark.parametrize(
    ("folder", "system", "count"),
    [("modelzoo", "megatron", 185), ("megatron", "megatron", 485), ("oneflow", "oneflow", 56)],
)
def test_each_flag_is_read_or_refused_with_the_reason(folder, system, count) -> None:
    """Alone and with a value: some lack one, and some take none."""
    lines = (ORIGINALS / folder / "flag_names.txt").read_text().splitlines()
    names = [name for line in lines if not line.startswith("#") for name in line.split()]
    assert len(names) == count
    base = SMALLEST.format(rate=RATES[system]).split()
    dialect = COMMAND_LINES[system]
    for name in names:
        key, outcomes = name.replace("-", "_"), []
        for value in ([], ["2"]):
            try:
                opened = open_flags(system, [*base, f"--{name}", *value])
            except ConfigError as error:
                message = str(error)
                assert key in message.replace("-", "_"), (name, message)
                assert "unknown key" not in message, message
                outcomes.append(message)
                continue
            known = {*opened.ours.origins.values(), *opened.ours.without_effect}
            assert key in known or key in dialect.table, f"{name} leaves no trace"
        assert len(outcomes) < 2 or outcomes[0] != outcomes[1] or "leave" in outcomes[0], outcomes


def trees() -> Iterator[tuple[str, Dialect, dict[str, Any], dict[Any, str]]]:
    for name in FIGURES:
        path = ORIGINALS / name
        if path.suffix == ".sh":
            words = read_command(path)[2]
            dialect = COMMAND_LINES[systems.find_command_line(words)]
            yield name, dialect, *read_flags(words, str(path), dialect.table)[:2]
        else:
            found = systems.ConfigFile.read(path).dialect
            assert found is not None
            tree, sources = read_foreign(path, found.base)
            yield name, found, tree, sources


def test_a_wrong_value_anywhere_is_a_message() -> None:
    """Every key and section of every original in turn."""
    for name, dialect, tree, sources in trees():
        keys = [key for key, _ in flatten(tree)]
        sections = {key.rpartition(".")[0] for key in keys if "." in key}
        for number, key in enumerate([*keys, *sorted(sections)]):
            broken = copy.deepcopy(tree)
            *path, last = key.split(".")
            functools.reduce(dict.__getitem__, path, broken)[last] = ("x", [1])[number % 2]
            try:
                ours = dialect.translate(broken, sources)
                dialect.settle(ours)
                build_config(ours.tree, ours.sources)
            except ConfigError as error:
                assert str(error), (name, key)


DIALECTS = {
    "fleetx": fleetx.DIALECT, "megatron": megatron.DIALECT, "mindformers": mindformers.DIALECT,
    "oneflow": oneflow.DIALECT, "gpt2_chinese": gpt2_chinese.FILES, "gpt2_chinese_train": gpt2_chinese.TRAINING,
    "gpt2_chinese_generate": gpt2_chinese.GENERATION, "gpt2_chinese_eval": gpt2_chinese.EVALUATION,
}  # fmt: skip


class Rows(NamedTuple):
    """What a system does with a key that a file leaves out, and with values that mean off, all, never or unlimited.

    In ``rows``: the keys of its smallest run, the keys with which a key acts, the reasons for keys without a default in
    its dialect, and values that are no plain quantities. Of such a value a row says the key, the value, what it means
    there with the source, keys of ours or a part of the message of a refusal, and further keys. A key of ours whose 0
    is not a quantity says so in its description. Each key of theirs that becomes such a key has a row for 0.
    """

    dialect: Dialect
    minimal: dict[str, Any]
    beside: dict[str, dict[str, Any]]
    without_default: set[str]
    sentinels: list[list[Any]]


def rows_of(system: str, tree: dict[str, Any]) -> Rows:
    table = DIALECTS[system].table

    def keys(patterns: list[str]) -> list[str]:
        return [key for each in patterns for key in fnmatch.filter(table, each) or [each]]

    beside = {key: more for more, *each in tree.get("beside", ()) for key in keys(each)}
    reasons = {key for each in tree["without_default"].values() for key in keys(each)}
    return Rows(DIALECTS[system], tree["minimal"], beside, reasons, tree.get("sentinels", []))


ROWS = {
    system: rows_of(system, tree)
    for file in sorted(Path(__file__).with_name("rows").glob("*.yaml"))
    for system, tree in yaml.safe_load(file.read_text(encoding="utf-8")).items()
}
SYSTEMS = pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
CASES = [(rows, *row) for rows in ROWS.values() for row in rows.sentinels]


def values_of(dialect: Dialect, leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return our keys for a file with these dotted keys, or for these flags."""
    tree: dict[str, Any] = {}
    for key, value in leaves.items():
        *sections, name = key.split(".")
        at = tree
        for section in sections:
            at = at.setdefault(section, {})
        at[name] = value
    ours = dialect.translate(tree, {})
    apply_overrides(ours.tree, ours.sources, [])
    dialect.settle(ours)
    return dict(flatten(build_config(ours.tree, ours.sources).model_dump()))


def mapped_keys(dialect: Dialect) -> dict[str, str]:
    """Return the keys that become one of ours by the table, with the key of ours."""
    return {key: rule.key for key, rule in dialect.table.items() if isinstance(rule, MapTo) and not key.endswith("*")}


@SYSTEMS
def test_each_key_that_becomes_ours_has_a_default_or_a_reason(rows: Rows) -> None:
    """Each key of both tables is known of the system, and has one of the two."""
    dialect = rows.dialect
    keys, defaults = mapped_keys(dialect), dialect.defaults
    assert keys.keys() - defaults.keys() - rows.without_default == set()
    assert defaults.keys() & rows.without_default == set()
    assert all(has_rule(key, dialect.table) for key in (*defaults, *rows.without_default))


@SYSTEMS
def test_a_file_without_a_key_is_the_run_of_a_file_with_its_default(rows: Rows) -> None:
    for key, value in rows.dialect.defaults.items():
        leaves = {**rows.minimal, **rows.beside.get(key, {})}
        leaves.pop(key, None)
        given = values_of(rows.dialect, {**leaves, key: value})
        assert values_of(rows.dialect, leaves) == given, key


@SYSTEMS
def test_each_key_of_theirs_onto_such_a_key_has_a_row_for_zero(rows: Rows) -> None:
    zero = re.compile(r"\b0 (is|are|uses|keeps|validates|saves|reads)\b")
    special = {key for key, field in schema_keys().items() if zero.search(field.description or "")}
    assert {"checkpoint.interval", "predict.top_k"} <= special
    theirs = {key for key, ours in mapped_keys(rows.dialect).items() if ours in special}
    assert theirs - {key for key, value, *_ in rows.sentinels if value == 0} == set()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[1]}={case[2]}")
def test_a_value_means_the_same_here(case: tuple[Any, ...]) -> None:
    rows, key, value, _, expected, *more = case
    leaves = {**rows.minimal, **(more[0] if more else {}), key: value}
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=re.escape(expected)):
            values_of(rows.dialect, leaves)
        return
    found = values_of(rows.dialect, leaves)
    assert {name: found[name] for name in expected} == expected
