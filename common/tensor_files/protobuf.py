"""Read and write fields of protobuf messages without protobuf. MindSpore's files consist
of them.

Format: https://protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from common.tensor_files.arrays import Bytes

_VARINT, _FIXED64, BYTES, _FIXED32 = 0, 1, 2, 5
"""Wire types."""


def read_message(message: Bytes) -> dict[int, list[Any]]:
    """Return the contents of each field by its number, in order: int or Bytes. Raises ValueError if the message breaks
    off.
    """
    fields, position = defaultdict[int, list[Any]](list), 0
    while position < message.size:
        key, position = read_varint(message, position)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, position = read_varint(message, position)
            fields[number].append(value)
            continue
        if wire not in (_FIXED64, BYTES, _FIXED32) or not number:
            raise ValueError(f"no protobuf field begins {position} bytes into a message of {message.size}")
        size, position = read_varint(message, position) if wire == BYTES else (8 if wire == _FIXED64 else 4, position)
        if position + size > message.size:
            raise ValueError(f"a field of {size} bytes begins at byte {position} of a message of {message.size}")
        fields[number].append(message[position : position + size])
        position += size
    return dict(fields)


def read_varint(message: Bytes, position: int) -> tuple[int, int]:
    """Return a number and the position after it."""
    value = 0
    for place in range(10):
        if position + place >= message.size:
            raise ValueError("it breaks off within a number")
        byte = int(message[position + place])
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, position + place + 1
    raise ValueError(f"the number at byte {position} has more than 10 bytes")


def read_numbers(part: Bytes | int) -> list[int]:
    """Return the signed numbers of a repeated field: one of them, or several that are packed."""
    values, position = [], 0
    if isinstance(part, int):
        values = [part]
    else:
        while position < part.size:
            value, position = read_varint(part, position)
            values.append(value)
    return [value - 2**64 if value >= 2**63 else value for value in values]


def to_varint(value: int) -> bytes:
    """Return a number in its encoded form; a negative one takes ten bytes."""
    value, digits = value % 2**64, []
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*digits, value])


def int_field(number: int, value: int) -> bytes:
    return to_varint(number << 3 | _VARINT) + to_varint(value)


def bytes_key(number: int, size: int) -> bytes:
    """Return the bytes before the content of a field of bytes."""
    return to_varint(number << 3 | BYTES) + to_varint(size)


def bytes_field(number: int, content: bytes) -> bytes:
    return bytes_key(number, len(content)) + content
