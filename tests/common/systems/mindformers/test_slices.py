"""The ranks' files of a run, and slices of each kind that MindSpore's own tools have cut, are whole again; then sets of
slices that are not.
"""

import json
import math
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from common.errors import CheckpointError
from common.systems.mindformers.slices import Slices, find_slices
from common.systems.mindformers.write import write_rank_file
from common.systems.run_state import MODEL_YAML
from common.tensor_files.mindspore_strategy import Layout, read_strategy, write_strategy
from common.yaml_files import dump_yaml
from tests.common.systems.mindformers.test_rank_files import MODEL, config_of, require_same, write_run
from tests.common.systems.tiny_weights import refused

AT = "1_4"
RANKS, STAGE = 8, 4
PARTS = {"data_parallel": 2, "model_parallel": 2, "pipeline_stage": 2, "zero_stage": 1}


def message_of(stage: int, stages: int) -> Any:
    """Return MindSpore's own message of a strategy, without a layout."""
    from mindspore.train.node_strategy_pb2 import ParallelStrategyMap

    message = ParallelStrategyMap(current_stage=stages)
    message.parallel_strategy_item.add(node_name="MatMul").parallel_strategys.stage = stage
    return message


@pytest.fixture(scope="module")
def run(mindspore: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint beside its ranks' files, which MindSpore joins in test_rank_files.py, and a
    strategy file of each stage in MindSpore's messages.
    """
    checkpoint = write_run(tmp_path_factory.mktemp("slices") / "run")
    for rank in range(RANKS):
        write_rank_file(config_of(RANKS, **PARTS), (1, 4), rank, True, checkpoint)
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
    [tensor] = found.tensors().values()
    assert len(tensor.parts) > 1 and np.array_equal(tensor.read(), whole)


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
