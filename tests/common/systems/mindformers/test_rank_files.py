"""A run's files for MindFormers are loaded strictly and joined by MindSpore itself, and slices of each
kind that it cuts are whole again. The model of a `.ckpt` comes from the YAML beside it.
"""

import json
import math
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from common.checkpoint.snapshot import TrainState
from common.config.load import build_config
from common.config.resolved import as_run
from common.errors import CheckpointError, ConfigError
from common.parallel.run import Run
from common.resolve.derive import resolve_config
from common.systems.mindformers.read import NAME_MAPS, open_mindformers
from common.systems.mindformers.slices import Slices, find_slices
from common.systems.mindformers.write import epoch_and_step, write_mindformers, write_rank_file
from common.systems.own_folder import open_project, write_project
from common.systems.run_state import MODEL_YAML, NO_SCALE, new_run
from common.systems.weights import checked_model
from common.tensor_files.containers import open_tensors
from common.tensor_files.mindspore_strategy import Layout, read_strategy, write_strategy
from common.weights.names import parameter_shapes
from common.yaml_files import dump_yaml
from tests.common.systems.tiny_weights import as_weights, random_arrays, refused

MODEL = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "seq_length": 8, "vocab_size": 101}
MOMENTS = {"": "", ".exp_avg": "adam_m.", ".exp_avg_sq": "adam_v."}
SPLIT = {"data_parallel": 2, "model_parallel": 2, "pipeline_stage": 2, "zero_stage": 1}


NAMES = Path(__file__).with_name("names.txt").read_text().splitlines()
"""Lines of MindFormers r0.6 to r1.5: name and shape of a parameter, T if it is transposed, and our name."""


def theirs(ours: str) -> tuple[str, bool]:
    """Return MindFormers' name of a parameter, and whether it is transposed there."""
    block = re.match(r"h\.(\d+)\.", ours)
    of_block_1 = re.sub(r"^h\.\d+", "h.1", ours)
    line = next(line for line in NAMES if line.endswith(f"| {of_block_1}"))
    name = line.split()[0]
    return name.replace("blocks.1.", f"blocks.{block[1]}.") if block else name, " T |" in line


def write_run(folder: Path) -> Path:
    """Write a run's checkpoint after four steps, and return its folder."""
    model = checked_model(folder, MODEL)
    parts = enumerate(("", ".exp_avg", ".exp_avg_sq"))
    arrays, *moments = (
        {f"{name}{part}": array for name, array in random_arrays(model, seed).items()} for seed, part in parts
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
    weights = open_project(checkpoint)
    for name in weights.tensors:
        for ours, prefix in MOMENTS.items():
            expected = {**weights.tensors, **weights.moments}[name + ours].load()
            key, turned = theirs(name)
            if name == "wte.weight":
                expected = np.pad(expected, ((0, rows - len(expected)), (0, 0)))
            got = found[prefix + key].asnumpy()
            assert np.array_equal(got, expected.T if turned else expected), name


def require_same(path: Path, checkpoint: Path) -> None:
    """What is read of MindFormers' files is the checkpoint, bit for bit."""
    ours, expected = open_mindformers(path), open_project(checkpoint)
    assert ours.model == expected.model
    assert ours.run is not None and ours.run["engine"]["optimizer_steps"] == 3
    found, wanted = ({**each.tensors, **each.moments} for each in (ours, expected))
    assert found.keys() == wanted.keys()
    for name, weight in found.items():
        assert np.array_equal(weight.load(), wanted[name].load()), name


def test_files_of_a_growing_batch_are_named_by_samples() -> None:
    """Batches of 2, 2, 2, 4, 4, 6, 8: step 5 is the first whose samples pass 13, step 7 that of the
    third epoch, since 20 + 8 passes 26. Without samples, as for unknown data, each step is one.
    """
    config = as_run(Run, config_of(), train={"rampup_batch_size": [2, 2, 16]})
    places = [epoch_and_step(config, 13, TrainState(step=step)) for step in range(1, 8)]
    assert places == [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1)]
    assert epoch_and_step(config, 0, TrainState(step=3)) == (3, 1)
    config = as_run(Run, config_of(), train={"num_samples": 4, "global_batch_size": 2})  # --num_samples is an epoch
    assert epoch_and_step(config, 13, TrainState(step=4)) == (2, 2)


