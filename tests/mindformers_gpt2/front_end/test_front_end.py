"""MindSpore's compiled semi-automatic step, compared with the layout's arithmetic: parts of parameters, stages, peers,
and kind, group and number of every collective of forward and backward pass and update; nothing else may be
communicated.

The compiler's front-end runs for chosen ranks in processes of its own (compile_rank.py), which are made to believe that
the device is an Ascend. No kernel is built and nothing is executed: **this is not a proof that the graph runs on an
Ascend**, nor that its numbers are right. It depends on MindSpore 2.10.0 to the byte, and is skipped with any other.
"""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.config.load import build_config
from common.config.schema import RunConfig
from common.parallel.sharding import Role, padded_shapes, role_of, slice_of
from common.parallel.topology import GroupKind
from common.resolve.derive import resolve_config, written_ranks
from common.weights.names import EMBEDDING, decays
from common.weights.pieces import shape_of
from tests.tiny import tiny_run

ROOT = Path(__file__).resolve().parents[3]
SUPPORTED = "2.10.0"
VERSION = importlib.metadata.version("mindspore") if importlib.util.find_spec("mindspore") else None
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(VERSION != SUPPORTED, reason=f"made for MindSpore {SUPPORTED}, found {VERSION or 'none'}"),
]

Collective = tuple[str, tuple[int, ...] | int, str | None]
"""Operator, the ranks of the group or the peer, what it computes."""

THRESHOLD = 4
"""KB from which the optimizer is split: matrices of the toy are, vectors are not."""


def toy(layers: int = 4, precision: str = "float32", **parallel: Any) -> dict[str, Any]:
    """4 x 2 x 4 as in the tutorial of 13B unless said otherwise, with one layer a stage."""
    layout = {"data_parallel": 4, "model_parallel": 2, "pipeline_stage": 4, "parallel_mode": 1}
    sizes = {"num_layers": layers, "num_heads": 4, "hidden_size": 64, "seq_length": 32}
    return tiny_run(
        backend="mindspore",
        device="npu",
        model=sizes | {"vocab_size": 250, "vocab_multiple": 16},
        precision={"compute": precision},
        train={"max_steps": 10, "micro_batch_size": 2, "accumulation_steps": 4},
        optimizer={"learning_rate": 0.1, "weight_decay": 0.1},
        parallel=layout | parallel,
    )


SPLIT = {"zero_stage": 1, "parallel_optimizer_config": {"parallel_optimizer_threshold": THRESHOLD}}
CASES = {
    "first stage": (toy(**SPLIT), 0),
    "second stage, whole optimizer": (toy(), 9),
    "last stage": (toy(**SPLIT), 31),
    "one stage, sequence parallel": (
        toy(1, "bfloat16", **SPLIT, sequence_parallel=True, data_parallel=2, pipeline_stage=1),
        0,
    ),
}


def compile_rank(tree: dict[str, Any], rank: int, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tree))
    program = str(Path(__file__).with_name("compile_rank.py"))
    words = [sys.executable, program, str(folder / "config.json"), str(rank), str(folder)]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=folder, env=environ, timeout=600, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    assert not found["failure"], found["failure"][:3000]
    strategy = folder / tree["output_dir"] / "strategy" / f"ckpt_strategy_rank_{rank}.ckpt"
    return found | {"strategy": strategy}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("front_end")
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda name: compile_rank(*CASES[name], folder / name.split()[0]), CASES)
        return dict(zip(CASES, found, strict=True))


@pytest.mark.parametrize("case", list(CASES))
def test_toy(case: str, compiled: dict[str, dict[str, Any]]) -> None:
    tree, rank = CASES[case]
    config = resolved(tree)
    check(compiled[case], config, rank, THRESHOLD)
    operators, held = compiled[case]["operators"], own_names(config, rank)
    assert operators["Adam"] == len(held), "one kernel updates a parameter"
    assert operators["ApplyGradientDescent"] == sum(map(decays, held)), "and one decays a matrix"
    # one is whole in the graph of each micro batch: a norm, and where a kernel has it, attention
    passes = len(layers_of(config, rank)) * config.train.accumulation_steps
    norms = 2 * passes + config.topology.holds_head(rank) * config.train.accumulation_steps
    assert operators["LayerNorm"] == operators["LayerNormGrad"] == norms
    fused = 0 if config.precision.compute == "float32" else passes
    assert operators.get("FlashAttentionScore", 0) == operators.get("FlashAttentionScoreGrad", 0) == fused
    assert ("Softmax" in operators) == ("BatchMatMul" in operators) == (not fused)


