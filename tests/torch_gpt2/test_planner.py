"""The planner against what torch really does: tensors kept for the backward pass, bytes of state,
bytes of messages counted, what runs of two ranks allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.config.load import build_config
from common.config.schema import RunConfig
from common.parallel.sharding import local_shape
from common.parallel.topology import GroupKind, Topology
from common.planner.plan import make_plan
from common.planner.timing import traffic_of
from common.resolve.derive import resolve_config
from common.run_config import load_config
from gpt2_study.measure import measure
from gpt2_study.results import Cell
from tests.layouts import FP16_WEIGHTS, PIPELINE, RECOMPUTE, TENSOR, schedule
from tests.ranks import run_ranks
from tests.tiny import tiny_run
from torch_gpt2.compilation import compile_model
from torch_gpt2.device import select_device
from torch_gpt2.model import GPT2, round_linear_layers, set_offload, set_packing, set_recompute
from torch_gpt2.parallel.data_parallel import DataParallel
from torch_gpt2.parallel.tensor_parallel import TensorGroup, split_model
from torch_gpt2.parallel.world import World
from torch_gpt2.parallel.zero import data_mesh, shard_model

HALF = {"parameters": "bfloat16", "compute": "bfloat16"}
PRECISIONS: dict[str, Any] = {
    "float32": "float32",
    "bf16": "bf16",
    "half": HALF,
    "half softmax": {**HALF, "softmax": "bfloat16"},
    "pure": {**HALF, "softmax": "bfloat16", "layer_norm": "bfloat16"},
    "mixed softmax": {"compute": "bfloat16", "softmax": "bfloat16"},
}


def make(ranks: int = 1, **sections: Any) -> Any:
    """Sections are added to those of a small run."""
    sizes = {"num_layers": 4, "hidden_size": 48, "num_heads": 4, "seq_length": 40}
    tree: dict[str, Any] = {"output_dir": "nowhere", "optimizer": {"learning_rate": 0.1}}
    tree |= {"model": sizes | {"vocab_size": 1001}, "train": {"micro_batch_size": 3}}
    for name, values in sections.items():
        tree[name] = tree[name] | values if name in tree else values
    return resolve_config(build_config(tree), world_size=ranks)


def kept_bytes(model: nn.Module, run: Callable[[], Tensor]) -> int:
    """Bytes of the storages that autograd keeps of a run, each once, without parameters."""
    known = {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = run()
    assert out.requires_grad
    return sum(kept[storage].untyped_storage().nbytes() for storage in kept.keys() - known)


def build(config: Any) -> GPT2:
    model = GPT2(config.model, config.precision, config.vocab_rows)
    set_recompute(model, config.train.recompute, config.train.recompute_layers)
    set_packing(model, config, select_device("cpu"))
    model.to(getattr(torch, config.precision.parameters))
    if config.rounds_weights_once:
        round_linear_layers(model)
    return model


def saved_bytes(config: Any) -> int:
    """Bytes that autograd keeps of the loss of one micro batch."""
    model = build(config)
    ids = torch.zeros(config.train.micro_batch_size, config.model.seq_length, dtype=torch.int64)
    loss_sum = compile_model([model], config) if config.train.compile is True else model.loss_sum
    return kept_bytes(model, lambda: loss_sum(ids, ids))


def activations(config: RunConfig) -> int:
    (stage,) = make_plan(config).stages
    return stage.activations + stage.loss


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_activations_are_what_autograd_keeps(precision: str, recompute: str) -> None:
    """To the byte, where the issue asks for 10 %; also where only the first blocks recompute."""
    for micro_batch, heads in ((3, 4), (2, 3)):
        model, train = {"num_heads": heads, "ffn_hidden_size": 160}, {"micro_batch_size": micro_batch}
        config = make(precision=PRECISIONS[precision], model=model, train=train | {"recompute": recompute})
        assert activations(config) == saved_bytes(config)
    for activation in ("gelu", "quick_gelu"):
        config = make(precision=PRECISIONS[precision], model={"activation": activation}, train={"recompute": recompute})
        assert activations(config) == saved_bytes(config)
    found = []
    for layers in (1, 3, 4, None) if recompute != "none" else ():
        train = {"recompute": recompute, "recompute_layers": layers}
        config = make(precision=PRECISIONS[precision], train=train)
        found.append(activations(config))
        assert found[-1] == saved_bytes(config)
    assert not found or found[0] > found[1] > found[2] == found[3]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_compiled_regions_keep_the_input_of_a_norm_in_the_type_of_the_computation(
    recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the byte, by the partitioner of torch's compiler; a device's kernels do not change it."""
    monkeypatch.setattr("common.parallel.kernels.MAX_LAYERS_IN_ONE_GRAPH", 1)
    monkeypatch.setattr("torch_gpt2.compilation.BACKEND", "aot_eager_decomp_partition")
    train = {"recompute": recompute, "compile": True, "accumulation_steps": 2}
    config = make(precision="bf16", train=train)
    assert activations(config) == saved_bytes(config)
    assert activations(config) < activations(make(precision="bf16", train={**train, "compile": False}))


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("precision", ["float32", "bf16", "half"])
def test_documents_kept_apart_keep_one_mask_for_all_blocks(precision: str, recompute: str) -> None:
    """To the byte, with the positions of each window."""
    data = {"reset_position_ids": True, "reset_attention_mask": True, "eod_id": 0}
    keys = {"precision": PRECISIONS[precision], "train": {"recompute": recompute}}
    config = make(**keys, data=data)
    mask = 3 * 40 * 40 * (4 if precision == "float32" else 2)
    found = saved_bytes(config)
    assert activations(config) == found == saved_bytes(make(**keys)) + mask + 8 * (3 - 1) * 40


