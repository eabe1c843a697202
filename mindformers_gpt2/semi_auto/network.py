"""Training step as one graph that MindSpore's compiler splits over Ascends.

The plan is common/parallel/operator_plan.py. The model's layers are used unchanged: strategies, stages, recomputation
and fusion are applied from outside. This is written from MindSpore's documentation and compared with its compiler's
front end (tests/mindformers_gpt2/front_end). It has not been run on an Ascend.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from common.parallel.operator_plan import (
    copies_of,
    fusion_of,
    operator_strategies,
    splits_state,
    stage_of,
    stages_of_parameter,
)
from common.parallel.run import Run
from mindformers_gpt2.device import MindSporeDevice
from mindformers_gpt2.model import GPT2, set_fused_attention, takes_fused_attention
from mindformers_gpt2.optimizer import DeviceLossScale, MasterWeights, Optimizer, squares

# Added to the logits of the rows that pad the vocabulary. Finite, because -inf times a zero of a one-hot row is NaN.
_NEVER = -1e30


class SplitDropout(nn.Cell):
    """MindSpore's own dropout. Its masks are equal on ranks that hold the same data, else different.

    Its generator belongs to the device and is not in a checkpoint, so a resumed run draws other masks.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.native = ops.Dropout(keep_prob=1.0 - rate)

    def construct(self, x: Tensor, key: Any) -> Tensor:
        """Apply the dropout. key: None drops nothing."""
        if key is None or self.rate == 0.0:
            return x
        return self.native(x)[0]


class TokenEmbedding(nn.Cell):
    """Map token ids (B, T) to the input of the first block, (B T, C)."""

    def __init__(self, model: GPT2) -> None:
        super().__init__(auto_prefix=False)
        self.wte, self.wpe, self.dropout = model.wte, model.wpe, model.dropout
        self.positions = Tensor(np.arange(model.config.seq_length), ms.int32)
        self.add = ops.Add()
        self.compute_dtype, self.size = model.compute_dtype, model.config.hidden_size

    def construct(self, ids: Tensor, key: Any) -> Tensor:
        # Do not call the two as cells: they would become separate graphs. The compiler looks for
        # the first stage's parameters in this graph.
        x = self.add(self.wte.gather(self.wte.weight, ids, 0), self.wpe.gather(self.wpe.weight, self.positions, 0))
        return self.dropout(ops.cast(x, self.compute_dtype).reshape((-1, self.size)), key)


