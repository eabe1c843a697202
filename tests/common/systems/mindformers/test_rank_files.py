"""A run's files for MindFormers are loaded strictly and joined by MindSpore itself."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from common.checkpoint.state import TrainState
from common.config.load import build_config
from common.config.resolved import as_run
from common.parallel.run import Run
from common.resolve.derive import resolve_config
from common.systems.mindformers.read import open_mindformers
from common.systems.mindformers.write import epoch_and_step, write_rank_file
from common.systems.own_folder import open_project, write_project
from common.systems.run_state import NO_SCALE, new_run
from common.systems.weights import checked_model
from common.tensor_files.containers import open_tensors
from common.weights.names import parameter_shapes
from tests.common.systems.test_name_map import MINDFORMERS
from tests.common.systems.tiny_weights import as_weights, random_arrays

MODEL = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "seq_length": 8, "vocab_size": 101}
PARTS = {"": "", ".exp_avg": "adam_m.", ".exp_avg_sq": "adam_v."}


def theirs(ours: str) -> tuple[str, bool]:
    """Return MindFormers' name of a parameter, and whether it is transposed there."""
    block = re.match(r"h\.(\d+)\.", ours)
    of_block_1 = re.sub(r"^h\.\d+", "h.1", ours)
    line = next(line for line in MINDFORMERS.splitlines() if line.endswith(f"| {of_block_1}"))
    name = line.split()[0]
    return name.replace("blocks.1.", f"blocks.{block[1]}.") if block else name, " T |" in line


def write_run(folder: Path) -> Path:
    """Write a run's checkpoint after four steps, and return its folder."""
    model = checked_model(folder, MODEL)
    parts = enumerate(("", ".exp_avg", ".exp_avg_sq"))
    arrays, *moments = (
        {f"{name}{part}": array for name, array in random_arrays(model, seed).items()}
        for seed, part in parts
    )
    run = new_run("adamw", step=4, updates=3, scale=NO_SCALE)
    weights = as_weights(model, arrays, moments=moments[0] | moments[1], run=run)
    checkpoint = folder / "checkpoints" / "step_00000004"
    checkpoint.mkdir(parents=True)
    write_project(checkpoint, weights, None)
    (folder / "config.yaml").write_text(f"model: {MODEL}\n")
    return checkpoint


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


def config_of(world_size: int = 1, **parallel: Any) -> Run:
    tree = {
        "output_dir": "run",
        "backend": "mindspore",
        "model": MODEL,
        "train": {"max_steps": 4, "micro_batch_size": 1, "global_batch_size": 8},
        "checkpoint": {"ckpt_prefix": "gpt2"},
        "parallel": parallel,
        "optimizer": {"learning_rate": 0.1},
        "data": {"train": "none"},
    }
    return resolve_config(build_config(tree), world_size=world_size)


def require_whole(found: Any, checkpoint: Path, rows: int) -> None:
    """Every tensor of MindSpore's dict is the checkpoint's bit for bit."""
    with open_project(checkpoint) as weights:
        for name in weights.tensors:
            for ours, prefix in PARTS.items():
                expected = {**weights.tensors, **weights.moments}[name + ours].load()
                key, turned = theirs(name)
                if name == "wte.weight":
                    expected = np.pad(expected, ((0, rows - len(expected)), (0, 0)))
                got = found[prefix + key].asnumpy()
                assert np.array_equal(got, expected.T if turned else expected), name


def test_files_of_a_growing_batch_are_named_by_samples() -> None:
    """Batches of 2, 2, 2, 4, 4, 6, 8: step 5 is the first whose samples pass 13, step 7 that of the
    third epoch, since 20 + 8 passes 26. Without samples, as for unknown data, each step is one.
    """
    config = as_run(Run, config_of(), train={"rampup_batch_size": [2, 2, 16]})
    places = [epoch_and_step(config, 13, TrainState(step=step)) for step in range(1, 8)]
    assert places == [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1)]
    assert epoch_and_step(config, 0, TrainState(step=3)) == (3, 1)