def test_dropout_keeps_a_mask_for_each_branch() -> None:
    """A CPU's mask has the type of what it multiplies, others a byte an element; fused kernels keep none."""
    plain = {"embedding_dropout": 0.0, "attention_dropout": 0.0, "hidden_dropout": 0.0}
    without = make(model=plain)
    for kind, masks in (("embedding_dropout", 1), ("hidden_dropout", 2 * 4)):
        config = make(model={**plain, kind: 0.1})
        planned = activations(config) - activations(without)
        assert 4 * planned == saved_bytes(config) - saved_bytes(without) == 4 * masks * 3 * 40 * 48


def logsumexp(x: Tensor, dim: int, keepdim: bool) -> Tensor:
    """Written out, since what an operator takes for itself is not seen."""
    largest = x.amax(dim, keepdim=keepdim)
    return (x - largest).exp_().sum(dim, keepdim=keepdim).log_() + largest


def peaks(config: RunConfig) -> dict[str, int]:
    """Return the most bytes of live tensors in a step, by device, without contents."""
    with FakeTensorMode(), patch.object(Tensor, "logsumexp", logsumexp):
        model = GPT2(config.model, config.precision, config.vocab_rows)
        set_recompute(model, config.train.recompute, config.train.recompute_layers)
        set_offload(model, config, select_device("cpu"))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        shape = config.train.micro_batch_size, config.model.seq_length
        ids = torch.zeros(shape, dtype=torch.int64)
        with tracker:
            for _ in range(config.train.accumulation_steps):
                model.loss_sum(ids, ids).backward()
                tracker.reset_mod_stats()
            optimizer.step()
        found = tracker.get_tracker_snapshot("peak").items()
    return {str(device): int(sizes["Total"]) for device, sizes in found}


