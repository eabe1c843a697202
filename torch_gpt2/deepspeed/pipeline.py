"""DeepSpeed's view of a layout: its grid of ranks, and its pipeline around a native stage."""

from __future__ import annotations

import contextlib
import importlib
import io
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from common.parallel.run import Run
from common.parallel.sharding import Role, role_of
from common.parallel.topology import GroupKind, Topology
from torch_gpt2.device import DTYPES
from torch_gpt2.model import GPT2
from torch_gpt2.parallel.data_parallel import sum_over
from torch_gpt2.parallel.world import World


def ranks_of(topology: Topology) -> Any:
    """Return the three axes as DeepSpeed's topology, which numbers the ranks as Topology does."""
    module = importlib.import_module("deepspeed.runtime.pipe.topology")
    return module.PipeModelDataParallelTopology(num_pp=topology.pipeline, num_mp=topology.tensor, num_dp=topology.data)


def grid_of(topology: Topology) -> Any:
    """Return DeepSpeed's ``mpu``: the groups of a run without a pipeline."""
    module = importlib.import_module("deepspeed.runtime.pipe.topology")
    with contextlib.redirect_stdout(io.StringIO()):
        return module.PipelineParallelGrid(topology=ranks_of(topology))


def mark_split(stage: GPT2, config: Run, world: World) -> None:
    """Tell DeepSpeed which parameters are split over the tensor-parallel ranks.

    Its norm counts the others only on the first of these ranks. With sequence parallelism, also sum
    the parts of their gradients, which DeepSpeed does not do.
    """

    def summed(gradient: Tensor) -> Tensor:
        total = gradient.to(DTYPES[config.precision.reduction], copy=True)
        sum_over(world.groups[GroupKind.TENSOR], [total])
        return total.to(gradient.dtype)

    for name, parameter in stage.named_parameters():
        replicated = role_of(name) is Role.REPLICATED
        parameter.tensor_model_parallel = not replicated  # type: ignore[attr-defined]
        if replicated and config.parallel.sequence_parallel:
            parameter.register_hook(summed)  # type: ignore[no-untyped-call]


def build_pipeline(deepspeed: Any, stage: GPT2, world: World, mean: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """Return DeepSpeed's PipelineModule, in which each native stage is one layer.

    The first and the last stage each hold the token table, whose gradients DeepSpeed adds up.
    mean: function of a micro batch's summed loss and its targets.
    """
    topology, place = world.topology, world.at.pipeline

    def mean_loss(hidden: Tensor, targets: Tensor) -> Tensor:
        return mean(stage.loss_of(hidden, targets), targets)

    with contextlib.redirect_stdout(io.StringIO()):
        pipeline = deepspeed.pipe.PipelineModule(
            layers=[stage if place == at else nn.Identity() for at in range(topology.pipeline)],
            topology=ranks_of(topology),
            loss_fn=mean_loss,
            partition_method="uniform",
            dynamic_shape=True,  # validation may have other shapes
        )
    if place in topology.embedding_places:
        stage.wte.weight.ds_pipe_replicated = place > 0  # type: ignore[attr-defined]
        pipeline.tied_modules["wte"] = stage.wte
        pipeline.tied_comms["wte"] = {
            "ranks": list(topology.group(GroupKind.EMBEDDING, world.rank)),
            "group": world.groups[GroupKind.EMBEDDING],
            "weight_attr": ["weight"],
            "module": stage.wte,
        }

        def tied() -> list[tuple[Any, Any]]:
            # DeepSpeed 0.19 sums ``grad`` over the two stages. By then ZeRO-1 with float16 has moved the gradient to
            # ``grad_accum``, so nothing would be summed.
            moved: Tensor | None = getattr(stage.wte.weight, "grad_accum", None)
            weight = stage.wte.weight if moved is None else SimpleNamespace(grad=moved)
            return [(weight, world.groups[GroupKind.EMBEDDING])]

        pipeline.get_tied_weights_and_groups = tied
    return pipeline


def give_tokens(stage: GPT2, waiting: deque[Tensor]) -> None:
    """Give the stage the ids of each micro batch beside its input.

    DeepSpeed sends a stage hidden states only. But every stage reads the batch, and all
    schedules go forward in the order of the micro batches. waiting: their ids, in this order.
    """

    def add(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return inputs, {**named, "tokens": waiting.popleft()}

    stage.register_forward_pre_hook(add, with_kwargs=True)
