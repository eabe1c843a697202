"""Parameters and memory of a rank against closed forms, the presets' comments and the tensors of a small model."""

import re
from pathlib import Path
from typing import Any

import pytest

from common.config.load import build_config, load_config
from common.config.resolve import resolve_config
from common.config.schema import RunConfig
from common.parallel.planner import Plan, describe_plan, make_plan
from common.parallel.topology import Topology

FOLDER = Path(__file__).resolve().parents[3] / "configs" / "gpt2"
PRESETS = sorted(path.stem for path in FOLDER.glob("*.yaml"))
# "#   memory = (2 + 4 + 12 / 4) bytes x 12,848,143,360 / (2 x 4) = 14.5 GB a device ..."
FIGURES = {
    path.stem: (int(found[1].replace(",", "")), float(found[2]))
    for path in sorted(FOLDER.glob("*.yaml"))
    if (found := re.search(r"^#   memory +=.* bytes x ([\d,]+).* = ([\d.]+) GB", path.read_text(), re.MULTILINE))
}


def preset(name: str, *overrides: str) -> RunConfig:
    config = load_config(FOLDER / f"{name}.yaml", overrides)
    return resolve_config(config, world_size=Topology.from_config(config.parallel).world_size)


def small(*, tensor: int = 1, pipeline: int = 1, data: int = 1, **sections: Any) -> RunConfig:
    tree: dict[str, Any] = {
        "output_dir": "nowhere",
        "model": {"num_layers": 4, "hidden_size": 16, "num_heads": 4, "seq_length": 32, "vocab_size": 1000},
        "train": {"micro_batch_size": 2, "accumulation_steps": 8},
        "optimizer": {"learning_rate": 0.1},
        "parallel": {"model_parallel": tensor, "pipeline_stage": pipeline},
    }
    for name, values in sections.items():
        tree[name] = {**tree[name], **values} if isinstance(values, dict) and name in tree else values
    return resolve_config(build_config(tree), world_size=data * tensor * pipeline)


def padded(config: RunConfig) -> int:
    rows, step = config.model.vocab_size, 128 * config.parallel.model_parallel
    while rows % step:
        rows += 1
    return rows


def closed_form(config: RunConfig, stage: int) -> int:
    """Per layer 12 h^2 + 7 h are split (matrices; biases of q, k, v, c_fc) and 6 h whole (two norms, biases of both c_proj)."""
    h, tensor, stages = config.model.hidden_size, config.parallel.model_parallel, config.parallel.pipeline_stage
    elements = config.model.num_layers // stages * ((12 * h * h + 7 * h) // tensor + 6 * h)
    table = padded(config) * h // tensor
    if stage == 0:
        elements += table + (config.model.max_positions or 0) * h
    if stage == stages - 1:
        elements += 2 * h + (table if stages > 1 else 0)
    return elements


def counted_twice(config: RunConfig) -> int:
    """Over the ranks of one model: what is whole on every tensor rank, the second copy of the table, and its padding."""
    model, tensor, stages = config.model, config.parallel.model_parallel, config.parallel.pipeline_stage
    h, table = model.hidden_size, padded(config) * model.hidden_size
    whole = (model.max_positions or 0) * h + model.num_layers * 6 * h + 2 * h
    return (tensor - 1) * whole + (table if stages > 1 else 0) + table - model.vocab_size * h


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_of_a_rank(name: str) -> None:
    config = preset(name)
    plan = make_plan(config)
    assert [stage.parameters for stage in plan.stages] == [closed_form(config, stage) for stage in range(len(plan.stages))]
    on_all_ranks = config.parallel.model_parallel * sum(stage.parameters for stage in plan.stages)
    assert on_all_ranks - counted_twice(config) == plan.parameters


@pytest.mark.parametrize("name", FIGURES)
def test_memory_is_that_of_the_presets_comment_but_for_what_is_held_twice(name: str) -> None:
    """The comment divides the model evenly by its ranks; what is held twice weighs, per element, what the comment's elements weigh."""
    parameters, gigabytes = FIGURES[name]
    config = preset(name)
    plan = make_plan(config)
    assert plan.parameters == parameters
    average = sum(stage.memory for stage in plan.stages) / len(plan.stages) / 1e9
    assert average / (1 + counted_twice(config) / parameters) == pytest.approx(gigabytes, abs=0.05)  # one digit after the point


def test_most_presets_have_a_figure() -> None:
    assert len(FIGURES) >= 19


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_split_parameters_are_whole_over_the_tensor_ranks(tensor: int) -> None:
    """The tensors of a real model of this size, cut as Megatron's layers cut them."""
    config = small(tensor=tensor)
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=4, n_embd=16, n_head=4, n_positions=32, vocab_size=padded(config)))
    cut = {"wte.weight": 0, "c_attn.weight": 1, "c_attn.bias": 0, "attn.c_proj.weight": 0, "c_fc.weight": 1, "c_fc.bias": 0}
    cut["mlp.c_proj.weight"] = 0  # Conv1D weights are (in, out)
    elements = 0
    for name, parameter in model.named_parameters():
        dim = next((dim for ending, dim in cut.items() if name.endswith(ending)), None)
        elements += (parameter if dim is None else parameter.chunk(tensor, dim)[0]).numel()
    assert make_plan(config).stages[0].parameters == elements


