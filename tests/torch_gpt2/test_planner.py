"""The planner against what torch really does: tensors kept for the backward pass, bytes of state,
bytes of messages counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.distributed._tools.mem_tracker import MemTracker  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from common.config.load import build_config  # noqa: E402
from common.config.schema import RunConfig  # noqa: E402
from common.parallel.sharding import local_shape  # noqa: E402
from common.parallel.topology import GroupKind, Topology  # noqa: E402
from common.planner.plan import make_plan  # noqa: E402
from common.resolve.derive import resolve_config  # noqa: E402
from torch_gpt2.compilation import compile_model  # noqa: E402
from torch_gpt2.device import select_device  # noqa: E402
from torch_gpt2.model import (  # noqa: E402
    GPT2,
    Linear,
    round_linear_layers,
    set_packing,
    set_recompute,
)
from torch_gpt2.parallel.data_parallel import DataParallel  # noqa: E402
from torch_gpt2.parallel.tensor_parallel import TensorGroup, split_model  # noqa: E402
from torch_gpt2.parallel.world import World  # noqa: E402
from torch_gpt2.parallel.zero import data_mesh, shard_model  # noqa: E402

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
    return sum(
        tensor.untyped_storage().nbytes()
        for storage, tensor in kept.items()
        if storage not in known
    )


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


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_activations_are_what_autograd_keeps(precision: str, recompute: str) -> None:
    """To the byte, where the issue asks for 10 %."""
    for micro_batch, heads in ((3, 4), (2, 3)):
        config = make(
            precision=PRECISIONS[precision],
            model={"num_heads": heads, "ffn_hidden_size": 160},
            train={"recompute": recompute, "micro_batch_size": micro_batch},
        )
        (stage,) = make_plan(config).stages
        assert stage.memory.activations + stage.memory.loss == saved_bytes(config)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_compiled_regions_keep_the_input_of_a_norm_in_the_type_of_the_computation(
    recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the byte, by the partitioner of torch's compiler; a device's kernels do not change it."""
    monkeypatch.setattr("common.resolve.compilation.MAX_LAYERS_IN_ONE_GRAPH", 1)
    monkeypatch.setattr("torch_gpt2.compilation.BACKEND", "aot_eager_decomp_partition")
    train = {"recompute": recompute, "compile": True, "accumulation_steps": 2}
    config = make(precision="bf16", train=train)
    (stage,) = make_plan(config).stages
    assert stage.memory.activations + stage.memory.loss == saved_bytes(config)
    (eager,) = make_plan(make(precision="bf16", train={**train, "compile": False})).stages
    assert stage.memory.activations < eager.memory.activations


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_activations_where_some_blocks_recompute(precision: str, recompute: str) -> None:
    found = []
    for layers in (1, 3, 4, None):
        train = {"recompute": recompute, "recompute_layers": layers}
        config = make(precision=PRECISIONS[precision], train=train)
        (stage,) = make_plan(config).stages
        found.append(stage.memory.activations + stage.memory.loss)
        assert found[-1] == saved_bytes(config)
    assert found[0] > found[1] > found[2] == found[3]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("precision", ["float32", "bf16", "half"])
def test_documents_kept_apart_keep_one_mask_for_all_blocks(precision: str, recompute: str) -> None:
    """To the byte, with the positions of each window."""
    data = {"reset_position_ids": True, "reset_attention_mask": True, "eod_id": 0}
    train = {"recompute": recompute}
    config = make(precision=PRECISIONS[precision], train=train, data=data)
    assert make_plan(config).stages[0].memory.activations == (
        saved_bytes(config) - make_plan(config).stages[0].memory.loss
    )
    plain = make(precision=PRECISIONS[precision], train=train)
    more = saved_bytes(config) - saved_bytes(plain)
    assert more == 3 * 40 * 40 * (4 if precision == "float32" else 2) + 8 * (3 - 1) * 40


