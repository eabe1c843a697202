"""The planner against what torch really does: tensors kept for the backward pass, bytes of state,
bytes of messages counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

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
from common.resolve.derive import resolve_config
from torch_gpt2.compilation import compile_model
from torch_gpt2.device import select_device
from torch_gpt2.model import (
    GPT2,
    round_linear_layers,
    set_packing,
    set_recompute,
)
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


def make(ranks: int = 1, **sections: Any) -> RunConfig:
    """Sections are added to those of a small run."""
    tree: dict[str, Any] = {
        "output_dir": "nowhere",
        "model": {"num_layers": 4, "hidden_size": 48, "num_heads": 4, "seq_length": 40}
        | {"vocab_size": 1001},
        "train": {"micro_batch_size": 3},
        "optimizer": {"learning_rate": 0.1},
    }
    for name, values in sections.items():
        merges = isinstance(values, dict) and name in tree
        tree[name] = {**tree[name], **values} if merges else values
    return resolve_config(build_config(tree), world_size=ranks)


def kept_bytes(model: nn.Module, run: Callable[[], Tensor], others: Sequence[Tensor] = ()) -> int:
    """Bytes of the storages that autograd keeps of a run, each once, without parameters and
    ``others``.
    """
    known = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *others)}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = run()
    assert out.requires_grad
    return sum(kept[storage].untyped_storage().nbytes() for storage in kept.keys() - known)


def saved_bytes(config: RunConfig) -> int:
    """Bytes that autograd keeps of the loss of one micro batch."""
    model = GPT2(config.model, config.precision, config.vocab_rows)
    set_recompute(model, config.train.recompute, config.train.recompute_layers)
    set_packing(model, config, select_device("cpu"))
    model.to(getattr(torch, config.precision.parameters))
    if config.rounds_weights_once:
        round_linear_layers(model)
    ids = torch.zeros(
        config.train.micro_batch_size or 0, config.model.seq_length, dtype=torch.int64
    )
    loss_sum = compile_model([model], config) if config.train.compile is True else model.loss_sum
    return kept_bytes(model, lambda: loss_sum(ids, ids))


def activations(config: RunConfig) -> int:
    (stage,) = make_plan(config).stages
    return stage.memory.activations + stage.memory.loss


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_activations_are_what_autograd_keeps(precision: str, recompute: str) -> None:
    """To the byte, where the issue asks for 10 %; also where only the first blocks recompute."""
    for micro_batch, heads in ((3, 4), (2, 3)):
        config = make(
            precision=PRECISIONS[precision],
            model={"num_heads": heads, "ffn_hidden_size": 160},
            train={"recompute": recompute, "micro_batch_size": micro_batch},
        )
        assert activations(config) == saved_bytes(config)
    if recompute != "none":
        found = []
        for layers in (1, 3, 4, None):
            train = {"recompute": recompute, "recompute_layers": layers}
            config = make(precision=PRECISIONS[precision], train=train)
            found.append(activations(config))
            assert found[-1] == saved_bytes(config)
        assert found[0] > found[1] > found[2] == found[3]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_compiled_regions_keep_the_input_of_a_norm_in_the_type_of_the_computation(
    recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the byte, by the partitioner of torch's compiler; a device's kernels do not change it."""
    monkeypatch.setattr("common.resolve.compilation.MAX_LAYERS_IN_ONE_GRAPH", 1)
    monkeypatch.setattr("torch_gpt2.compilation.BACKEND", "aot_eager_decomp_partition")
    train = {"recompute": recompute, "compile": True, "accumulation_steps": 2}
    config = make(precision="bf16", train=train)
    assert activations(config) == saved_bytes(config)
    assert activations(config) < activations(
        make(precision="bf16", train={**train, "compile": False})
    )


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("precision", ["float32", "bf16", "half"])
def test_documents_kept_apart_keep_one_mask_for_all_blocks(precision: str, recompute: str) -> None:
    """To the byte, with the positions of each window."""
    data = {"reset_position_ids": True, "reset_attention_mask": True, "eod_id": 0}
    config, plain = (
        make(precision=PRECISIONS[precision], train={"recompute": recompute}, data=each)
        for each in (data, {})
    )
    assert activations(config) == saved_bytes(config)
    more = 3 * 40 * 40 * (4 if precision == "float32" else 2) + 8 * (3 - 1) * 40
    assert saved_bytes(config) - saved_bytes(plain) == more


