"""Pipeline parallel: the layers of a stage, and the order of the micro batches (GPipe, 1F1B).

Stages are compiled, and the host sends and receives between them. A stage keeps only the input of a
micro batch, and repeats the forward pass for the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops

from common.parallel.pipeline import Pass, order_of_rank
from common.parallel.run import Run
from common.parallel.topology import GroupKind, Topology
from mindformers_gpt2.device import MindSporeDevice
from mindformers_gpt2.model import GPT2
from mindformers_gpt2.optimizer import DeviceLossScale, LossGradients, StageGradients, add_gradients
from mindformers_gpt2.parallel.collectives import receive, send
from mindformers_gpt2.parallel.world import World
from mindformers_gpt2.quantize import forget_maxima

Keys = tuple[Tensor, ...]
"""Keys of the dropouts of a micro batch on this stage; empty without dropout."""


def keep_stage(model: GPT2, stage: int, topology: Topology) -> None:
    """Reduce a model to the layers of one stage, under their names in the whole model.

    It takes hidden states unless it has the embedding, and returns hidden states unless it has the head. Graph mode
    compiles the methods of a class, so a later stage gets a class with another ``begin``.
    """
    names = {parameter.name: parameter for parameter in model.get_parameters()}
    model.h = nn.CellList([model.h[layer] for layer in topology.layers_of_stage(stage, model.config.num_layers)])
    for name, parameter in names.items():  # the list has renumbered the layers
        parameter.name = name
    first, last = stage == 0, stage == topology.stages - 1
    if not first:
        del model.wpe
        model.__class__ = _LaterStage
    if not last:
        model.ln_f = _Unchanged()
    if not first and not last:
        del model.wte


class _LaterStage(GPT2):
    def begin(self, ids: Tensor, keys: Tensor = None, tokens: Tensor = None) -> Tensor:
        return ids


class _Unchanged(nn.Cell):
    def construct(self, x: Tensor) -> Tensor:
        return x


class Pipeline:
    """Stage of this rank, and the schedule of a step.

    All pipeline ranks pass the same batch to ``step`` and ``evaluate``.
    """

    def __init__(
        self, model: GPT2, config: Run, world: World, device: MindSporeDevice, loss_scale: DeviceLossScale
    ) -> None:
        line, place = list(world.topology.group(GroupKind.PIPELINE, world.rank)), world.at.pipeline
        self._before = line[place - 1] if place > 0 else None
        self._after = line[place + 1] if place + 1 < len(line) else None
        self._width, self._dtype = config.model.hidden_size, model.compute_dtype
        self._order_of = lru_cache(maxsize=1)(
            partial(order_of_rank, config.parallel.pipeline_schedule, world.topology, place)
        )
        of_input = self._before is not None
        self._model = model
        self._forward = device.compile(model)
        self._loss_sum = device.compile(model.loss_sum) if self._after is None else None
        self.loss_gradients = (
            LossGradients(model, config, loss_scale, of_input=of_input) if self._after is None else None
        )
        self._gradients = device.compile(self.loss_gradients or StageGradients(model, config, of_input=of_input))
        self._add = device.compile(add_gradients)
        self._meet = world.meet
        self._new = True
        packing = config.packing
        self._separates = packing is not None and packing.separates
        self._evaluated: set[tuple[int, ...]] = set()

    def step(
        self, batch: list[tuple[Tensor, Tensor]], keys: Callable[[int], Keys], watch: Callable[[int | None], None]
    ) -> tuple[Tensor, ...]:
        """Return the loss (0 without the head) and the gradients of this stage's weights.

        Both are summed over the micro batches (ids, targets). watch: called around the gradients of
        each, with its number and then with None.
        """
        if self._new:
            self._compile(*batch[0], keys(0))
            self._new = False
        inputs: dict[int, Tensor] = {}
        on_their_way: list[Any] = []
        summed: tuple[Tensor, ...] | None = None
        for action in self._order_of(len(batch)):
            number = action.micro_batch
            ids, targets = batch[number]
            if action.what is Pass.FORWARD:
                inputs[number] = ids if self._before is None else self._receive(ids, self._before)
                if self._after is not None:
                    more = self._more(keys(number), ids)
                    on_their_way.append(send(self._forward(inputs[number], *more), self._after))
                continue
            slope = targets if self._after is None else self._receive(ids, self._after)
            more = self._more(keys(number), ids)
            watch(number)
            found = list(self._gradients(inputs.pop(number), slope, *more))
            watch(None)
            if self._before is not None:
                on_their_way.append(send(found.pop(0 if self._after is not None else 1), self._before))
            summed = tuple(found) if summed is None else self._add(*summed, *found)
        for message in on_their_way:
            message.wait()
        assert summed is not None
        return summed if self._after is None else (Tensor(0.0, ms.float32), *summed)

    def evaluate(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the losses of one batch of any size, 0 without the head."""
        more = self._more((), ids)
        if ids.shape not in self._evaluated:  # compile before the first message
            x = ids if self._before is None else ops.zeros((*ids.shape, self._width), self._dtype)
            _ = self._forward(x, *more) if self._loss_sum is None else self._loss_sum(x, targets, *more)
            forget_maxima(self._model)
            self._evaluated.add(ids.shape)
        x = ids if self._before is None else self._receive(ids, self._before)
        if self._loss_sum is not None:
            loss: Tensor = self._loss_sum(x, targets, *more)
            return loss
        assert self._after is not None
        send(self._forward(x, *more), self._after).wait()
        return Tensor(0.0, ms.float32)

    def _compile(self, ids: Tensor, targets: Tensor, keys: Keys) -> None:
        """Compile all stages at once, before the first message.

        A rank that waits for a message may give up after half a minute.
        """
        hidden = ops.zeros((*ids.shape, self._width), self._dtype)
        x, more = ids if self._before is None else hidden, self._more(keys, ids)
        if self._after is not None:
            self._forward(x, *more)
        self._gradients(x, targets if self._after is None else hidden, *more)
        forget_maxima(self._model)
        self._meet()

    def _more(self, keys: Keys, ids: Tensor) -> tuple[Any, ...]:
        """Return what a stage gets beside its input: dropout keys, and the ids if it keeps documents apart."""
        return (*(keys or (None,)), ids) if self._separates else keys

    def _receive(self, ids: Tensor, rank: int) -> Tensor:
        """Return the hidden states of these ids, or their gradient."""
        return receive((*ids.shape, self._width), self._dtype, rank)
