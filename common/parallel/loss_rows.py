"""Number of positions whose logits exist at one time.

The head's gradient is added up once for each such part, so fewer parts move fewer bytes.
"""

from __future__ import annotations

from common.parallel.run import Run

MIN_ROWS, MAX_ROWS = 1024, 16_384
_SHARE = 24
"""Float32 logits take at most this part of an accelerator's memory: 3.3 of 80 GB."""


def loss_rows(config: Run, memory: int | None) -> int:
    """Return the positions, those of ``train.loss_rows`` if given.

    memory: bytes of the accelerator, None on a CPU, where more rows are not faster.
    """
    if config.train.loss_rows is not None:
        return config.train.loss_rows
    if memory is None:
        return MIN_ROWS
    fitting = memory // (_SHARE * 4 * (config.vocab_rows // config.parallel.model_parallel))
    return min(MAX_ROWS, max(MIN_ROWS, 1 << fitting.bit_length() >> 1))