@pytest.mark.parametrize("release", ["mindformers", "mindformers_r0.3"])
def test_mindformers_has_these_names(release: str) -> None:
    """r0.3 put two names under another prefix, and not the embeddings."""
    parameters, (name_map,) = random_arrays(config_of().model), NAME_MAPS[release]
    found = {
        row.theirs: row.pack([parameters[name] for name in row.ours], MODEL["num_heads"])
        for row in name_map.rows(MODEL["num_layers"])
    }
    assert len(found) == 16 * 2 + 4
    for line in NAMES:
        (name, shape, *transposed), (ours,) = (part.split() for part in line.split(" | "))
        if release == "mindformers_r0.3":
            name = name.replace("backbone.blocks", "gpt2.backbone.transformer.encoder.blocks")
            name = name.replace("backbone.layernorm.", "gpt2.backbone.layernorm.")
        assert found[name].shape == tuple(map(int, shape.split("x")))
        expected = parameters[ours].T if transposed else parameters[ours]
        np.testing.assert_array_equal(found[name], expected)


def network_of_mindformers(ms: ModuleType) -> Any:
    """Return a network with the parameters of MindFormers' GPT2LMHeadModel and no computation."""
    network = ms.nn.Cell(auto_prefix=False)
    for ours, shape in parameter_shapes(config_of().model).items():
        name, turned = theirs(ours)
        zeros = ms.numpy.zeros(shape[::-1] if turned else shape)
        network.insert_param_to_cell(name.replace(".", "_"), ms.Parameter(zeros, name=name))
    return network


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


@pytest.mark.parametrize(
    ("ranks", "sizes", "most"),
    [(8, SPLIT, 0.25), (4, {"data_parallel": 4, "zero_stage": 1}, 0.4)],
)
def test_mindspore_joins_the_ranks_files(
    ranks: int, sizes: dict[str, int], most: float, checkpoint: Path, mindspore: ModuleType, tmp_path: Path
) -> None:
    """So do we, and the strategy file is the one of the run. most: of the whole that one rank holds. What does not
    divide is whole, as the embedding of 101 rows, and what tensor ranks have copies of.
    """
    ms, config, folder = mindspore, config_of(ranks, **sizes), checkpoint.parent
    for rank in range(ranks):
        write_rank_file(config, (1, 4), rank, True, checkpoint)
        assert (folder / f"rank_{rank}" / f"gpt2_rank_{rank}-1_4.ckpt").is_file()
    strategy = str(folder / "ckpt_strategy.ckpt")
    ms.transform_checkpoints(str(folder), str(tmp_path / "whole"), "net", strategy, None)
    found = ms.load_checkpoint(str(tmp_path / "whole" / "rank_0" / "net0.ckpt"))
    require_whole(found, checkpoint, 102 if ranks == 8 else 101)  # of tensor ranks a multiple
    require_same(folder / "rank_1" / "gpt2_rank_1-1_4.ckpt", checkpoint)
    stored = open_tensors(folder / "rank_0" / "gpt2_rank_0-1_4.ckpt")
    held = sum(math.prod(tensor.shape) for tensor in stored.values())
    total = 3 * sum(math.prod(shape) for shape in parameter_shapes(config.model).values())
    assert held < most * total


# ---- the YAML that says a .ckpt's sizes ----

SIZES = {
    "num_layers": 2, "hidden_size": 32, "num_heads": 4, "seq_length": 8, "max_positions": 16,
    "ffn_hidden_size": 64, "vocab_size": 101, "layer_norm_epsilon": 0.001,
}  # fmt: skip
R1 = """model:
  arch: {type: GPT2LMHeadModel}
  model_config: {type: GPT2Config, seq_length: 8, max_position_embeddings: 16, vocab_size: 101,
    hidden_size: 32, num_layers: 2, num_heads: 4, expand_ratio: 2, layernorm_epsilon: 0.001,
    checkpoint_name_or_path: gpt2, hidden_act: fast_gelu}
train_dataset: {a_key_that_nobody_knows: 1}
"""
R03 = R1.partition("train")[0].replace("hidden_size", "embedding_size")
R03 = R03.replace("expand_ratio: 2", "intermediate_size: 64")


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """Only the checkpoint."""
    model = checked_model(tmp_path, SIZES)
    write_mindformers(tmp_path, as_weights(model, random_arrays(model)), None)
    (tmp_path / MODEL_YAML).unlink()
    return tmp_path


