"""Record of a step for tools/compare_runs.py --layers, by hooks on the Cells.

Hooks run in PyNative mode, where Python computes every layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn

from common.errors import ConfigError
from common.training.recording import LAST_NORM, VARIABLE, Array, RecorderBase
from mindformers_gpt2.checkpoint import weights_on_host
from mindformers_gpt2.model import GPT2, LayerNorm


class Recorder(RecorderBase):
    """Hooks of one step. Outside of it the model is as it was."""

    pieces_on_host = staticmethod(weights_on_host)

    def __init__(self, *given: Any) -> None:
        """Raises ConfigError outside of PyNative mode."""
        if ms.get_context("mode") != ms.PYNATIVE_MODE:
            raise ConfigError(
                f"{VARIABLE}: a step can be recorded with context.mode=pynative, where Python"
                " computes every layer; set it"
            )
        super().__init__(*given)

    def layers(self, part: GPT2) -> Iterator[tuple[str, nn.Cell]]:
        for block in part.h:  # parameters keep the number of the layer in the whole model
            yield block.ln_1.weight.name.removesuffix(".ln_1.weight"), block
        if isinstance(part.ln_f, LayerNorm):
            yield LAST_NORM, part.ln_f

    @staticmethod
    def on_host(values: Tensor) -> Array:
        found: Array = values.astype(ms.float32).asnumpy()
        return found