def network_of_mindformers(ms: ModuleType) -> Any:
    """Return a network with the parameters of MindFormers' GPT2LMHeadModel and no computation; a
    Linear's weight is (in, out), as in its layers.py with transpose_b=False.
    """
    nn, hidden = ms.nn, MODEL["hidden_size"]

    def cell(**parts: Any) -> Any:
        made = nn.Cell()
        for name, part in parts.items():
            setattr(made, name, part)
        return made

    def table(rows: int) -> Any:
        return cell(embedding_table=ms.Parameter(ms.numpy.zeros((rows, hidden)), "table"))

    def linear(inputs: int, outputs: int) -> Any:
        weight = ms.Parameter(ms.numpy.zeros((inputs, outputs)), "weight")
        return cell(weight=weight, bias=ms.Parameter(ms.numpy.zeros((outputs,)), "bias"))

    def block() -> Any:
        dense = {f"dense{number}": nn.Dense(hidden, hidden) for number in (1, 2, 3)}
        norms = {f"layernorm{number}": nn.LayerNorm((hidden,)) for number in (1, 2)}
        output = cell(mapping=linear(hidden, 4 * hidden), projection=linear(4 * hidden, hidden))
        attention = cell(projection=linear(hidden, hidden), **dense)
        return cell(attention=attention, output=output, **norms)

    embedding = cell(
        word_embedding=table(MODEL["vocab_size"]), position_embedding=table(MODEL["seq_length"])
    )
    blocks = nn.CellList([block() for _ in range(MODEL["num_layers"])])
    return cell(
        backbone=cell(embedding=embedding, layernorm=nn.LayerNorm((hidden,)), blocks=blocks)
    )


def test_mindformers_loads_one_file_strictly(checkpoint: Path, mindspore: ModuleType) -> None:
    """The network and its optimizer find all that they have, and only the counters are left."""
    ms = mindspore
    write_rank_file(config_of(), (1, 4), 0, False, checkpoint)
    assert not (checkpoint.parent / "ckpt_strategy.ckpt").exists()
    found = ms.load_checkpoint(str(checkpoint.parent / "rank_0" / "gpt2_rank_0-1_4.ckpt"))
    network = network_of_mindformers(ms)
    rates = ms.nn.PolynomialDecayLR(0.1, 0.0, 4, 1.0)  # MindFormers' rates are a schedule
    optimizer = ms.nn.AdamWeightDecay(network.trainable_params(), rates)
    both = ms.nn.CellList([network, optimizer], auto_prefix=False)
    missing, left = ms.load_param_into_net(both, found, strict_load=True)
    assert missing == [] and set(left) == {"step_num", "epoch_num", "loss_scale"}
    assert int(optimizer.global_step.asnumpy()[0]) == 3
    loaded = {p.name: p for p in both.get_parameters()}
    require_whole(loaded, checkpoint, MODEL["vocab_size"])


ALL = {"data_parallel": 2, "model_parallel": 2, "pipeline_stage": 2}
LAYOUTS: dict[str, tuple[dict[str, Any], int, float]] = {
    # and ranks, and the most of the whole that one holds: what does not divide is whole, as the
    # embedding of 101 rows, and what tensor ranks have copies of
    "dp2 tp2 pp2": (ALL, 8, 0.35),
    "zero1 dp2 tp2 pp2": (ALL | {"zero_stage": 1}, 8, 0.25),
    "zero1 dp4": ({"data_parallel": 4, "zero_stage": 1}, 4, 0.4),
}


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_mindspore_joins_the_ranks_files(
    layout: str, checkpoint: Path, mindspore: ModuleType, tmp_path: Path
) -> None:
    """So do we, and the strategy file is the one of the run."""
    ms, (sizes, ranks, most) = mindspore, LAYOUTS[layout]
    config, folder = config_of(ranks, **sizes), checkpoint.parent
    for rank in range(ranks):
        write_rank_file(config, (1, 4), rank, True, checkpoint)
        assert (folder / f"rank_{rank}" / f"gpt2_rank_{rank}-1_4.ckpt").is_file()
    strategy = str(folder / "ckpt_strategy.ckpt")
    ms.transform_checkpoints(str(folder), str(tmp_path / "whole"), "net", strategy, None)
    found = ms.load_checkpoint(str(tmp_path / "whole" / "rank_0" / "net0.ckpt"))
    require_whole(found, checkpoint, 102 if "tp2" in layout else 101)  # of tensor ranks a multiple
    with (
        open_mindformers(folder / "rank_1" / "gpt2_rank_1-1_4.ckpt") as ours,
        open_project(checkpoint) as expected,
    ):
        assert ours.model == expected.model
        assert ours.run is not None and ours.run["engine"]["optimizer_steps"] == 3
        pairs = {**ours.tensors, **ours.moments}, {**expected.tensors, **expected.moments}
        assert pairs[0].keys() == pairs[1].keys()
        for name, weight in pairs[0].items():
            assert np.array_equal(weight.load(), pairs[1][name].load()), name
    with open_tensors(folder / "rank_0" / "gpt2_rank_0-1_4.ckpt") as stored:
        held = sum(math.prod(tensor.shape) for tensor in stored.values())
    total = 3 * sum(math.prod(shape) for shape in parameter_shapes(config.model).values())
    assert held < most * total