def sizes_of(folder: Path) -> dict[str, object]:
    weights = open_mindformers(folder)
    return {key: getattr(weights.model, key) for key in SIZES}


BASE = "base_config: ['./model_config/gpt2.yaml']\nrunner_config: {epochs: 1}\n"


@pytest.mark.parametrize(
    "files", [{"run_gpt2.yaml": R1}, {MODEL_YAML: R1}, {"run_gpt2.yaml": BASE, "model_config/gpt2.yaml": R03}]
)
def test_the_sizes_of_a_yaml_of_mindformers(bare: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (bare / name).parent.mkdir(exist_ok=True)
        (bare / name).write_text(text)
    assert sizes_of(bare) == SIZES == sizes_of(bare / "gpt2.ckpt")
    assert open_mindformers(bare).model.activation == "quick_gelu"


def test_the_file_of_the_same_name_is_chosen(bare: Path) -> None:
    (bare / "run_gpt2.yaml").write_text(R1)
    (bare / "run_other.yaml").write_text(R1.replace("num_heads: 4", "num_heads: 2"))
    with pytest.raises(ConfigError, match=r"run_gpt2\.yaml, run_other\.yaml have a model of Mind"):
        sizes_of(bare)
    (bare / "gpt2.yaml").write_text(R1)
    assert sizes_of(bare) == SIZES
    (bare / MODEL_YAML).write_text(f"model: {SIZES | {'num_heads': 8}}")
    assert sizes_of(bare) == SIZES | {"num_heads": 8}, "ours says more, and comes first"


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (R1.replace("num_heads: 4, ", ""), r"a\.yaml: 12 heads do not divide a width of 32"),
        (R1.replace("GPT2Config", "LlamaConfig"), r"a\.yaml:3.*use GPT2Config"),
        ("base_config: []\n", "has no model.model_config"),
        (BASE, r"gpt2\.yaml: no such file"),
        ("model: {model_config\n", r"a\.yaml.*move it away from the weights"),
    ],
)
def test_missing_parts_are_named(bare: Path, text: str, match: str) -> None:
    (bare / "a.yaml").write_text(text)
    with pytest.raises(ConfigError, match=match):
        sizes_of(bare)


# ---- slices of a run that are read ----

AT = "1_4"
RANKS, STAGE = 8, 4


def message_of(stage: int, stages: int) -> Any:
    """Return MindSpore's own message of a strategy, without a layout."""
    from mindspore.train.node_strategy_pb2 import ParallelStrategyMap

    message = ParallelStrategyMap(current_stage=stages)
    message.parallel_strategy_item.add(node_name="MatMul").parallel_strategys.stage = stage
    return message