def test_dropout_keeps_a_mask_for_each_branch() -> None:
    """On a CPU a mask has the type of what it multiplies, on accelerators a byte an element;
    attention's is not kept by fused kernels.
    """
    plain = {"embedding_dropout": 0.0, "attention_dropout": 0.0, "hidden_dropout": 0.0}
    without = make(model=plain)
    for kind, masks in (("embedding_dropout", 1), ("hidden_dropout", 2 * 4)):
        config = make(model={**plain, kind: 0.1})
        planned = activations(config) - activations(without)
        assert 4 * planned == saved_bytes(config) - saved_bytes(without) == 4 * masks * 3 * 40 * 48


@pytest.mark.parametrize(
    ("precision", "recompute", "layers", "tokens", "micro_batches"),
    [
        ("float32", "none", None, 2048, 1),
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
    precision: Any,
    recompute: str,
    layers: int | None,
    tokens: int,
    micro_batches: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Within 5 % of the most bytes of live tensors, followed through a step in which no tensor has
    contents. Where most blocks recompute, the plan may be 8 % above them.
    """

    # written out, since what an operator takes for itself is not seen
    def logsumexp(x: Tensor, dim: int, keepdim: bool) -> Tensor:
        largest = x.amax(dim, keepdim=keepdim)
        return (x - largest).exp_().sum(dim, keepdim=keepdim).log_() + largest

    monkeypatch.setattr(Tensor, "logsumexp", logsumexp)
    many = {"num_layers": 6, "vocab_size": 1024} if layers else {}
    train = {"recompute": recompute, "recompute_layers": layers}
    train |= {"micro_batch_size": tokens // 512, "accumulation_steps": micro_batches}
    wide = {"num_layers": 2, "hidden_size": 512, "seq_length": 512, "vocab_size": 50257}
    config = make(precision=precision, model=wide | many, train=train)
    with FakeTensorMode():
        model = GPT2(config.model, config.precision, config.vocab_rows)
        set_recompute(model, recompute, layers)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        ids = torch.zeros(tokens // 512, 512, dtype=torch.int64)
        with tracker:
            for _ in range(micro_batches):
                model.loss_sum(ids, ids).backward()
                tracker.reset_mod_stats()
            optimizer.step()
        (measured,) = (
            snapshot["Total"] for snapshot in tracker.get_tracker_snapshot("peak").values()
        )
    planned = make_plan(config).stages[0].memory.peak
    if layers == 5:
        assert measured < planned < 1.08 * measured
    else:
        assert planned == pytest.approx(measured, rel=0.05)


def modules_of(config: RunConfig, topology: Topology, place: int) -> nn.ParameterList:
    """Parameters of one rank on the meta device: those of the whole model, cut as the table of
    roles says, that belong here.
    """
    with torch.device("meta"):
        model = GPT2(config.model, config.precision, config.vocab_rows)
    model.to(getattr(torch, config.precision.parameters))
    layers = topology.layers_of(place, config.model.num_layers)
    last = topology.place_of_stage(topology.stages - 1)
    places = {"wte": {0, last}, "wpe": {0}, "ln_f": {last}}
    here = nn.ParameterList()
    for name, parameter in model.named_parameters():
        part, number, *_ = name.split(".")
        if int(number) in layers if part == "h" else place in places[part]:
            shape = local_shape(name, tuple(parameter.shape), topology.tensor)
            here.append(torch.empty(shape, dtype=parameter.dtype, device="meta"))
    return here


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ({}, 1),
        ({"model_parallel": 4}, 4),
        ({"pipeline_stage": 4}, 4),
        ({"model_parallel": 2, "pipeline_stage": 2, "stage_layers": [1, 3]}, 8),
        ({"pipeline_stage": 2, "pipeline_schedule": "interleaved_1f1b"}, 2),
        ({"pipeline_stage": 2, "pipeline_schedule": "zbv_zero_bubble", "model_parallel": 2}, 4),
    ],
)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_state_is_what_modules_and_optimizers_hold(
    layout: dict[str, Any], ranks: int, optimizer: str
) -> None:
    """Float32 and half-precision weights, whose copies and gradients are float32."""
    momentum = {"momentum": 0.9} if optimizer == "sgd" else {}
    for precision in ("float32", HALF):
        config = make(
            ranks, parallel=layout, precision=precision, optimizer={"name": optimizer, **momentum}
        )
        plan = make_plan(config)
        for place, stage in enumerate(plan.stages):
            parameters = modules_of(config, plan.topology, place)
            copies = [nn.Parameter(parameter.float()) for parameter in parameters]
            for copy in copies:
                copy.grad = torch.empty_like(copy)
            theirs: torch.optim.Optimizer = torch.optim.SGD(copies, lr=0.1, momentum=0.9)
            if optimizer == "adamw":
                theirs = torch.optim.AdamW(copies, lr=0.1, foreach=False)
            theirs.step()
            whole = sum(copy.nbytes for copy in copies)
            held = sum(each.nbytes for state in theirs.state.values() for each in state.values())
            assert stage.memory.weights == sum(parameter.nbytes for parameter in parameters)
            assert stage.memory.gradients == whole
            assert stage.memory.optimizer == held + whole * (precision is HALF)


class Messages(TorchDispatchMode):
    """Counts what collectives send, bytes by ring algorithms; ranks: of each group."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks, self.sent, self.calls = ranks, 0.0, list[str]()

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
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
    """The engine's own FSDP2, also as two copies of two shards, with and without accumulation:
    bytes held, gathered, reduced. Parameters are gathered and copies summed once a step, blocks of
    stage 3 for every pass.
    """
    for micro_batches in (1, 3):
        train = {"accumulation_steps": micro_batches}
        layout = {"zero_stage": zero, "shard_size": shards}
        config = make(
            4,
            train=train,
            precision=PRECISIONS[precision],
            parallel=layout,
            model={"hidden_size": 42, "num_heads": 3},
        )
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
        assert stage.memory.weights == sum(
            parameter.to_local().nbytes for parameter in model.parameters()
        )
        gradients = sum(parameter.grad.to_local().nbytes for parameter in model.parameters())
        if zero > 1 or micro_batches == 1:
            assert stage.memory.gradients == gradients
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        optimizer.step()
        state = [value for each in optimizer.state.values() for value in each.values()]
        held = sum(getattr(value, "to_local", lambda v=value: v)().nbytes for value in state)
        assert stage.memory.optimizer == held
        assert stage.traffic.data == pytest.approx(messages.sent, rel=1e-12)


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("sequence", [False, True])
def test_tensor_parallel_activations_and_messages(sequence: bool, recompute: str) -> None:
    """The engine's own tensor parallel on one of four ranks: what autograd keeps within 10 %, what
    is sent to the byte.
    """
    layout = {"model_parallel": 4, "sequence_parallel": sequence}
    config = make(4, precision="bf16", train={"recompute": recompute}, parallel=layout)
    stage = make_plan(config).stages[0]
    assert dist.group.WORLD is not None
    with torch.device("meta"):
        model = GPT2(config.model, config.precision, config.vocab_rows)
    split_model(
        model,
        TensorGroup(group=dist.group.WORLD, rank=0, size=4, sequence=sequence),
        select_device("cpu"),
    )
    set_recompute(model, recompute)
    model.to_empty(device="cpu")
    ids = torch.zeros(3, 40, dtype=torch.int64)
    kept = kept_bytes(model, lambda: model.loss_sum(ids, ids))
    assert stage.memory.activations + stage.memory.loss == pytest.approx(kept, rel=0.1)
    with Messages(4) as messages:
        model.loss_sum(ids, ids).backward()
    # norms, biases of c_proj, positions: summed once a step
    whole = 4 * (6 * 4 * 48 + 2 * 48 + 40 * 48)
    planned = stage.traffic.sequence - 2 * 3 / 4 * whole if sequence else stage.traffic.tensor
    assert planned == pytest.approx(messages.sent, rel=1e-12)
