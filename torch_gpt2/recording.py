"""Record of a step for tools/compare_runs.py --layers, by hooks on the modules."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from common.parallel.resolved_run import TrainingRun
from common.training.recording import (
    BACKWARD,
    EMBEDDINGS,
    FORWARD,
    GRADIENTS,
    LAST_NORM,
    PARTS,
    WEIGHTS,
    StepRecord,
    find_request,
)
from torch_gpt2.checkpoint import Pieces, weights_on_host
from torch_gpt2.model import GPT2
from torch_gpt2.parallel.world import World


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
            for name, block in part.h.named_children():
                if name == "0":
                    hook = self._hook(EMBEDDINGS)
                    self._hooks.append(
                        block.register_forward_pre_hook(lambda _, given, hook=hook: hook(given[0]))
                    )
                for inner in PARTS:
                    self._watch(block.get_submodule(inner), f"h.{name}.{inner}")
                self._watch(block, f"h.{name}")
            if not isinstance(part.ln_f, nn.Identity):
                self._watch(part.ln_f, LAST_NORM)

    def end(
        self,
        loss: Tensor,
        weights: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        pieces: Pieces,
    ) -> None:
        """Write the record, before the update. pieces: those that this rank writes."""
        for hook in self._hooks:
            hook.remove()
        found = weights_on_host(gradients, pieces)
        scaled = {name: values / self._scale for name, values in found.items()}
        self._record.take_parameters(GRADIENTS, scaled, pieces)
        self._record.take_parameters(WEIGHTS, weights_on_host(weights, pieces), pieces)
        self._record.write(loss.item())

    def _watch(self, module: nn.Module, name: str) -> None:
        hook = self._hook(name)
        self._hooks.append(module.register_forward_hook(lambda _, given, output: hook(output)))

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        """Return a function that takes an activation of the micro batch under way."""

        def take(values: Tensor, section: str, number: int) -> None:
            factor = 1.0 if section == FORWARD else 1.0 / self._scale
            self._record.take_activation(
                section,
                name,
                number,
                values.shape,
                lambda row: (values[row].detach().to("cpu", torch.float32) * factor).numpy(),
            )

        def hook(output: Tensor) -> None:
            number = self._micro_batch
            if number is not None:
                take(output, FORWARD, number)
                output.register_hook(  # type: ignore[no-untyped-call]
                    lambda gradient: take(gradient, BACKWARD, number)
                )

        return hook


def open_recorder(config: TrainingRun, world: World) -> Recorder | None:
    """Return the recorder that the environment asks for. Raises ConfigError."""
    request = find_request(os.environ)
    if request is None:
        return None
    return Recorder(StepRecord(request, config, world.topology, world.rank))