@pytest.mark.parametrize(
    ("precision", "recompute", "layers", "tokens", "micro_batches"),
    [
        ("float32", "selective", None, 1024, 2),
        ("bf16", "none", None, 2048, 2),
        ("bf16", "full", None, 1024, 2),
        ("float32", "full", 1, 2048, 1),
        ("bf16", "full", 3, 2048, 1),
        ("float32", "full", 5, 2048, 1),
        ({"compute": "bfloat16", "float8_head": True}, "none", None, 2048, 1),
    ],
)
def test_the_peak_of_a_step(
    precision: Any, recompute: str, layers: int | None, tokens: int, micro_batches: int
) -> None:
    """Within 5 % of the most bytes of live tensors, followed through a step in which no tensor has
    contents. Where most blocks recompute, the plan may be 8 % above them.
    """
    many = {"num_layers": 6, "vocab_size": 1024} if layers else {}
    train = {"recompute": recompute, "recompute_layers": layers}
    train |= {"micro_batch_size": tokens // 512, "accumulation_steps": micro_batches}
    wide = {"num_layers": 2, "hidden_size": 512, "seq_length": 512, "vocab_size": 50257}
    config = make(precision=precision, model=wide | many, train=train)
    measured = peaks(config)["cpu"]
    planned = make_plan(config).stages[0].peak
    if layers == 5:
        assert measured < planned < 1.08 * measured
    else:
        assert planned == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ({"model_parallel": 4}, 4),
        ({"model_parallel": 2, "pipeline_stage": 2, "stage_layers": [1, 3]}, 8),
        ({"pipeline_stage": 2, "pipeline_schedule": "interleaved_1f1b"}, 2),
        ({"pipeline_stage": 2, "pipeline_schedule": "zbv_zero_bubble", "model_parallel": 2}, 4),
    ],
)
def test_state_is_what_modules_and_optimizers_hold(layout: dict[str, Any], ranks: int) -> None:
    """Parameters of the whole model, cut as the table of roles says, that belong to a rank."""
    for precision in ("float32", HALF):
        config = make(ranks, parallel=layout, precision=precision)
        plan, topology = make_plan(config), config.topology
        last = topology.place_of_stage(topology.stages - 1)
        places = {"wte": {0, last}, "wpe": {0}, "ln_f": {last}}
        with torch.device("meta"):
            model = GPT2(config.model, config.precision, config.vocab_rows)
        for place, stage in enumerate(plan.stages):
            layers, copies = topology.layers_of(place, config.model.num_layers), []
            for name, parameter in model.named_parameters():
                part, number, *_ = name.split(".")
                if int(number) in layers if part == "h" else place in places[part]:
                    shape = local_shape(name, tuple(parameter.shape), topology.tensor)
                    copies.append(nn.Parameter(torch.zeros(shape)))
                    copies[-1].grad = torch.zeros(shape)
            optimizer = torch.optim.AdamW(copies, foreach=False)
            optimizer.step()
            state = [each for one in optimizer.state.values() for each in one.values()]
            held, whole = (sum(each.nbytes for each in some) for some in (state, copies))
            assert stage.weights == (whole // 2 if precision is HALF else whole)
            assert stage.gradients == whole
            assert stage.optimizer == held + whole * (precision is HALF)


class Messages(TorchDispatchMode):
    """Counts what collectives send, bytes by ring algorithms; ranks: of each group."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks, self.sent, self.calls = ranks, 0.0, list[str]()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(operator)
        if "c10d" in name and "wait_tensor" not in name and "wrap_tensor" not in name:
            sizes = [each.nbytes for each in tree_leaves(args) if isinstance(each, Tensor)]
            # which is given a part, not the whole
            gathers = self.ranks if name.startswith("_c10d_functional.all_gather") else 1
            both_ways = 2 if "allreduce" in name or "all_reduce" in name else 1
            self.calls.append(name.split(".")[1].strip("_"))
            self.sent += gathers * max(sizes) * both_ways * (self.ranks - 1) / self.ranks
        return operator(*args, **(kwargs or {}))


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """A group of four of which this process is the first, whose collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize("precision", ["float32", "half"])
@pytest.mark.parametrize(("zero", "shards"), [(1, 4), (2, 4), (3, 4), (1, 2), (2, 2), (3, 2)])
def test_fully_sharded_state_and_messages(zero: int, shards: int, precision: str) -> None:
    """The engine's own FSDP2, also as two copies of two shards, with and without accumulation: bytes held, gathered,
    reduced. Parameters are gathered and copies summed once a step, blocks of stage 3 for every pass.
    """
    for micro_batches in (1, 3):
        parallel, sizes = {"zero_stage": zero, "shard_size": shards}, {"hidden_size": 42, "num_heads": 3}
        train = {"accumulation_steps": micro_batches}
        config = make(4, train=train, precision=PRECISIONS[precision], parallel=parallel, model=sizes)
        stage = make_plan(config).stages[0]
        model = GPT2(config.model, config.precision, config.vocab_rows)
        assert dist.group.WORLD is not None
        world = World(size=4, topology=Topology(data=4), groups={GroupKind.DATA: dist.group.WORLD})
        shard_model(model, config, data_mesh(config, world, select_device("cpu")))
        parallel = DataParallel([model], model.loss_sum, config, world)
        ids = torch.zeros(3, 40, dtype=torch.int64)
        with Messages(shards) as messages:  # there are as many copies where there are two
            for micro_batch in range(micro_batches):
                with parallel.micro_batch(last=micro_batch == micro_batches - 1):
                    parallel.loss_sum(ids, ids).backward()
        gathers = sum("all_gather" in name or "allgather" in name for name in messages.calls)
        assert gathers == ((1 + 2 * 4) * micro_batches if zero == 3 else 1 + 4)
        copies = sum("allreduce" in name for name in messages.calls)
        assert copies == (0 if shards == 4 else 1 + 4)
        parameters = [*model.parameters()]
        assert stage.weights == sum(each.to_local().nbytes for each in parameters)
        if zero > 1 or micro_batches == 1:
            assert stage.gradients == sum(each.grad.to_local().nbytes for each in parameters)
        optimizer = torch.optim.AdamW(parameters, fused=True)
        optimizer.step()
        state = [value for each in optimizer.state.values() for value in each.values()]
        held = [value.to_local() if hasattr(value, "to_local") else value for value in state]
        assert stage.optimizer == sum(each.nbytes for each in held)
        assert traffic_of(config, 0).data == pytest.approx(messages.sent, rel=1e-12)


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("sequence", [False, True])
def test_tensor_parallel_activations_and_messages(sequence: bool, recompute: str) -> None:
    """The engine's tensor parallel on one of four ranks: what autograd keeps within 10 %, what is sent to the byte."""
    layout = {"model_parallel": 4, "sequence_parallel": sequence}
    config = make(4, precision="bf16", train={"recompute": recompute}, parallel=layout)
    stage = make_plan(config).stages[0]
    assert dist.group.WORLD is not None
    with torch.device("meta"):
        model = GPT2(config.model, config.precision, config.vocab_rows)
    group = TensorGroup(group=dist.group.WORLD, rank=0, size=4, sequence=sequence)
    split_model(model, group, select_device("cpu"))
    set_recompute(model, recompute)
    model.to_empty(device="cpu")
    ids = torch.zeros(3, 40, dtype=torch.int64)
    kept = kept_bytes(model, lambda: model.loss_sum(ids, ids))
    assert stage.activations + stage.loss == pytest.approx(kept, rel=0.1)
    with Messages(4) as messages:
        model.loss_sum(ids, ids).backward()
    # norms, biases of c_proj, positions: summed once a step
    whole = 4 * (6 * 4 * 48 + 2 * 48 + 40 * 48)
    sent = traffic_of(config, 0)
    planned = sent.sequence - 2 * 3 / 4 * whole if sequence else sent.tensor
    assert planned == pytest.approx(messages.sent, rel=1e-12)


MEASURED: dict[str, dict[str, Any]] = {
    "data": {},
    "tensor": TENSOR | RECOMPUTE,
    "pipeline": PIPELINE,
    "gpipe": schedule("gpipe") | {"train__micro_batch_size": 8},
    "zero2": {"parallel__zero_stage": 2, "profile__stop": 2},
    "deepspeed1": {"engine": "deepspeed", "parallel__zero_stage": 1},
    "deepspeed1_float16": {"engine": "deepspeed", "parallel__zero_stage": 1, "precision": FP16_WEIGHTS},
    "deepspeed3": {"engine": "deepspeed", "parallel__zero_stage": 3},
}


@pytest.mark.long
def test_state_and_steps_take_what_the_plan_says(tmp_path: Path, corpus_prefix: Path) -> None:
    """Within 10 %: state, and what a step allocates beside it, counted by torch's profiler.

    The micro batch is large: threads of gloo and DeepSpeed free a gathered weight (at most 2.5 of
    some 40 MB) now before, now after the next one is allocated.
    """
    base: dict[str, Any] = {"model__hidden_size": 64, "model__seq_length": 32, "model__vocab_size": 8000}
    base |= {"train": {"max_steps": 3, "micro_batch_size": 16, "global_batch_size": 32}}
    base |= {"optimizer": {"learning_rate": 1e-3}, "data__split": "100,0,0"}
    base |= {"profile": {"start": 2, "stop": 3, "memory": True}}
    jobs = [tiny_run(tmp_path / name, corpus_prefix, **base, **changes) for name, changes in MEASURED.items()]
    run_ranks(2, jobs, seconds=60.0)
    for name in MEASURED:
        cell = Cell(id=name, axes={}, settings={}, backend="torch", engine="native", ranks=2)
        found = measure(cell, tmp_path / name, warmup_steps=0).memory_parts
        config = resolve_config(load_config(tmp_path / name / "config.yaml", ()), world_size=2)
        fullest = max(make_plan(config).stages, key=lambda memory: memory.peak)
        state = fullest.weights + fullest.optimizer
        assert found["state"] == pytest.approx(state, rel=0.1), name
        assert found["step"] == pytest.approx(fullest.peak - state, rel=0.1), name
