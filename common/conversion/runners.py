"""Frameworks installed on this machine that compute the logits of a folder of weights, for
``compare_logits``.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.config.resolved import ResolvedModel
from common.conversion.logits import NEEDED, Runner

_PLACES = {
    "hf": ("torch_gpt2.logits", "hugging_face_logits"),
    "torch_gpt2": ("torch_gpt2.logits", "logits"),
    "mindspore": ("mindformers_gpt2.logits", "logits"),
    "pt2": ("torch_gpt2.program", "logits"),
    "onnx": ("common.systems.onnx.session", "logits"),
}
"""Module and function of each format."""


def installed_runners() -> dict[str, Runner]:
    """Return the function that computes the logits of each format. A framework is imported when its
    function is called.
    """
    # MindSpore warns about devices that this machine does not have
    os.environ.setdefault("GLOG_v", "3")
    return {
        format: partial(_run, *place)
        for format, place in _PLACES.items()
        if all(importlib.util.find_spec(name) for name in NEEDED[format])
    }


def _run(
    module: str, function: str, folder: Path, model: ResolvedModel, ids: NDArray[np.int64]
) -> NDArray[np.float32]:
    logits: NDArray[np.float32] = getattr(importlib.import_module(module), function)(
        folder, model, ids
    )
    return logits
