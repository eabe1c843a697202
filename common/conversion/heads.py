"""Warn about unusual numbers of heads, which tensor shapes cannot reveal."""

from __future__ import annotations

from pathlib import Path

from common.config.resolved import ResolvedModel
from common.log import LOG

_USUAL_HEADS = {768: (12,), 1024: (16,), 1280: (20,), 1600: (25,), 8192: (64, 32)}
"""Width -> number of heads, for OpenAI's models and MindFormers' 52B model, whose heads are 256
wide.
"""
_HEAD_WIDTHS = (64, 80, 96, 128)
"""Head widths of all other models."""
_NARROW = 256
_NARROW_HEAD_WIDTHS = (16, 32, 64)
"""Head widths of models narrower than _NARROW."""


def warn_of_heads(path: Path, model: ResolvedModel) -> None:
    """Warn if the number of heads is unusual for the width.

    Any number of heads that divides the width fits the shapes, so a wrong number cannot be detected
    otherwise.
    """
    width, heads = model.hidden_size, model.num_heads
    sizes = _NARROW_HEAD_WIDTHS if width < _NARROW else _HEAD_WIDTHS
    usual = _USUAL_HEADS.get(width) or tuple(width // size for size in sizes if width % size == 0)
    if usual and heads not in usual:
        LOG.warning(
            f"{path}: its config says {heads} heads, where a GPT-2 of width {width} has"
            f" {' or '.join(map(str, usual))}; any number that divides the width fits the tensors,"
            " and with a wrong one they compute another function: compare with how it was trained"
        )
