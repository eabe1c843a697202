"""Shipped configs, as golden files of what differs from the defaults, which have one too. A
changed default shows as one line of diff. Sizes, batches, layouts and rates are also compared with
those of the systems they come from, and hyper-parameters with files of these systems.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config.load import build_config, flatten
from common.config.schema import RunConfig
from common.resolve.derive import resolve_config, written_ranks
from common.run_config import load_config
from common.systems.config import open_config
from common.weights.names import count_parameters
from tests.config_overrides import sizes_of
from tools.config_schema import config_schema

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "configs" / "gpt2"
PRESETS = sorted(path.stem for path in FOLDER.glob("*.yaml"))
GOLDEN = Path(__file__).parent / "golden"
NEEDED = {
    "output_dir": "output",
    "model": {"num_layers": 2, "hidden_size": 8, "num_heads": 2, "seq_length": 8, "vocab_size": 9},
    "data": {"tokenizer": {"folder": "data/vocab"}},
    "optimizer": {"learning_rate": 1e-3},
    "train": {"max_steps": 10, "micro_batch_size": 2},
}
"""A run that leaves all that it may to the defaults."""


@dataclass(frozen=True)
class Expected:
    """Numbers of a preset's source. ``layout`` is data x tensor x pipeline parallel.

    A micro batch of auto is 1 until the memory is known.
    """

    parameters: int
    layout: tuple[int, int, int]
    micro: int
    accumulation: int
    global_batch: int
    tokens: int
    learning_rate: tuple[float, float]

    @property
    def devices(self) -> int:
        return self.layout[0] * self.layout[1] * self.layout[2]


EXPECTED = {
    "run_gpt2_tiny": Expected(11_453_760, (1, 1, 1), 8, 1, 8, 1024, (2e-3, 2e-4)),
    "run_gpt2_quickstart": Expected(3_377_280, (1, 1, 1), 16, 1, 16, 2048, (2e-3, 1e-4)),
    "run_gpt2_quickstart_zh": Expected(2_590_848, (1, 1, 1), 16, 1, 16, 2048, (2e-3, 1e-4)),
    "run_gpt2": Expected(124_439_808, (1, 1, 1), 8, 1, 8, 8192, (1e-4, 1e-5)),
    "run_gpt2_117m": Expected(124_439_808, (1, 1, 1), 8, 1, 8, 8192, (1.5e-4, 1e-5)),
    "run_gpt2_124m": Expected(124_439_808, (1, 1, 1), 1, 480, 480, 491_520, (6e-4, 6e-5)),
    "run_gpt2_124m_finetune": Expected(124_439_808, (1, 1, 1), 4, 8, 32, 32_768, (3e-5, 3e-5)),
    "run_gpt2_345m": Expected(354_823_168, (1, 1, 1), 8, 1, 8, 8192, (1.5e-4, 1e-5)),
    "run_gpt2_345m_fleetx": Expected(354_823_168, (1, 1, 1), 8, 1, 8, 8192, (5e-5, 1e-5)),
    "run_gpt2_345m_fleetx_qat": Expected(354_823_168, (1, 8, 1), 1, 8, 8, 8192, (5e-6, 1e-6)),
    "run_gpt2_345m_modelzoo": Expected(354_823_168, (4, 1, 2), 4, 1, 16, 16_384, (1.5e-4, 1.5e-5)),
    "run_gpt2_345m_modelzoo_without_mp": Expected(354_823_168, (8, 1, 1), 8, 1, 64, 65_536, (1.5e-4, 1e-5)),
    "run_gpt2_774m": Expected(774_030_080, (1, 1, 1), 1, 480, 480, 491_520, (2.5e-4, 2.5e-5)),
    "run_gpt2_1558m": Expected(1_557_611_200, (1, 1, 1), 1, 960, 960, 983_040, (2e-4, 2e-5)),
    "run_gpt2_1.3b_modelzoo": Expected(1_313_626_112, (2, 2, 2), 8, 2, 32, 32_768, (2e-4, 2e-5)),
    "run_gpt2_1.3b_fleetx": Expected(1_313_626_112, (8, 1, 1), 8, 1, 64, 65_536, (5e-5, 1e-5)),
    "run_gpt2_2.7b": Expected(2_651_553_280, (2, 2, 2), 8, 2, 32, 65_536, (1.6e-4, 1.6e-5)),
    "run_gpt2_3.7b": Expected(3_785_843_712, (2, 2, 2), 4, 2, 16, 32_768, (1.2e-4, 1.2e-5)),
    "run_gpt2_6.7b": Expected(6_654_210_048, (16, 1, 1), 8, 1, 128, 131_072, (5e-5, 1e-5)),
    "run_gpt2_13b": Expected(12_848_143_360, (4, 2, 4), 2, 24, 192, 196_608, (5e-5, 1e-6)),
    "run_gpt2_13b_dp4_mp8": Expected(12_848_143_360, (4, 8, 1), 2, 1, 8, 8192, (5e-5, 1e-6)),
    "run_gpt2_52b": Expected(51_966_533_632, (8, 1, 16), 2, 64, 1024, 1_048_576, (5e-5, 1e-6)),
    "run_gpt2_175b": Expected(174_591_676_416, (1, 8, 16), 1, 1536, 1536, 1_572_864, (5e-5, 1e-5)),
    "run_gpt2_1536x16": Expected(533_647_872, (2, 4, 1), 8, 1, 16, 32_768, (1.5e-4, 1e-5)),
    "run_gpt2_2304x24": Expected(1_650_057_984, (2, 4, 4), 8, 32, 512, 1_048_576, (1.5e-4, 1e-5)),
    "run_gpt2_chinese_106m": Expected(106_331_904, (4, 1, 1), 4, 1, 16, 8192, (1.5e-4, 0.0)),
    "run_gpt2_chinese_82m": Expected(81_894_144, (1, 1, 1), 8, 1, 8, 8192, (1.5e-4, 0.0)),
}

# layers, hidden size, heads, window, positions, vocabulary
SHAPES = {
    "run_gpt2_tiny": (4, 192, 6, 128, 128, 50257),
    "run_gpt2_quickstart": (4, 192, 6, 128, 128, 8192),
    "run_gpt2_quickstart_zh": (4, 192, 6, 128, 128, 4096),
    "run_gpt2": (12, 768, 12, 1024, 1024, 50257),
    "run_gpt2_345m": (24, 1024, 16, 1024, 1024, 50257),
    "run_gpt2_774m": (36, 1280, 20, 1024, 1024, 50257),
    "run_gpt2_1558m": (48, 1600, 25, 1024, 1024, 50257),
    "run_gpt2_1.3b": (24, 2048, 16, 1024, 1024, 50257),
    "run_gpt2_2.7b": (32, 2560, 32, 2048, 2048, 50257),
    "run_gpt2_3.7b": (32, 3072, 32, 2048, 2048, 50257),
    "run_gpt2_6.7b": (32, 4096, 32, 1024, 1024, 50257),
    "run_gpt2_13b": (40, 5120, 40, 1024, 1024, 50257),
    "run_gpt2_52b": (64, 8192, 32, 1024, 1024, 50257),
    "run_gpt2_175b": (96, 12288, 96, 1024, 1024, 50257),
    "run_gpt2_1536x16": (16, 1536, 16, 2048, 2048, 50257),
    "run_gpt2_2304x24": (24, 2304, 24, 2048, 2048, 50257),
    "run_gpt2_chinese_106m": (12, 768, 12, 512, 1024, 26679),
    "run_gpt2_chinese_82m": (10, 768, 12, 1024, 1024, 13317),
}

# Files of other systems, and the presets that have their hyper-parameters.
ORIGINALS = {
    "mindformers_r0.3/run_gpt2.yaml": ("run_gpt2",),
    "mindformers_r0.3/run_gpt2_13b.yaml": ("run_gpt2_13b", "run_gpt2_13b_dp4_mp8"),
    "mindformers_r0.3/run_gpt2_52b.yaml": ("run_gpt2_52b",),
    "modelzoo/train_345M.sh": (
        "run_gpt2_345m_modelzoo", "run_gpt2_345m_modelzoo_without_mp", "run_gpt2_1.3b_modelzoo",
        "run_gpt2_2.7b", "run_gpt2_3.7b",
    ),
    "oneflow/pretrain_345M.sh": (
        "run_gpt2_117m", "run_gpt2_345m", "run_gpt2_1536x16", "run_gpt2_2304x24",
    ),
    "fleetx/pretrain_gpt_345M_single_card.yaml": ("run_gpt2_345m_fleetx",),
    "fleetx/pretrain_gpt_345M_mp8_qat.yaml": ("run_gpt2_345m_fleetx_qat",),
    "fleetx/pretrain_gpt_1.3B_dp8.yaml": ("run_gpt2_1.3b_fleetx",),
    "fleetx/pretrain_gpt_6.7B_sharding16.yaml": ("run_gpt2_6.7b",),
    "fleetx/pretrain_gpt_175B_mp8_pp16.yaml": ("run_gpt2_175b",),
}  # fmt: skip
# What a preset's source gives otherwise: a second script, or for Chinese models no file at all.
OTHERWISE: dict[str, dict[str, Any]] = {
    "run_gpt2_345m_modelzoo_without_mp": {
        "loss_scale.mode": "static", "loss_scale.initial": 65536.0, "train.recompute": "none",
    },
    "run_gpt2_13b_dp4_mp8": {"train.recompute_slice_activation": False},
    "run_gpt2_345m_fleetx_qat": {
        "model.embedding_dropout": 0.0, "model.attention_dropout": 0.0, "model.hidden_dropout": 0.0,
        "optimizer.decay_steps": 72_000, "optimizer.weight_decay": 0.02,
        "train.max_steps": 100_000, "train.recompute": "none",
    },
}  # fmt: skip
CHINESE = {
    "model.embedding_dropout": 0.1, "model.attention_dropout": 0.1, "model.hidden_dropout": 0.1,
    "optimizer.name": "adamw", "optimizer.schedule": "linear", "optimizer.warmup_steps": 2000,
    "optimizer.epsilon": 1e-6, "optimizer.weight_decay": 0.0, "optimizer.clip_grad": 1.0,
}  # fmt: skip


@cache
def resolved(name: str, *overrides: str) -> RunConfig:
    return resolve_config(
        load_config(FOLDER / f"{name}.yaml", (*sizes_of(name), *overrides)), world_size=EXPECTED[name].devices
    )


def files_of(path: Path) -> Iterator[Path]:
    """The file's bases, theirs first, and the file, in the order in which they are merged."""
    bases = yaml.safe_load(path.read_text()).get("base", [])
    for base in [bases] if isinstance(bases, str) else bases:
        yield from files_of(path.parent / base)
    yield path


