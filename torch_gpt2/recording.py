"""Record of a step for tools/compare_runs.py --layers, by hooks on the modules."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from common.parallel.run import Run
from common.training.recording import (
    EMBEDDINGS,
    LAST_NORM,
    PARTS,
    Array,
    RecorderBase,
    StepRecord,
    find_request,
)
from torch_gpt2.checkpoint import Pieces, weights_on_host
from torch_gpt2.model import GPT2
from torch_gpt2.parallel.world import World


class Recorder(RecorderBase):
    """Hooks of one step. Outside of it the model is as it was."""

    def begin(self, tokens: Any, parts: Sequence[GPT2], scale: float) -> None:
        """Watch the parts of the model during the step. scale: the loss scale."""
        self.start(tokens, scale)
        for part in parts:
            for name, block in part.h.named_children():
                if name == "0":
                    hook = self.hook_for(EMBEDDINGS)
                    self.hooks.append(
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
        held, slopes = (weights_on_host(each, pieces) for each in (weights, gradients))
        self.finish(loss.item(), held, slopes, pieces)

    def _watch(self, module: nn.Module, name: str) -> None:
        hook = self.hook_for(name)
        self.hooks.append(module.register_forward_hook(lambda _, given, output: hook(output)))

    def on_host(self, values: Tensor) -> Array:
        found: Array = values.detach().to("cpu", torch.float32).numpy()
        return found


def open_recorder(config: Run, world: World) -> Recorder | None:
    """Return the recorder that the environment asks for. Raises ConfigError."""
    request = find_request(os.environ)
    if request is None:
        return None
    return Recorder(StepRecord(request, config, world.topology, world.rank))