def test_dropout_keeps_a_mask_for_each_branch() -> None:
    """On a CPU a mask has the type of what it multiplies, on accelerators a byte an element;
    attention's is not kept by fused kernels.
    """
    plain = {"embedding_dropout": 0.0, "attention_dropout": 0.0, "hidden_dropout": 0.0}
    for kind, masks in (("embedding_dropout", 1), ("hidden_dropout", 2 * 4)):
        config, without = make(model={**plain, kind: 0.1}), make(model=plain)
        on_cpu = saved_bytes(config) - saved_bytes(without)
        planned = (
            make_plan(config).stages[0].memory.activations
            - make_plan(without).stages[0].memory.activations
        )
        assert 4 * planned == on_cpu == 4 * masks * 3 * 40 * 48


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
    config = make(
        precision=precision,
        model={
            "num_layers": 2 if layers is None else 6,
            "hidden_size": 512,
            "seq_length": 512,
            "vocab_size": 50257 if layers is None else 1024,
        },
        train={
            "recompute_layers": layers,
            "micro_batch_size": tokens // 512,
            "accumulation_steps": micro_batches,
            "recompute": recompute,
        },
    )
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


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_activations_of_ranks_of_a_layout(precision: str, recompute: str, sequence: bool) -> None:
    """First and last of two stages of a tensor-parallel rank, played on one process: layers of its
    part of the width, and instead of messages the rank's own tensor, as often as there are ranks,
    or a slice.
    """
    ranks = 2
    config = make(
        4,
        precision=precision,
        model={"hidden_size": 48, "num_heads": 4, "dropout": 0.0},
        train={"recompute": recompute, "accumulation_steps": 2},
        parallel={
            "model_parallel": ranks,
            "pipeline_stage": 2,
            "pipeline_schedule": "gpipe",
            "sequence_parallel": sequence,
        },
    )
    plan = make_plan(config)
    model = GPT2(config.model, config.precision, config.vocab_rows)
    for block in model.h:
        block.attn.q_proj, block.attn.k_proj, block.attn.v_proj = (Linear(48, 24) for _ in range(3))
        block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj = (
            Linear(24, 48),
            Linear(48, 96),
            Linear(96, 48),
        )
    set_recompute(model, recompute)
    if config.rounds_weights_once:
        round_linear_layers(model)
    parts = ranks if sequence else 1

    def region(part: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = part(torch.cat([x] * parts, 1) if sequence else x)
        return out[:, : x.shape[1]]

    def run(block: Any, x: Tensor) -> Tensor:
        x = x + region(block.attn, block.ln_1(x))
        return x + region(block.mlp, block.ln_2(x))

    def stage(blocks: Any, x: Tensor) -> Tensor:
        for block in blocks:
            x = (
                checkpoint(run, block, x, use_reentrant=False)
                if recompute == "full"
                else run(block, x)
            )
        return x

    ids = torch.zeros(3, 40, dtype=torch.int64)
    sent = torch.zeros(3, 40 // parts, 48, dtype=model.compute_dtype, requires_grad=True)
    residual = sent.nbytes
    first = kept_bytes(
        model,
        lambda: stage(model.h[:2], model.embed(ids, torch.arange(40))[:, : 40 // parts].clone()),
    )
    last = kept_bytes(model, lambda: model.ln_f(stage(model.h[2:], sent)), (sent,))
    # of two micro batches at once: the first stage's output waits for its gradient, the last one's
    # input is what it received
    assert plan.stages[0].memory.activations == 2 * (first + residual)
    assert plan.stages[1].memory.activations == 2 * (last + residual)
    assert [stage.memory.communication for stage in plan.stages] == [residual, 0]


def modules_of(config: RunConfig, topology: Topology, place: int) -> nn.ParameterList:
    """Parameters of one rank on the meta device: those of the whole model, cut as the table of
    roles says, that belong here.
    """
    with torch.device("meta"):
        model = GPT2(config.model, config.precision, config.vocab_rows)
    model.to(getattr(torch, config.precision.parameters))
    layers, last = (
        topology.layers_of(place, config.model.num_layers),
        topology.place_of_stage(topology.stages - 1),
    )
    here = nn.ParameterList()
    for name, parameter in model.named_parameters():
        is_here = {
            "h": name.startswith("h.") and int(name.split(".")[1]) in layers,
            "wte": place in (0, last),
            "wpe": place == 0,
            "ln_f": place == last,
        }[name.split(".")[0]]
        if is_here:
            here.append(
                torch.empty(
                    local_shape(name, tuple(parameter.shape), topology.tensor),
                    dtype=parameter.dtype,
                    device="meta",
                )
            )
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
            held = sum(
                tensor.nbytes for state in theirs.state.values() for tensor in state.values()
            )
            if precision is HALF:
                held += sum(copy.nbytes for copy in copies)
            assert stage.memory.weights == sum(parameter.nbytes for parameter in parameters)
            assert stage.memory.gradients == sum(
                copy.grad.nbytes for copy in copies if copy.grad is not None
            )
            assert stage.memory.optimizer == held


class Messages(TorchDispatchMode):
    """Counts what collectives send, bytes by ring algorithms; ranks: of each group."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks, self.sent, self.calls = ranks, 0.0, list[tuple[str, int]]()

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = str(operator)
        if "c10d" in name and "wait_tensor" not in name and "wrap_tensor" not in name:
            tensors = [
                tensor
                for arg in args
                for tensor in (arg if isinstance(arg, list | tuple) else [arg])
                if isinstance(tensor, Tensor)
            ]
            # which is given a part, not the whole
            gathers = self.ranks if name.startswith("_c10d_functional.all_gather") else 1
            size = gathers * max(tensor.nbytes for tensor in tensors)
            self.calls.append((name.split(".")[1].strip("_"), size))
            self.sent += (
                size
                * (self.ranks - 1)
                / self.ranks
                * (2 if "allreduce" in name or "all_reduce" in name else 1)
            )
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
        names = [name.partition(".")[0].lstrip("_") for name, _ in messages.calls]
        gathers = sum("all_gather" in name or "allgather" in name for name in names)
        assert gathers == ((1 + 2 * 4) * micro_batches if zero == 3 else 1 + 4)
        assert sum("allreduce" in name for name in names) == (0 if shards == 4 else 1 + 4)
        assert stage.memory.weights == sum(
            parameter.to_local().nbytes for parameter in model.parameters()
        )
        gradients = sum(parameter.grad.to_local().nbytes for parameter in model.parameters())
        if zero > 1 or micro_batches == 1:
            assert stage.memory.gradients == gradients
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        optimizer.step()
        state = [
            value.to_local() if hasattr(value, "to_local") else value
            for s in optimizer.state.values()
            for value in s.values()
        ]
        assert stage.memory.optimizer == sum(tensor.nbytes for tensor in state)
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


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sequence", [False, True])
def test_tensor_parallel_messages_are_megatrons(
    sequence: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A region of Megatron's layers, its embedding and its cross-entropy, counted call by call."""
    layers = pytest.importorskip(
        "megatron.core.tensor_parallel.layers", reason="megatron-core is not installed"
    )
    from megatron.core import parallel_state
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=4, create_gloo_process_groups=False
    )
    config = make(4, parallel={"model_parallel": 4, "sequence_parallel": sequence})
    hidden, length, batch = 48, 40, 3
    theirs = ModelParallelConfig(
        tensor_model_parallel_size=4, sequence_parallel=sequence, use_cpu_initialization=True
    )
    options = {"config": theirs, "init_method": nn.init.normal_, "bias": True}
    try:
        column = layers.ColumnParallelLinear(hidden, 4 * hidden, gather_output=False, **options)
        row = layers.RowParallelLinear(
            4 * hidden, hidden, input_is_parallel=True, skip_bias_add=False, **options
        )
        embedding = layers.VocabParallelEmbedding(
            1024,
            hidden,
            init_method=nn.init.normal_,
            config=ModelParallelConfig(tensor_model_parallel_size=4, use_cpu_initialization=True),
        )
        x = torch.randn(length // (4 if sequence else 1), batch, hidden, requires_grad=True)
        with Messages(4) as region:
            row(column(x)[0])[0].sum().backward()
        with Messages(4) as ends:
            embedding(torch.zeros(batch, length, dtype=torch.int64))
            vocab_parallel_cross_entropy(
                torch.randn(length, batch, 256), torch.zeros(length, batch, dtype=torch.int64)
            )
    finally:
        parallel_state.destroy_model_parallel()
    activation = batch * length * hidden * 4
    # Megatron gathers a region's input once more for its backward pass, where we keep it
    again = activation * 3 / 4 if sequence else 0
    assert {size for _, size in region.calls} == {activation}
    into_head = 2 * activation * 3 / 4  # the gradient of the hidden states
    planned = 2 * config.model.num_layers * (region.sent - again) + ends.sent + into_head
    (stage,) = make_plan(config).stages
    if sequence:
        # norms, biases of c_proj, positions
        whole = 4 * (6 * 4 * hidden + 2 * hidden + length * hidden)
        assert stage.traffic.sequence == pytest.approx(planned + 2 * 3 / 4 * whole, rel=1e-12)
    else:
        assert stage.traffic.tensor == pytest.approx(planned, rel=1e-12)