def literals(config: RunConfig) -> dict[str, str]:
    return {key: repr(value) for key, value in flatten(config.model_dump())}


@cache
def defaults() -> dict[str, str]:
    return literals(resolve_config(build_config(NEEDED), world_size=1))


def own_of(name: str) -> dict[str, str]:
    """Values that differ from the defaults; "absent" stands for a key that a preset has not."""
    values = literals(resolved(name))
    own = {key: value for key, value in values.items() if defaults().get(key) != value}
    return own | {key: "absent" for key in defaults() if key not in values}


@pytest.mark.parametrize("name", ["defaults", *PRESETS])
def test_golden(name: str) -> None:
    values = defaults() if name == "defaults" else own_of(name)
    text = "".join(f"{key} = {value}\n" for key, value in values.items())
    golden = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text(), "a default or preset changed; if that is wanted: make golden"


def test_every_file_has_its_preset() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == {"defaults", *PRESETS}
    used = {path.resolve() for name in PRESETS for path in files_of(FOLDER / f"{name}.yaml")}
    assert used == {path.resolve() for path in FOLDER.rglob("*.yaml")}


def test_json_schema_is_up_to_date() -> None:
    path = ROOT / "configs" / "schema.json"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(config_schema())
    assert path.read_text() == config_schema(), "make golden"