def test_mindspores_own_transform_gives_each_rank_its_part(compiled: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """By the strategy file that the compiler wrote: whole tensors to the ranks' files."""
    import mindspore as ms

    case = "one stage, sequence parallel"
    strategy, config = str(compiled[case]["strategy"]), resolved(CASES[case][0])
    shapes = padded_shapes(config)
    whole = {name: np.arange(np.prod(shape), dtype=np.float32).reshape(shape) for name, shape in shapes.items()}
    (tmp_path / "whole" / "rank_0").mkdir(parents=True)
    tensors = [{"name": name, "data": ms.Tensor(values)} for name, values in whole.items()]
    ms.save_checkpoint(tensors, str(tmp_path / "whole" / "rank_0" / "net.ckpt"))
    folders = [str(tmp_path / name) for name in ("whole", "parts")]
    ms.transform_checkpoints(*folders, "net", None, strategy)
    for rank in range(4):
        at = config.topology.coordinates(rank)
        found = ms.load_checkpoint(str(tmp_path / "parts" / f"rank_{rank}" / f"net{rank}.ckpt"))
        for name, shape in shapes.items():
            shards = 2 if is_split(config, name, THRESHOLD) else 1
            places = {"tensor_rank": at.tensor, "shard_rank": at.data % shards}
            piece = slice_of(name, shape, tensor=2, shards=shards, **places)
            part = whole[name][tuple(slice(*span) for span in piece)]
            np.testing.assert_array_equal(found[name].asnumpy(), part, err_msg=name)


def resolved(tree: dict[str, Any]) -> RunConfig:
    config = build_config(tree)
    return resolve_config(config, world_size=written_ranks(config))


def check(found: dict[str, Any], config: RunConfig, rank: int, threshold: int) -> None:
    shapes = {name: tuple(shape) for name, shape in found["parameters"].items()}
    held = held_shapes(config, rank, threshold)
    assert {name: shapes.get(name) for name in held} == held
    for name, shape in held.items():
        assert shapes.get(f"{name}.exp_avg") == shapes.get(f"{name}.exp_avg_sq") == shape, name
    others = shapes.keys() & padded_shapes(config).keys() - held.keys()
    shared = {EMBEDDING} if config.topology.holds_head(rank) else set()
    assert others <= shared, "parameters of another stage"
    counted = Counter(key(item) for item in found["collectives"])
    split = {name for name in held if is_split(config, name, threshold)}
    expected = expected_collectives(config, rank, split)
    assert counted == expected, (dict(counted - expected), dict(expected - counted))


def key(item: dict[str, Any]) -> Collective:
    if item["operator"] in ("Send", "Receive"):
        return item["operator"], item["peer"], None
    return item["operator"], tuple(item["ranks"]), item["operation"]


# ---- what the layout says ----


def layers_of(config: RunConfig, rank: int) -> range:
    return config.topology.layers_of(config.topology.coordinates(rank).pipeline, config.model.num_layers)


def own_names(config: RunConfig, rank: int) -> list[str]:
    topology, layers = config.topology, layers_of(config, rank)
    names = [name for name in padded_shapes(config) if name.startswith("h.") and int(name.split(".")[1]) in layers]
    if topology.coordinates(rank).pipeline == 0:
        names += [EMBEDDING, "wpe.weight"]
    return names + (["ln_f.weight", "ln_f.bias"] if topology.holds_head(rank) else [])


def is_split(config: RunConfig, name: str, threshold: int) -> bool:
    """By ZeRO: not what is whole on every tensor-parallel rank, nor what is small, nor an embedding on two stages."""
    on_two_stages = name == EMBEDDING and config.parallel.pipeline_stage > 1
    if config.parallel.zero_stage == 0 or role_of(name) is Role.REPLICATED or on_two_stages:
        return False
    shape = padded_shapes(config)[name]
    own = shape_of(slice_of(name, shape, tensor=config.parallel.model_parallel))
    return 4 * int(np.prod(own)) >= 1024 * threshold


def held_shapes(config: RunConfig, rank: int, threshold: int) -> dict[str, tuple[int, ...]]:
    found, shapes, topology = {}, padded_shapes(config), config.topology
    for name in own_names(config, rank):
        shards = topology.data if is_split(config, name, threshold) else 1
        found[name] = shape_of(slice_of(name, shapes[name], tensor=topology.tensor, shards=shards))
    return found


def expected_collectives(config: RunConfig, rank: int, split: set[str]) -> Counter[Collective]:
    """Within blocks they are Megatron's: two sums forward, two backward. Sequence parallelism takes each apart."""
    topology, micro = config.topology, config.train.accumulation_steps
    stage = topology.data * topology.tensor
    tensor = tuple(topology.group(GroupKind.TENSOR, rank))
    data = tuple(topology.group(GroupKind.DATA, rank))
    everyone = tuple(range(topology.world_size))
    stage_ranks = tuple(range(rank // stage * stage, (rank // stage + 1) * stage))
    layers = len(layers_of(config, rank))
    counts: Counter[Collective] = Counter()
    counts["AllReduce", everyone, "sum"] += 1  # the loss and the norm
    if config.parallel.sequence_parallel:
        for operator, operation in (("AllGather", None), ("ReduceScatter", "sum")):
            counts[operator, tensor, operation] += (4 * layers + topology.holds_head(rank)) * micro
    else:
        counts["AllReduce", tensor, "sum"] += 4 * layers * micro
    if topology.coordinates(rank).pipeline == 0:
        counts["AllReduce", tensor, "sum"] += 2 * micro
    # the largest logit, the sum and the target's, forward and backward, the loss, forward and backward
    if topology.holds_head(rank):
        # The slopes of all micro batches' losses are equal: without a pipeline the compiler finds
        # that, and communicates them once.
        slopes = micro if topology.pipeline > 1 else 1
        counts["AllReduce", tensor, "max"] += micro
        counts["AllReduce", tensor, "sum"] += 3 * micro + slopes
        counts["AllReduce", data, "sum"] += micro + slopes
    for name in own_names(config, rank):
        if name in split:
            counts["AllGather", data, None] += 1
            counts["ReduceScatter", data, "sum"] += 1
        else:
            counts["AllReduce", stage_ranks if role_of(name) is Role.REPLICATED else data, "sum"] += 1
    peers = [(rank - stage, micro), (rank + stage, micro)]
    # the tied embedding goes from the first stage to the last once a step, and its gradient back
    peers += [(other, 1) for other in topology.group(GroupKind.EMBEDDING, rank) if other != rank]
    for peer, times in peers:
        if 0 <= peer < topology.world_size:
            counts["Send", peer, None] += times
            counts["Receive", peer, None] += times
    return counts
