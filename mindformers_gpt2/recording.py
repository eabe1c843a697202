"""Record of a step for tools/compare_runs.py --layers, by hooks on the Cells.

Hooks run in PyNative mode, where Python computes every layer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor

from common.errors import ConfigError
from common.parallel.run import Run
from common.training.recording import (
    EMBEDDINGS,
    LAST_NORM,
    PARTS,
    VARIABLE,
    Array,
    RecorderBase,
    StepRecord,
    find_request,
)
from mindformers_gpt2.checkpoint import Pieces, weights_on_host
from mindformers_gpt2.model import GPT2, LayerNorm
from mindformers_gpt2.parallel.world import World


class Recorder(RecorderBase):
    """Hooks of one step. Outside of it the model is as it was."""

    def begin(self, tokens: Any, parts: Sequence[GPT2], scale: float) -> None:
        """Watch the parts of the model during the step. scale: the loss scale."""
        self.start(tokens, scale)
        for part in parts:
            for block in part.h:
                # parameters keep the number of the layer in the whole model
                name = block.ln_1.weight.name.removesuffix(".ln_1.weight")
                if name == "h.0":
                    take = self.hook_for(EMBEDDINGS)
                    self.hooks.append(
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
        held, slopes = (weights_on_host(each, pieces) for each in (weights, gradients))
        self.finish(float(loss.asnumpy()), held, slopes, pieces)

    def _watch(self, cell: Any, name: str) -> None:
        take = self.hook_for(name)

        def hook(_: Any, given: Any, output: Any) -> None:
            take(output[0] if isinstance(output, tuple) else output)

        self.hooks.append(cell.register_forward_hook(hook))

    def on_host(self, values: Tensor) -> Array:
        found: Array = values.astype(ms.float32).asnumpy()
        return found


def open_recorder(config: Run, world: World) -> Recorder | None:
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