@pytest.mark.parametrize("name", PRESETS)
def test_shape_and_parameter_count_are_the_published_ones(name: str) -> None:
    model = resolved(name).model
    longest = max((key for key in SHAPES if name.startswith(key)), key=len)
    layers, hidden, _, _, positions, vocabulary = SHAPES[longest]
    found = (model.num_layers, model.hidden_size, model.num_heads, model.seq_length)
    assert (*found, model.max_positions, model.vocab_size) == SHAPES[longest]
    assert model.ffn_hidden_size == 4 * hidden
    blocks = layers * (12 * hidden * hidden + 13 * hidden)
    closed_form = (vocabulary + positions) * hidden + blocks + 2 * hidden
    assert count_parameters(model) == closed_form == EXPECTED[name].parameters


@pytest.mark.parametrize("name", PRESETS)
def test_batch_layout_and_rates_are_those_of_the_source(name: str) -> None:
    expected, config = EXPECTED[name], resolved(name)
    train, parallel, model = config.train, config.parallel, config.model
    data, tensor, _ = expected.layout
    found = (parallel.data_parallel, parallel.model_parallel, parallel.pipeline_stage)
    assert found == expected.layout
    found = (train.micro_batch_size, train.accumulation_steps, train.global_batch_size)
    assert found == (expected.micro, expected.accumulation, expected.global_batch)
    assert expected.micro * data * expected.accumulation == expected.global_batch
    assert expected.global_batch * model.seq_length == expected.tokens
    if model.vocab_size == 50257:
        assert config.vocab_rows == {1: 50304, 2: 50432, 4: 50688, 8: 51200}[tensor]
    rates = (config.optimizer.learning_rate, config.optimizer.min_learning_rate)
    assert rates == expected.learning_rate