class SplitLoss(nn.Cell):
    """Sum of the cross-entropy in operators that the compiler can split by rows and by columns."""

    def __init__(self, vocab_size: int, vocab_rows: int) -> None:
        super().__init__()
        self.vocab_rows = vocab_rows
        self.padding = Tensor(np.where(np.arange(vocab_rows) < vocab_size, 0.0, _NEVER), ms.float32)
        self.one, self.zero = Tensor(1.0, ms.float32), Tensor(0.0, ms.float32)
        self.mask, self.subtract, self.multiply, self.difference = (ops.Add(), ops.Sub(), ops.Mul(), ops.Sub())
        self.largest = ops.ReduceMax(keep_dims=True)
        self.exp, self.log, self.one_hot = ops.Exp(), ops.Log(), ops.OneHot()
        self.sum, self.total = ops.ReduceSum(), ops.ReduceSum()

    def construct(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the summed loss in nats, a float32 scalar.

        logits: (N, vocab_rows) float32. targets: (N,) int32.
        """
        logits = self.mask(logits, self.padding)
        logits = self.subtract(logits, ops.stop_gradient(self.largest(logits, 1)))
        log_sum = self.log(self.sum(self.exp(logits), 1))
        picked = self.sum(self.multiply(logits, self.one_hot(targets, self.vocab_rows, self.one, self.zero)), 1)
        return self.total(self.difference(log_sum, picked), 0)


class LossHead(nn.Cell):
    """Final layer norm, tied head and loss: a micro batch's part of the global batch's mean loss."""

    def __init__(self, model: GPT2, vocab_rows: int, predicted: int) -> None:
        super().__init__(auto_prefix=False)
        self.ln_f = model.ln_f
        self.loss = SplitLoss(model.config.vocab_size, vocab_rows)
        self.matmul, self.divide = ops.MatMul(transpose_b=True), ops.RealDiv()
        self.predicted = Tensor(predicted, ms.float32)

    def construct(self, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        hidden = self.ln_f(x)
        logits = ops.cast(self.matmul(hidden, ops.cast(weight, hidden.dtype)), ms.float32)
        return self.divide(self.loss(logits, targets.reshape((-1,))), self.predicted)


class TrainingGraph(nn.Cell):
    """Map (ids, targets), (B, T) int32 each, to their part of the mean loss of the global batch.

    The batch is that of all data-parallel ranks.
    """

    def __init__(self, model: GPT2, config: Run) -> None:
        super().__init__(auto_prefix=False)
        sizes = config.model
        length = sizes.seq_length
        self.drops = any((sizes.embedding_dropout, sizes.attention_dropout, sizes.hidden_dropout))
        self.embed = TokenEmbedding(model)
        self.h = model.h
        self.wte = model.wte
        self.head = LossHead(model, model.wte.weight.shape[0], config.train.global_batch_size * length)
        self.mask = Tensor(np.triu(np.full((length, length), -np.inf), 1), model.softmax_dtype)

    def construct(self, ids: Tensor, targets: Tensor) -> Tensor:
        # a SplitDropout asks only whether there is one
        key = (True, True, True) if self.drops and self.training else None
        x = self.embed(ids, None if key is None else key[0])
        for block in self.h:
            x, _, _ = block(x, self.mask, key)
        return self.head(x, self.wte.weight, targets)


def _primitives(network: TrainingGraph, name: str) -> Iterator[Any]:
    """Yield the operators for a name of the plan."""
    if name.startswith("h.*."):
        for block in network.h:
            yield _find(block, name.removeprefix("h.*."))
        return
    first, _, rest = name.partition(".")
    cells = {"wte": network.wte, "wpe": network.embed.wpe, "embed": network.embed, "ln_f": network.head.ln_f}
    yield _find(cells.get(first, network.head), rest if first in cells else name.removeprefix("head."))


def _find(cell: nn.Cell, path: str) -> Any:
    found: Any = cell
    for part in path.split("."):
        found = getattr(found, part)
    return found.native if isinstance(found, nn.Cell) else found


def build_network(config: Run, device: MindSporeDevice) -> TrainingGraph:
    """Return the model with its plan, without weights.

    Call it within the context of ``semi_auto_settings``; otherwise the parameters are created whole. Parameters are
    float32 whatever ``precision.parameters`` says. Operators round their inputs to the type of the computation, like
    the rounded copies on one device. The compiler also communicates in that type.
    """
    model = GPT2(config.model, config.precision, config.vocab_rows, native=True)
    for cell in (model, *model.h, *(block.attn.core for block in model.h)):
        cell.dropout = SplitDropout(cell.dropout.rate)
        cell.dropout.native.recompute(False)  # recomputation would draw another mask
    set_fused_attention(model, config, device)
    network = TrainingGraph(model, config)
    parallel = config.parallel
    if parallel.parallel_mode != "auto_parallel" or parallel.search_mode in (None, "sharding_propagation"):
        plan = operator_strategies(config, fused=takes_fused_attention(config, device))
        for name, strategy in plan.items():
            for primitive in _primitives(network, name):
                primitive.shard(*strategy)
    if parallel.pipeline_stage > 1:
        network.embed.pipeline_stage, network.head.pipeline_stage = 0, config.topology.stages - 1
        for layer, block in enumerate(network.h):
            block.pipeline_stage = stage_of(layer, config)
    for layer, block in enumerate(network.h):  # gradients that travel together
        block.set_comm_fusion(fusion_of(layer, config))
    for parameter in network.get_parameters():  # whether ZeRO splits it
        parameter.parallel_optimizer = splits_state(parameter.name, config)
    _set_recompute(network, config)
    return network


def _set_recompute(network: TrainingGraph, config: Run) -> None:
    train = config.train
    switches = {
        "mp_comm_recompute": train.mp_comm_recompute,
        "recompute_slice_activation": train.recompute_slice_activation,
    }
    topology, layers = config.topology, config.model.num_layers
    chosen = [
        layer
        for stage in range(topology.stages)
        for layer in topology.layers_of_stage(stage, layers)[: train.recompute_layers]
    ]
    for block in (network.h[layer] for layer in chosen):
        if train.recompute == "selective":
            block.attn.core.recompute(**switches)
            block.mlp.gelu.recompute(**switches)
        elif train.recompute == "full" and not config.model.hidden_dropout:
            block.recompute(**switches)
        elif train.recompute == "full":
            # Leave out the dropouts in between: where an activation is whole on several ranks the
            # compiler puts operators of its own in their place, and would draw their masks again.
            for cell in (block.ln_1, block.attn, block.ln_2, block.mlp):
                cell.recompute(**switches)


class SplitMaster(MasterWeights):
    """Optimizer whose moments are clones of the parameters, so that the compiler splits both alike."""

    def zeros_like(self, tensor: Parameter, name: str, shape: tuple[int, ...] | None = None) -> Parameter:
        assert shape is None
        copy: Parameter = tensor.clone(init="zeros")
        copy.name, copy.requires_grad = name, False
        return copy


class GradientNorm(nn.Cell):
    """Norm and loss of all ranks, computed from this rank's part.

    The compiler does not split an update's operators, so they see a rank's part. Squares are
    divided by the number of ranks that hold the same part, and then summed over all. The last stage
    knows the loss.
    Both travel in one message, which waits for the gradients. With two messages, a rank could send
    either first. A stage without a loss would then send it before the hidden states that the last
    stage waits for.
    """

    def __init__(self, names: list[str], config: Run, rank: int) -> None:
        super().__init__(auto_prefix=False)
        topology = config.topology
        self.shares = tuple(1.0 / copies_of(name, config) for name in names)
        self.has_loss = topology.holds_head(rank)
        self.loss_share = 1.0 / (topology.data * topology.tensor)
        self.all_reduce = ops.AllReduce()

    def construct(self, loss: Tensor, gradients: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        total = Tensor(0.0, ms.float32)
        for index, gradient in enumerate(gradients):
            total = total + squares(gradient) * self.shares[index]
        part = loss * self.loss_share if self.has_loss else ops.zeros_like(total)
        both = self.all_reduce(ops.stack((part, total)))
        return both[0], ops.sqrt(both[1]), gradients


class TrainingStep(nn.Cell):
    """Whole step: micro batches, gradients and update. Made within the context of ``semi_auto_settings`` too."""

    def __init__(self, network: TrainingGraph, config: Run, rank: int) -> None:
        super().__init__(auto_prefix=False)
        self.loss_scale = DeviceLossScale(config.loss_scale)
        self.scale = self.loss_scale.value
        stage = config.topology.coordinates(rank).pipeline
        parameters = list(network.get_parameters())
        stages = {parameter.name: stages_of_parameter(parameter.name, config) for parameter in parameters}
        own = {parameter.name: parameter for parameter in parameters if stages[parameter.name][0] == stage}
        self.own = tuple(index for index, parameter in enumerate(parameters) if parameter.name in own)
        self.sent = tuple(index for index, parameter in enumerate(parameters) if stage in stages[parameter.name][1:])
        self.master = SplitMaster(own)
        norm = GradientNorm(list(own), config, rank)
        self.optimizer = Optimizer(self.master, config.optimizer, self.loss_scale, norm, rates=config.train.sink_size)
        self.limits = Parameter(Tensor((0.0, 0.0), ms.float32), name="limits", requires_grad=False)
        whole, accumulation = network, config.train.accumulation_steps
        if config.parallel.micro_batch_interleave_num > 1:
            whole = nn.MicroBatchInterleaved(whole, config.parallel.micro_batch_interleave_num)
        if config.parallel.pipeline_stage > 1:
            whole = nn.PipelineCell(whole, accumulation)
        elif accumulation > 1:
            whole = nn.GradAccumulationCell(whole, accumulation)
        self.network: nn.Cell = whole
        # parameters of all stages, from which each rank's compiler takes its own
        self.weights = ParameterTuple(parameters)
        self.grad = ops.GradOperation(get_by_list=True, sens_param=True)
        self.accumulates = accumulation > 1
        self.is_sharded = config.parallel.zero_stage > 0
        self.sums = self.weights.clone(prefix="accu_grads", init="zeros") if self.accumulates else ()
        self.set_train()

    def construct(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        limits = self.limits * 1.0
        loss = self.network(ids, targets)
        slope = ops.ones_like(loss) * ops.cast(self.scale, loss.dtype)
        gradients = self.grad(self.network, self.weights)(ids, targets, slope)
        # the stage that holds it waits for this gradient, which is sent only if something depends on it
        for index in self.sent:
            loss = ops.depend(loss, gradients[index])
        found: tuple[Tensor, ...] = ()
        for index in self.own:
            gradient = gradients[index]
            found = (*found, _take(self.is_sharded, gradient, self.sums[index]) if self.accumulates else gradient)
        result: tuple[Tensor, Tensor, Tensor, Tensor] = self.optimizer(limits, loss, *found)
        return result


def _take(is_sharded: bool, gradient: Tensor, total: Parameter) -> Tensor:
    """Return a parameter's gradient over all micro batches, and set the sum to zero for the next step.

    The compiler adds to the sums and communicates them at the end. With a split optimizer the result is the gradient
    itself, otherwise the sum.
    """
    total = ops.depend(total, gradient)
    found = gradient * 1.0 if is_sharded else total * 1.0
    return ops.depend(found, ops.assign(ops.depend(total, found), ops.zeros_like(total)))
