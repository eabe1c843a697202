"""CRC-32C (Castagnoli), which zlib has not, at the speed of memory: whole blocks are divided by a sparse multiple of the polynomial.

Source: RFC 3720, section 12.1; TensorFlow stores it rotated, ``masked``.
"""

from __future__ import annotations

import numpy as np

from common.tensor_files.arrays import Bytes

_POLYNOMIAL = 0x82F63B78
"""Reflected: the lowest bit is the highest power."""
_DEGREE, _TAPS = 5685, (1362, 426, 0)
"""x^5685 = x^1362 + x^426 + 1 modulo the polynomial, found by search; so squared, x^(5685 w) = x^(1362 w) + ... for every w = 2^k.

The first bytes of a message may therefore be added to those that come 4323, 5259 and 5685 places (of any 2^k bits) later.
"""
_STEP = _DEGREE - max(_TAPS)
_WIDTH = 32
"""Bytes in a place, so that what is at hand (0.7 MB) stays in a processor's cache."""
_START = np.frombuffer(0x641F6454.to_bytes(4, "little"), np.uint8)
"""Before a message, it turns a remainder that begins with zeros into one that begins with ones."""


def masked_crc32c(data: Bytes) -> int:
    """As TensorFlow's files hold it (tensorflow/core/lib/hash/crc32c.h)."""
    value = crc32c(data)
    return ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF


def crc32c(data: Bytes) -> int:
    start = _START
    if data.size > 4 * _DEGREE * _WIDTH:
        start, data = data[:0], _shorten(start, data, _WIDTH)
    if data.size > 2 * _DEGREE:
        start, data = data[:0], _shorten(start, data, 1)
    remainder = 0
    for byte in (*start.tolist(), *data.tolist()):
        remainder = _TABLE[(remainder ^ byte) & 0xFF] ^ remainder >> 8
    return remainder ^ 0xFFFFFFFF


def _shorten(start: Bytes, data: Bytes, width: int) -> Bytes:
    """The _DEGREE * width bytes that leave the same remainder as ``start`` and ``data``, one after the other."""
    size, step = _DEGREE * width, _STEP * width
    work = np.zeros(size + 4 * step, np.uint8)
    odd = data.size % width
    head = np.concatenate([start, data[:odd]])
    work[size - head.size : size] = head  # zeros before a message change nothing
    for first in range(odd, data.size, 4 * step):
        piece = data[first : first + 4 * step]
        work[size : size + piece.size] = piece
        for place in range(0, piece.size, step):
            moved = work[place : min(place + step, piece.size)]
            for tap in _TAPS:
                target = work[place + (_DEGREE - tap) * width :][: moved.size]
                np.bitwise_xor(target, moved, out=target)
        work[:size] = work[piece.size : piece.size + size]
    return work[:size]


def _remainder(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
    return byte


_TABLE = [_remainder(byte) for byte in range(256)]