@pytest.mark.parametrize(("file", "name"), [(file, name) for file, names in ORIGINALS.items() for name in names])
def test_hyper_parameters_are_those_of_the_systems_own_file(file: str, name: str, monkeypatch) -> None:
    folder = ROOT / "tests/common/systems/originals"
    monkeypatch.chdir(folder / "modelzoo")  # beside its ds_config.json
    words = ["engine=native"] if "modelzoo" in file else []
    own = open_config(folder / file, words).config
    theirs = dict(flatten(resolve_config(own, world_size=written_ranks(own)).model_dump()))
    ours = dict(flatten(resolved(name).model_dump()))
    keys = re.compile(
        r"seed|logging\.style|(precision|loss_scale|quantization)\..*|model\.\w+_dropout"
        r"|optimizer\.(?!.*learning_rate).*|train\.(max_|recompute).*|parallel\.zero_stage"
    )
    compared = [key for key in theirs | ours if keys.fullmatch(key)]
    assert len(compared) > 40
    wanted = {key: theirs.get(key) for key in compared} | OTHERWISE.get(name, {})
    assert {key: ours.get(key) for key in compared} == wanted


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("106m", {"precision.parameters": "float16", "train.max_epochs": 800.0}),
        ("82m", {"precision.parameters": "float32", "train.max_epochs": 5.0, "data.stride": 768}),
    ],
)
def test_hyper_parameters_of_the_chinese_models(name: str, own: dict[str, Any]) -> None:
    found = dict(flatten(resolved(f"run_gpt2_chinese_{name}").model_dump()))
    wanted = CHINESE | own
    assert {key: found[key] for key in wanted} == wanted


@pytest.mark.parametrize("name", PRESETS)
def test_presets_work_on_either_backend_unless_their_source_is_mindspore(name: str) -> None:
    assert resolved(name, "backend=mindspore").backend == "mindspore"
    if load_config(FOLDER / f"{name}.yaml", sizes_of(name)).backend == "torch":
        assert resolved(name, "backend=torch").backend == "torch"


def test_editors_find_the_schema() -> None:
    for path in FOLDER.rglob("*.yaml"):
        first = path.read_text().partition("\n")[0]
        relative = first.removeprefix("# yaml-language-server: $schema=")
        assert (path.parent / relative).resolve() == ROOT / "configs" / "schema.json"


@pytest.mark.parametrize("name", PRESETS)
def test_the_arithmetic_in_the_comments_is_right(name: str) -> None:
    """``#   label = expression = result`` in a preset and its bases; the preset's own lines win, as its keys do."""
    pattern = re.compile(r"^#   ([a-z ]*?) *= (.+?) = ([\d.,]*\d)", re.MULTILINE)
    lines: dict[str, tuple[str, float]] = {}
    for path in files_of(FOLDER / f"{name}.yaml"):
        for label, expression, result in pattern.findall(path.read_text()):
            lines[label] = (expression, float(result.replace(",", "")))
    for label, (expression, result) in lines.items():
        formula = re.sub(r"[A-Za-z]{2,}", " ", expression).replace(",", "")
        formula = formula.replace(" x ", " * ").replace("^", "**")
        value = eval(formula, {"__builtins__": {}})
        value = round(value / 1e9, 1) if label == "memory" else value
        assert result == value, f"{label} = {expression} = {result}"
    config, expected = resolved(name), EXPECTED[name]
    assert lines["parameters"][1] == expected.parameters
    assert lines["one step"][1] == expected.tokens
    assert lines.get("devices", ("", 1))[1] == expected.devices
    assert lines.get("batch", ("", expected.global_batch))[1] == config.train.global_batch_size
