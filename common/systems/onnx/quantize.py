"""Quantization of weights to 8 and 4 bits in blocks, for onnxruntime's MatMulNBits and
GatherBlockQuantized.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BLOCK = 32
"""Number of neighbouring weights of a row that share a scale."""
_ROWS = 4096
"""Number of rows that are quantized at once, which bounds the memory."""


def quantize_blocks(
    weight: NDArray[np.float32], bits: int
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Return (rows, columns) as integers (rows, blocks, BLOCK * bits / 8) and scales (rows,
    blocks).

    A weight is scale * (integer - 2^(bits - 1)). The weight of a block that is largest in size
    becomes the integer 0 exactly, so the scale carries its sign. bits: 8, or 4 with two integers
    a byte, the first in the low half.
    """
    rows, columns = weight.shape
    blocks = columns // BLOCK
    integers = np.empty((rows, blocks, BLOCK * bits // 8), np.uint8)
    scales = np.empty((rows, blocks), np.float32)
    for first in range(0, rows, _ROWS):
        part = slice(first, first + _ROWS)
        integers[part], scales[part] = _quantize(weight[part].reshape(-1, blocks, BLOCK), bits)
    return integers, scales


def _quantize(
    blocks: NDArray[np.float32], bits: int
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    half = 2 ** (bits - 1)
    places = np.abs(blocks).argmax(-1)[..., None]
    scales = (np.take_along_axis(blocks, places, -1)[..., 0] / -half).astype(np.float32)
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)
    integers = np.rint(blocks * inverse[..., None]) + half
    integers = integers.clip(0, 2 * half - 1).astype(np.uint8)
    if bits == 4:
        integers = integers[..., ::2] | (integers[..., 1::2] << 4)
    return integers, scales
