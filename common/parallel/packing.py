"""Documents that share a window: what keeps them apart, and which predictions count.

The rules are those of Megatron's get_ltor_masks_and_position_ids. A document ends with its
end-of-document token, and the token after it is the first one of the next document.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from common.config.schema import DataConfig

UNCOUNTED = -1
"""Target of a position whose loss does not count."""
KEYS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
"""Keys of the section data that need the end-of-document token."""


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Treatment of documents in a window.

    eod: the token that ends a document. positions: count them from 0 in each document. attention:
    let a token attend to its own document only. masks_loss: leave out the losses of positions
    whose input is ``eod`` (True), or whose target is it ("targets").
    """

    eod: int
    positions: bool
    attention: bool
    masks_loss: bool | Literal["targets"]

    @property
    def separates(self) -> bool:
        """Whether the model needs to know the documents, and not only the loss."""
        return self.positions or self.attention

    def uncounted(self, tokens: Any) -> Any:
        """Return where a loss of windows (rows, columns) is left out, (rows, columns - 1) of bool.

        tokens: an array of numpy or a tensor. For packings with ``masks_loss``.
        """
        return (tokens[:, 1:] if self.masks_loss == "targets" else tokens[:, :-1]) == self.eod

    def counted(self, tokens: npt.NDArray[np.int32]) -> int:
        """Return the number of predictions that count in windows (rows, columns)."""
        out = np.count_nonzero(self.uncounted(tokens)) if self.masks_loss else 0
        return tokens[:, 1:].size - int(out)


def wanted_keys(data: DataConfig) -> list[str]:
    """Return the keys in use that need the end-of-document token, with their section."""
    return [f"data.{name}" for name in KEYS if getattr(data, name)]
