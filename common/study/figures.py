"""Figures of a report as text."""

from __future__ import annotations

import math

from common.accelerators import GIB

MIB = 2**20


def percent(value: float, signed: bool = False) -> str:
    """Return ``12 %``, ``1.2 %`` or ``0.12 %``: two digits that say something."""
    size = abs(100 * value)
    digits = 0 if size >= 9.95 or not size else min(3, 1 - math.floor(math.log10(size)))
    return f"{100 * value:{'+' if signed else ''},.{digits}f} %"


def speed(value: float) -> str:
    """Return tokens or samples a second, with three digits at least."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"


def size(value: float) -> str:
    """Return bytes in GiB or MiB, three digits."""
    unit, name = (GIB, "GiB") if value >= GIB else (MIB, "MiB")
    return f"{speed(value / unit)} {name}"


def small(value: float) -> str:
    """Return a relative difference such as ``3.1e-08``; 0 is exact."""
    return f"{value:.1e}" if value else "0"


def number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.7g}"