@pytest.mark.parametrize(
    ("zero", "weights", "gradients", "optimizer"), [(0, 2.0, 4.0, 12.0), (1, 2.0, 4.0, 3.0), (2, 2.0, 1.0, 3.0), (3, 0.5, 1.0, 3.0)]
)
def test_zero_divides_by_data_parallel(zero: int, weights: float, gradients: float, optimizer: float) -> None:
    """ZeRO's table (arXiv 1910.02054, figure 1) with float32 gradients: 2 + 4 + 12 bytes, over 4 ranks."""
    precision = {"parameters": "float16", "compute": "float16"}
    stage = make_plan(small(data=4, precision=precision, parallel={"zero_stage": zero})).stages[0]
    assert stage.parameters % 4 == 0
    found = (stage.weights / stage.parameters, stage.gradients / stage.parameters, stage.optimizer / stage.parameters)
    assert found == (weights, gradients, optimizer)


def test_a_part_of_zero_is_rounded_up() -> None:
    config = small(data=7, parallel={"zero_stage": 1})
    stage = make_plan(config).stages[0]
    assert stage.parameters % 7
    assert 0 < 7 * stage.optimizer - 8 * stage.parameters < 7 * 8


@pytest.mark.parametrize(
    ("optimizer", "bytes_each"),
    [({"name": "sgd"}, 0), ({"name": "sgd", "momentum": 0.9}, 4), ({"name": "adam"}, 8), ({"name": "adamw"}, 8)],
)
def test_state_of_each_optimizer(optimizer: dict[str, Any], bytes_each: int) -> None:
    stage = make_plan(small(optimizer=optimizer)).stages[0]
    assert (stage.weights, stage.gradients) == (4 * stage.parameters, 4 * stage.parameters)
    assert stage.optimizer == bytes_each * stage.parameters
    assert stage.memory == (8 + bytes_each) * stage.parameters


def test_batch_and_tokens() -> None:
    plan = make_plan(small(data=3, pipeline=2))
    assert (plan.batch.global_batch, plan.batch.data_parallel, plan.tokens_per_step) == (2 * 3 * 8, 3, 2 * 3 * 8 * 32)
    assert [list(stage.layers) for stage in plan.stages] == [[0, 1], [2, 3]]


def text(plan: Plan, config: RunConfig, **options: bool) -> list[str]:
    return describe_plan(plan, config, **options).splitlines()


def test_text_of_mindformers_13b() -> None:
    config = preset("run_gpt2_13b")
    lines = text(make_plan(config), config)
    assert "world: 32 ranks = data 4 x tensor 2 x pipeline 4" in lines
    assert "batch: global batch 192 = micro batch 2 x data parallel 4 x accumulation 24 samples; 196,608 tokens a step" in lines
    assert "model: 12,848,143,360 parameters; vocabulary 50257, padded to 50432" in lines
    assert "pipeline: each stage waits 11% of a step for the others" in lines  # 3 of 27
    assert " ".join(lines[-32].split()) == "0 0 0 0 0-1 0 2 4 6 0 8 16 24 0 24"
    assert " ".join(lines[-20].split()) == "12 1 2 0 12-13 8 10 12 14 4 12 20 28 -"
    assert " ".join(lines[-1].split()) == "31 3 3 1 30-31 25 27 29 31 7 15 23 31 7 31"
    assert "context.max_device_memory=31GB leaves 17.92 GB for activations on the fullest rank" in lines  # 31 x 2^30 - 15.37e9
    assert len({len(line) for line in lines[-33:]}) == 1, "columns are aligned"


def test_a_plan_that_does_not_fit_says_so() -> None:
    config = preset("run_gpt2_13b", "context.max_device_memory=10GB")
    (line,) = [line for line in text(make_plan(config), config) if line.startswith("does not fit")]
    assert "context.max_device_memory=10GB is 4.63 GB short; raise model_parallel, pipeline_stage or zero_stage" in line


def test_many_ranks_are_shortened_unless_all_are_asked_for() -> None:
    config = preset("run_gpt2_175b")
    plan = make_plan(config)
    for options, wanted in (({}, [*range(32), *range(96, 128)]), ({"all_ranks": True}, list(range(128)))):
        lines = text(plan, config, **options)
        start = next(number for number, line in enumerate(lines) if line.startswith("rank"))
        assert [int(line.split()[0]) for line in lines[start + 1 :] if line.strip() != "..."] == wanted
    config = preset("run_gpt2_13b", "parallel.data_parallel=8")  # 64: none is left out
    assert not any(line.strip() == "..." for line in text(make_plan(config), config))
