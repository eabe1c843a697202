"""Slices that MindSpore's own tools have cut of a checkpoint are merged here and by MindSpore;
then sets of slices that are not whole.
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
from common.parallel.sharding import Role, role_of
from common.systems.mindformers.read import NAME_MAPS, open_mindformers
from common.systems.mindformers.slices import Slices, find_slices
from common.systems.run_state import MODEL_YAML
from common.systems.weights import checked_model
from common.tensor_files.mindspore_strategy import Layout, read_strategy, write_strategy
from common.weights.names import parameter_shapes
from common.yaml_files import dump_yaml
from tests.common.systems.tiny_weights import refused

MODEL = {"num_layers": 4, "hidden_size": 16, "num_heads": 2, "seq_length": 8, "vocab_size": 36}
ROWS = NAME_MAPS["mindformers"][0].rows(4)
SHAPES = {row.theirs: row.shape(parameter_shapes(checked_model(Path("here"), MODEL))) for row in ROWS}
AT = "1_4"
DATA, TENSOR, STAGES = 2, 2, 2


def stages_of(name: str) -> tuple[int, ...]:
    """Two blocks on each; the head is the embedding, which the last stage has too."""
    if "blocks" in name:
        return (int(name.split(".")[2]) // 2,)
    return (0, 1) if "word" in name else (0,) if "position" in name else (1,)


def tensor_map(ours: str, *, transposed: bool) -> list[int]:
    """MindSpore's: the tensor axis is the last of [DATA, TENSOR], so it has number 0."""
    split = {Role.VOCABULARY: 0, Role.COLUMN: 0, Role.ROW: 1, Role.REPLICATED: None}[role_of(ours)]
    dims = len(SHAPES[next(row.theirs for row in ROWS if row.ours == (ours,))])
    if split is not None and transposed:
        split = 1 - split
    return [0 if dim == split else -1 for dim in range(dims)]


def message_of(stage: int, stages: int) -> Any:
    """Return MindSpore's own message of a strategy, without a layout."""
    from mindspore.train.node_strategy_pb2 import ParallelStrategyMap

    message = ParallelStrategyMap(current_stage=stages)
    message.parallel_strategy_item.add(node_name="MatMul").parallel_strategys.stage = stage
    return message


def add_layout(message: Any, name: str, devices: list[int], maps: list[list[int]], step: int, shards: int) -> None:
    """maps: lists of axes, as the message has them. step, shards: of the optimizer's split."""
    layouts = message.parallel_layout_item.add(param_name=name).parallel_layouts
    layouts.dev_matrix.add(dim=devices)
    for dims in maps:
        layouts.tensor_map.add(dim=dims)
    layouts.param_split_shape.add()
    layouts.indices_offset.add()
    layouts.field = 0
    layouts.opt_weight_shard_step = step if shards else 0
    layouts.opt_weight_shard_size = shards


def write_strategies(folder: Path) -> None:
    """Write a strategy file of each stage."""
    folder.mkdir(exist_ok=True)
    for stage in range(STAGES):
        message = message_of(stage, STAGES)
        for row in ROWS:
            if stage not in stages_of(row.theirs):
                continue
            mapped = tensor_map(row.ours[0], transposed=row.transposed)
            # what is whole on every rank of a stage is split by the optimizer over all, or not
            shards = DATA if "word" not in row.theirs and max(mapped) == 0 else 0
            for prefix in ("", "adam_m.", "adam_v."):
                add_layout(message, prefix + row.theirs, [DATA, TENSOR], [mapped], TENSOR, shards)
        path = folder / f"ckpt_strategy_rank_{stage * DATA * TENSOR}.ckpt"
        path.write_bytes(message.SerializeToString())


