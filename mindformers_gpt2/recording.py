"""Record of a step for tools/compare_runs.py --layers, by hooks on the Cells.

Hooks run in PyNative mode, where Python computes every layer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor

from common.errors import ConfigError
from common.parallel.resolved_run import TrainingRun
from common.training.recording import (
    BACKWARD,
    EMBEDDINGS,
    FORWARD,
    GRADIENTS,
    LAST_NORM,
    PARTS,
    VARIABLE,
    WEIGHTS,
    StepRecord,
    find_request,
)
from mindformers_gpt2.checkpoint import Pieces, weights_on_host
from mindformers_gpt2.model import GPT2, LayerNorm
from mindformers_gpt2.parallel.world import World


class Recorder:
    """Hooks of one step. Outside of it the model is as it was."""

    def __init__(self, record: StepRecord) -> None:
        self.step = record.step
        self._record = record
        self._scale = 1.0
        self._hooks: list[Any] = []
        self._micro_batch: int | None = None

    def watch(self, micro_batch: int | None) -> None:
        """Take the activations of what is computed next; None takes nothing."""
        self._micro_batch = micro_batch

    def begin(self, tokens: Any, parts: Sequence[GPT2], scale: float) -> None:
        """Watch the parts of the model during the step. scale: the loss scale."""
        self._record.take_tokens(tokens)
        self._scale = scale
        for part in parts:
            for block in part.h:
                # parameters keep the number of the layer in the whole model
                name = block.ln_1.weight.name.removesuffix(".ln_1.weight")
                if name == "h.0":
                    take = self._hook(EMBEDDINGS)
                    self._hooks.append(
                        block.register_forward_pre_hook(lambda _, given, take=take: take(given[0]))
                    )
                for inner in PARTS:
                    self._watch(getattr(block, inner), f"{name}.{inner}")
                self._watch(block, name)
            if isinstance(part.ln_f, LayerNorm):
                self._watch(part.ln_f, LAST_NORM)

    def end(
        self,
        loss: Tensor,
        weights: Mapping[str, Parameter],
        gradients: Mapping[str, Tensor],
        pieces: Pieces,
    ) -> None:
        """Write the record, before the update. pieces: those that this rank writes."""
        for hook in self._hooks:
            hook.remove()
        found = weights_on_host(gradients, pieces)
        scaled = {name: values / np.float32(self._scale) for name, values in found.items()}
        self._record.take_parameters(GRADIENTS, scaled, pieces)
        self._record.take_parameters(WEIGHTS, weights_on_host(weights, pieces), pieces)
        self._record.write(float(loss.asnumpy()))

    def _watch(self, cell: Any, name: str) -> None:
        take = self._hook(name)

        def hook(_: Any, given: Any, output: Any) -> None:
            take(output[0] if isinstance(output, tuple) else output)

        self._hooks.append(cell.register_forward_hook(hook))

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        """Return a function that takes an activation of the micro batch under way."""

        def take(values: Tensor, section: str, number: int) -> None:
            factor = np.float32(1.0 if section == FORWARD else 1.0 / self._scale)
            self._record.take_activation(
                section,
                name,
                number,
                values.shape,
                lambda row: values[row].astype(ms.float32).asnumpy() * factor,
            )

        def hook(output: Tensor) -> None:
            number = self._micro_batch
            if number is not None:
                take(output, FORWARD, number)
                output.register_hook(lambda gradient: take(gradient, BACKWARD, number))

        return hook


def open_recorder(config: TrainingRun, world: World) -> Recorder | None:
    """Return the recorder that the environment asks for. Raises ConfigError."""
    request = find_request(os.environ)
    if request is None:
        return None
    if ms.get_context("mode") != ms.PYNATIVE_MODE:
        raise ConfigError(
            f"{VARIABLE}: a step can be recorded with context.mode=pynative, where Python computes"
            " every layer; set it"
        )
    return Recorder(StepRecord(request, config, world.topology, world.rank))
