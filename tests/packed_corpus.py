"""Short documents that share windows, for tests of data.reset_* and data.eod_mask_loss."""

from pathlib import Path
from typing import Any

import numpy as np

from common.dataset.indexed import IndexedWriter

EOD = 7
FLAGS: dict[str, Any] = {
    "data__reset_position_ids": True,
    "data__reset_attention_mask": True,
    "data__eod_mask_loss": True,
    "data__eod_id": EOD,
}


def write_packed_corpus(folder: Path) -> Path:
    """Write a pair of 600 documents of 1 to 20 tokens below 101, each ended by EOD, without a
    .meta.json. Return its prefix.
    """
    prefix, generator = folder / "packed_text_document", np.random.default_rng(1)
    with IndexedWriter(prefix, np.uint16) as writer:
        for length in generator.integers(1, 20, size=600):
            tokens = generator.integers(8, 101, size=length + 1)
            tokens[1::2] = tokens[:-1:2][: len(tokens[1::2])]  # something to learn
            tokens[-1] = EOD
            writer.append(tokens, np.array([length + 1]))
    return prefix