@pytest.fixture(scope="module")
def run(mindspore: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole checkpoint, and the eight slices that MindSpore makes of it."""
    ms, folder = mindspore, tmp_path_factory.mktemp("slices")
    write_strategies(folder / "strategy")
    merged = str(folder / "merged.ckpt")
    ms.merge_pipeline_strategys(str(folder / "strategy"), merged)
    random = np.random.default_rng(0)
    whole = {
        prefix + name: random.normal(size=shape).astype(np.float32)
        for prefix in ("", "adam_m.", "adam_v.")
        for name, shape in SHAPES.items()
    }
    counters = {"global_step": np.array([4], np.int32), "step_num": np.array(4, np.int32)}
    tensors = [{"name": name, "data": ms.Tensor(array)} for name, array in (whole | counters).items()]
    (folder / "whole" / "rank_0").mkdir(parents=True)
    ms.save_checkpoint(tensors, str(folder / "whole" / "rank_0" / "net.ckpt"))
    ms.transform_checkpoints(str(folder / "whole"), str(folder / "cut"), "net", None, merged)
    ms.transform_checkpoints(str(folder / "cut"), str(folder / "again"), "net", merged, None)
    np.savez(folder / "whole.npz", **whole)
    return folder


@pytest.fixture
def slices(run: Path, tmp_path: Path) -> Path:
    """The ranks' files by MindFormers' names, those of an older step beside them."""
    for rank in range(DATA * TENSOR * STAGES):
        folder = tmp_path / "output" / f"rank_{rank}" / "checkpoint"
        folder.mkdir(parents=True)
        shutil.copy(run / "cut" / f"rank_{rank}" / f"net{rank}.ckpt", folder / name_of(rank))
        (folder / name_of(rank, "1_2")).write_bytes(b"older")
    shutil.copytree(run / "strategy", tmp_path / "output" / "strategy")
    (tmp_path / "output" / MODEL_YAML).write_text(dump_yaml({"model": MODEL}))
    return tmp_path / "output"


def name_of(rank: int, at: str = AT) -> str:
    return f"gpt2_rank_{rank}-{at}.ckpt"


def file_of(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}" / "checkpoint" / name_of(rank)


def require_whole(path: Path, run: Path) -> None:
    """Every tensor bit for bit as it was before MindSpore cut it, and as MindSpore joins it."""
    import mindspore as ms

    theirs = ms.load_checkpoint(str(run / "again" / "rank_0" / "net0.ckpt"))
    parts = {"": "", "adam_m.": ".exp_avg", "adam_v.": ".exp_avg_sq"}
    with open_mindformers(path) as weights, np.load(run / "whole.npz") as whole:
        assert weights.run is not None and weights.run["engine"]["optimizer_steps"] == 4
        assert len(weights.moments) == 2 * len(weights.tensors) == 2 * len(SHAPES)
        for row in ROWS:
            for prefix, suffix in parts.items():
                found = {**weights.tensors, **weights.moments}[row.ours[0] + suffix].load()
                found = found.T if row.transposed else found
                name = prefix + row.theirs
                assert np.array_equal(found, whole[name]), name
                assert np.array_equal(found, theirs[name].asnumpy()), name


def merged(folder: Path, run: Path) -> None:
    shutil.rmtree(folder / "strategy")
    shutil.copy(run / "merged.ckpt", folder / "ckpt_strategy.ckpt")


def beside_the_output(folder: Path, run: Path) -> None:
    shutil.move(folder / "strategy", folder.parent / "strategy")


def as_json(folder: Path, run: Path) -> None:
    """Strategy file as MindSpore writes it where the name ends in .json."""
    for path in (folder / "strategy").iterdir():
        (message := message_of(0, STAGES)).ParseFromString(path.read_bytes())
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
        tree = {"current_stage": STAGES, "parallel_strategy_item": items}
        tree |= {"parallel_layout_item": records}
        path.with_suffix(".json").write_text(json.dumps(tree))
        path.unlink()


@pytest.mark.parametrize("change", [None, merged, beside_the_output, as_json])
def test_mindspores_slices_are_whole_again(
    slices: Path, run: Path, change: Callable[[Path, Path], None] | None
) -> None:
    if change is not None:
        change(slices, run)
    require_whole(slices, run)
    require_whole(file_of(slices, 0), run)


def test_the_path_of_one_rank_means_all(slices: Path, run: Path) -> None:
    """Its file chooses among several runs; its folder stands for the one above."""
    require_whole(file_of(slices, 5).parent, run)
    require_whole(file_of(slices, 5).parent.parent, run)
    two_runs(slices)
    require_whole(file_of(slices, 0), run)


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
    free = [axis for axis in range(len(devices)) if len(devices) - 1 - axis not in used]
    step = math.prod(devices[free[-1] + 1 :]) if shards else 0
    add_layout(message, "x", devices, [used] if len(used) == 2 else tensor_map, step, shards)
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
    "says nothing of .*: it is the strategy of another run":
        rewritten(lambda name, layout: (f"net.{name}", layout)),
    "holds the ranks' files of 2 runs": two_runs,
    r"gpt2_rank_5-1_4\.ckpt: not a whole MindSpore checkpoint: .*copy it again":
        lambda folder: cut(file_of(folder, 5)),
    f"{BROKEN}.*its protobuf or":
        lambda folder: (folder / STRATEGY_1).write_bytes(pickle.dumps({"x": [1, 2]})),
}  # fmt: skip


@pytest.mark.parametrize("message", FAULTS)
def test_incomplete_slices_give_one_message(slices: Path, message: str, capsys: Any) -> None:
    FAULTS[message](slices)
    refused(capsys, slices, message, "--from", "mindformers", to="torch_gpt2")


@pytest.mark.parametrize(
    "record",
    [
        {"dev_matrix": [2, 2], "tensor_map": [2]},
        {"dev_matrix": [2], "tensor_map": [-1], "param_split_shape": [3, 4]},
        {"dev_matrix": [2], "tensor_map": [-1], "field": 1},
        {"dev_matrix": [2**40], "tensor_map": [-1]},
        3,
    ],
)
def test_layouts_that_nothing_has(record: Any, tmp_path: Path) -> None:
    path = tmp_path / "ckpt_strategy.json"
    tree = {"parallel_strategy_item": {}, "parallel_layout_item": {"x": record}}
    path.write_text(json.dumps(tree))
    with pytest.raises(CheckpointError, match=r"ckpt_strategy\.json: not a whole strategy file"):
        read_strategy(path)
