"""Texts of a report in English and Chinese, and how its numbers are written."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, NamedTuple

from common.accelerators import GIB
from common.study.results import State

MIB = 2**20
Language = Literal["en", "zh"]


class Text(NamedTuple):
    """A text in both languages. `Words in backticks` are code."""

    en: str
    zh: str


def both(text: str) -> Text:
    """Return what reads the same in both languages: numbers, names, messages of programs."""
    return Text(text, text)


STATES = {
    State.FINISHED: Text("finished", "完成"),
    State.FAILED: Text("failed", "失败"),
    State.OUT_OF_MEMORY: Text("out of memory", "内存不足"),
    State.TIMED_OUT: Text("timed out", "超时"),
    State.REFUSED: Text("refused", "不支持"),
    None: Text("not run yet", "尚未运行"),
}
PARTS = {
    "data": Text("data", "取数据"),
    "forward_backward": Text("forward and backward", "前向与反向"),
    "communication": Text("communication", "通信"),
    "update": Text("update", "更新参数"),
    # of the planner
    "products": Text("matrix products", "矩阵乘"),
    "elements": Text("other operations", "其他计算"),
    "waiting": Text("pipeline bubble", "流水线空泡"),
    "tensor": Text("tensor parallel", "张量并行通信"),
    "pipeline": Text("pipeline messages", "流水线通信"),
    "optimizer": Text("optimizer", "优化器"),
}
MEMORY = {
    "state": Text("weights and optimizer", "权重与优化器"),
    "step": Text("gradients, activations and buffers", "梯度、激活与缓冲"),
    "peak": Text("peak of the fullest rank", "占用最多的进程的峰值"),
    "resident": Text(
        "resident memory of the fullest rank, which includes what allocators keep",
        "占用最多的进程的常驻内存，含分配器保留的部分",
    ),
}
"""Kinds of memory that are compared with the plan."""
DATA_PARALLEL = Text("data parallel", "数据并行通信")
"""Name of the planner's "data", which is communication and not the reading of samples."""


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
    return f"{_three(value / unit)} {name}"


def small(value: float) -> str:
    """Return a relative difference such as ``3.1e-08``; 0 is exact."""
    return f"{value:.1e}" if value else "0"


def number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.7g}"


def names(cells: Iterable[str], most: int = 6) -> Text:
    """Return names as code, those beyond ``most`` as a count."""
    listed = list(cells)
    shown = [f"`{name}`" for name in listed[:most]]
    left = len(listed) - len(shown)
    return Text(
        ", ".join(shown) + (f" and {left} more" if left else ""),
        "、".join(shown) + (f" 等 {len(listed)} 个" if left else ""),
    )


def _three(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
