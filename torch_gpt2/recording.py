"""Record of a step for tools/compare_runs.py --layers, by hooks on the modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from common.training.recording import LAST_NORM, Array, RecorderBase
from torch_gpt2.checkpoint import Pieces, weights_on_host
from torch_gpt2.model import GPT2


class Recorder(RecorderBase):
    """Hooks of one step. Outside of it the model is as it was."""

    def layers(self, part: GPT2) -> Iterator[tuple[str, nn.Module]]:
        yield from ((f"h.{name}", block) for name, block in part.h.named_children())
        if not isinstance(part.ln_f, nn.Identity):
            yield LAST_NORM, part.ln_f

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

    def on_host(self, values: Tensor) -> Array:
        found: Array = values.detach().to("cpu", torch.float32).numpy()
        return found