@pytest.fixture(scope="module")
def run(mindspore: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint beside its ranks' files, which MindSpore joins above, and a
    strategy file of each stage in MindSpore's messages.
    """
    checkpoint = write_run(tmp_path_factory.mktemp("slices") / "run")
    for rank in range(RANKS):
        write_rank_file(config_of(RANKS, **SPLIT), (1, 4), rank, True, checkpoint)
    (whole := message_of(0, 1)).ParseFromString((checkpoint.parent / "ckpt_strategy.ckpt").read_bytes())
    (checkpoint.parent / "strategy").mkdir()
    for stage in range(2):
        message = message_of(stage, 2)
        for item in whole.parallel_layout_item:
            of_stage, _, name = item.param_name.partition("-")
            if int(of_stage) == stage:
                message.parallel_layout_item.add(param_name=name, parallel_layouts=item.parallel_layouts)
        path = checkpoint.parent / "strategy" / f"ckpt_strategy_rank_{stage * STAGE}.ckpt"
        path.write_bytes(message.SerializeToString())
    return checkpoint


@pytest.fixture
def slices(run: Path, tmp_path: Path) -> Path:
    """The ranks' files where MindFormers has them, those of an older step beside them."""
    for rank in range(RANKS):
        file = file_of(tmp_path / "output", rank)
        file.parent.mkdir(parents=True)
        shutil.copy(run.parent / f"rank_{rank}" / file.name, file)
        file.with_name(file.name.replace(AT, "1_2")).write_bytes(b"older")
    shutil.copytree(run.parent / "strategy", tmp_path / "output" / "strategy")
    (tmp_path / "output" / MODEL_YAML).write_text(dump_yaml({"model": MODEL}))
    return tmp_path / "output"


def file_of(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}" / "checkpoint" / f"gpt2_rank_{rank}-{AT}.ckpt"


def merged(folder: Path, run: Path) -> None:
    shutil.rmtree(folder / "strategy")
    shutil.copy(run.parent / "ckpt_strategy.ckpt", folder)


def beside_the_output(folder: Path, run: Path) -> None:
    shutil.move(folder / "strategy", folder.parent / "strategy")


def as_json(folder: Path, run: Path) -> None:
    """Strategy file as MindSpore writes it where the name ends in .json."""
    for path in (folder / "strategy").iterdir():
        (message := message_of(0, 2)).ParseFromString(path.read_bytes())
        records = {
            each.param_name: {
                "dev_matrix": [*each.parallel_layouts.dev_matrix[0].dim],
                "tensor_map": [*each.parallel_layouts.tensor_map[0].dim], "field": 0,
                "opt_weight_shard_step": each.parallel_layouts.opt_weight_shard_step,
                "opt_weight_shard_size": each.parallel_layouts.opt_weight_shard_size,
            }
            for each in message.parallel_layout_item
        }  # fmt: skip
        stage = message.parallel_strategy_item[0].parallel_strategys.stage
        items = {"MatMul": {"stage": stage, "parallel_strategy": []}}
        tree = {"current_stage": 2, "parallel_strategy_item": items, "parallel_layout_item": records}
        path.with_suffix(".json").write_text(json.dumps(tree))
        path.unlink()


@pytest.mark.parametrize("change", [None, merged, beside_the_output, as_json])
def test_mindspores_slices_are_whole_again(
    slices: Path, run: Path, change: Callable[[Path, Path], None] | None
) -> None:
    if change is not None:
        change(slices, run)
    require_same(slices, run)
    require_same(file_of(slices, 0), run)


def test_the_path_of_one_rank_means_all(slices: Path, run: Path) -> None:
    """Its file chooses among several runs; its folder stands for the one above."""
    require_same(file_of(slices, 5).parent, run)
    require_same(file_of(slices, 5).parent.parent, run)
    two_runs(slices)
    require_same(file_of(slices, 0), run)


@pytest.mark.parametrize(
    ("devices", "tensor_map", "shards"),
    [
        ([4, 2], [[0], [-1]], 2),  # the optimizer's ranks are two of four: two groups with copies
        ([2, 2, 2], [[1], [-1]], 4),  # they lie on both sides of the axis that splits dim 0
        ([2, 2, 2], [[2], [0]], 2),
        ([2, 4], [[0, 1], [-1]], 0),  # one dim is split by two axes
        ([2, 2, 2], [[-1], [2, 0]], 0),
    ],
)
def test_every_kind_of_layout_as_mindspore_cuts_it(
    devices: list[int], tensor_map: list[list[int]], shards: int, mindspore: Any, tmp_path: Path
) -> None:
    message, used = message_of(0, 1), [axis for dims in tensor_map for axis in dims]
    layouts = message.parallel_layout_item.add(param_name="x").parallel_layouts
    layouts.dev_matrix.add(dim=devices)
    for dims in [used] if len(used) == 2 else tensor_map:
        layouts.tensor_map.add(dim=dims)
    layouts.param_split_shape.add()
    layouts.indices_offset.add()
    layouts.field = 0
    free = [axis for axis in range(len(devices)) if len(devices) - 1 - axis not in used]
    layouts.opt_weight_shard_step = math.prod(devices[free[-1] + 1 :]) if shards else 0
    layouts.opt_weight_shard_size = shards
    strategy = tmp_path / "ckpt_strategy.ckpt"
    strategy.write_bytes(message.SerializeToString())
    whole = np.arange(16 * 24, dtype=np.float32).reshape(16, 24)
    file = tmp_path / "whole" / "rank_0" / "x.ckpt"
    file.parent.mkdir(parents=True)
    mindspore.save_checkpoint([{"name": "x", "data": mindspore.Tensor(whole)}], str(file))
    folders = (str(tmp_path / name) for name in ("whole", "cut"))
    mindspore.transform_checkpoints(*folders, "x", None, str(strategy))
    shutil.copy(strategy, tmp_path / "cut")
    found = find_slices(tmp_path / "cut")
    assert isinstance(found, Slices) and len(found.files) == math.prod(devices)
    [tensor], [part] = (each.values() for each in (found.tensors(), open_tensors(found.files[0])))
    assert part.nbytes < whole.nbytes and np.array_equal(tensor.read(), whole)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


def rewritten(change: Callable[[str, Layout], tuple[str, Layout]]) -> Callable[[Path], None]:
    """Return a function that changes the layouts in the strategy files."""

    def spoil(folder: Path) -> None:
        for path in (folder / "strategy").iterdir():
            stage, layouts = next(iter(read_strategy(path).items()))
            write_strategy(path, {stage: dict(change(*item) for item in layouts.items())})

    return spoil


def two_runs(folder: Path) -> None:
    shutil.copy(file_of(folder, 0), file_of(folder, 0).with_name("other_rank_0-1_4.ckpt"))


BROKEN = r"ckpt_strategy_rank_4\.ckpt: not a whole strategy file of MindSpore: "
STRATEGY_1 = "strategy/ckpt_strategy_rank_4.ckpt"
FAULTS: dict[str, Callable[[Path], object]] = {
    r"output: files of 1_4: the file of rank 6 is missing, .* copy the folders of all ranks":
        lambda folder: shutil.rmtree(folder / "rank_6"),
    r"describes the stages 0 of .4. ranks, and here are the files of ranks 0, .*; give the ":
        lambda folder: (folder / STRATEGY_1).unlink(),
    "the files of 8 ranks, and no strategy file .*put ckpt_strategy.ckpt there":
        lambda folder: shutil.rmtree(folder / "strategy"),
    "the file of rank 4 is missing, or lacks .* describes 16 ranks: .*files of this run, or":
        rewritten(lambda name, layout: (name, replace(layout, devices=(2, 4)))),
    "says nothing of .*: it is the strategy of another run": rewritten(lambda name, layout: (f"net.{name}", layout)),
    "holds the ranks' files of 2 runs": two_runs,
    r"gpt2_rank_5-1_4\.ckpt: not a whole MindSpore checkpoint: .*copy it again": lambda folder: cut(file_of(folder, 5)),
    f"{BROKEN}.*its protobuf or": lambda folder: (folder / STRATEGY_1).write_bytes(pickle.dumps({"x": [1, 2]})),
}  # fmt: skip


@pytest.mark.parametrize("message", FAULTS)
def test_incomplete_slices_give_one_message(slices: Path, message: str, capsys: Any) -> None:
    FAULTS[message](slices)
    refused(capsys, slices, message, "--from", "mindformers", to="torch_gpt2")


@pytest.mark.parametrize(
    "record",
    [
        {"dev_matrix": [2], "tensor_map": [-1], "param_split_shape": [3, 4]},
        {"dev_matrix": [2], "tensor_map": [-1], "field": 1},
        3,
    ],
)
def test_layouts_that_nothing_has(record: Any, tmp_path: Path) -> None:
    path = tmp_path / "ckpt_strategy.json"
    tree = {"parallel_strategy_item": {}, "parallel_layout_item": {"x": record}}
    path.write_text(json.dumps(tree))
    with pytest.raises(CheckpointError, match=r"ckpt_strategy\.json: not a whole strategy file"):
        read_strategy(path)


def test_a_list_where_a_number_belongs_is_refused(tmp_path: Path) -> None:
    """One damaged byte makes the axes of a parameter a field of numbers. Without axes, a part would be the whole."""
    write_strategy(path := tmp_path / "ckpt_strategy.ckpt", {0: {"x": Layout(devices=(2, 4), axes=((0,), (1,)))}})
    axes, field = b"\x12\x04\x08\x01\x08\x00", b"\x32\x04\x08\x01\x08\x00"
    assert path.read_bytes().count(axes) == 1
    path.write_bytes(path.read_bytes().replace(axes, field))
    with pytest.raises(CheckpointError, match=r"ckpt_strategy\.ckpt: not a whole strategy file"):
        read_strategy(path)
