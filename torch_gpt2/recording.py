"""Record of a step for tools/compare_runs.py --layers, by hooks on the modules."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from common.training.recording import LAST_NORM, Array, RecorderBase
from torch_gpt2.checkpoint import weights_on_host
from torch_gpt2.model import GPT2


class Recorder(RecorderBase):
    """Hooks of one step. Outside of it the model is as it was."""

    pieces_on_host = staticmethod(weights_on_host)

    def layers(self, part: GPT2) -> Iterator[tuple[str, nn.Module]]:
        yield from ((f"h.{name}", block) for name, block in part.h.named_children())
        if not isinstance(part.ln_f, nn.Identity):
            yield LAST_NORM, part.ln_f

    @staticmethod
    def on_host(values: Tensor) -> Array:
        found: Array = values.detach().to("cpu", torch.float32).numpy()
        return found
