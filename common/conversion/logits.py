"""Compare two folders of weights by their logits for the same tokens. Each folder is opened by a
framework that reads its format.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.config.load import build_config
from common.config.resolved import ResolvedModel
from common.errors import CheckpointError, GPT2Error
from common.parallel.run import Run
from common.resolve.derive import resolve_config
from common.systems.weights import Weights
from common.weights.names import count_parameters

_PROGRAMS = {
    "hf": (("torch", "transformers"), "torch_gpt2.predict", "hugging_face_logits"),
    "torch_gpt2": (("torch",), "torch_gpt2.predict", "logits"),
    "mindspore": (("mindspore",), "mindformers_gpt2.predict", "logits"),
    "pt2": (("torch",), "torch_gpt2.export", "logits"),
    "onnx": (("onnxruntime",), "common.systems.onnx.folder", "logits"),
}
"""Format -> the packages that compute its logits, and the module and function that call them."""
TOLERANCE = 1e-4
"""Largest accepted difference, relative to the largest logit. Frameworks add in different orders; a
wrong order of heads makes an error as large as the logits.
"""
_COPIES = 3
"""Memory that a framework needs to open weights, as a multiple of their size."""


def compare_logits(source: Weights, source_format: str, target: Weights, target_format: str) -> dict[str, Any]:
    """Return the comparison for the report. Raises CheckpointError if the logits differ."""
    import psutil  # not at the top of the file: only this needs it

    needed = _COPIES * 4 * count_parameters(source.model)
    available = psutil.virtual_memory().available
    reason = None
    if missing := [why for format in sorted({source_format, target_format}) if (why := why_not(format))]:
        reason = "; ".join(missing)
    elif source.path.is_file():
        reason = f"frameworks open folders, where they may prefer another file to {source.path.name}"
    elif any(weight.dtype != target.tensors[name].dtype for name, weight in source.tensors.items()):
        reason = "the types of the weights differ"
    elif needed > available:
        reason = f"it takes {needed / 2**30:.1f} GiB of memory, {available / 2**30:.1f} are available"
    if reason:
        return {"compared": False, "reason": reason}
    ids = np.random.default_rng(0).integers(0, source.model.vocab_size, (2, min(source.model.max_positions, 32)))
    expected, found = (
        run_logits(format, weights, ids) for format, weights in ((source_format, source), (target_format, target))
    )
    if not np.isfinite(expected).all():
        return {"compared": False, "reason": "those of the source are not finite"}
    largest, difference = float(np.abs(expected).max()), float(np.abs(found - expected).max())
    if not difference <= TOLERANCE * largest:  # also true for NaN
        raise CheckpointError(
            f"{target.path}: its logits ({target_format}) differ by {difference:.3g} from those of"
            f" {source.path} ({source_format}), whose largest is {largest:.3g}; expected"
            f" {TOLERANCE:g} of it at most: one of the two configs is not that of the weights"
        )
    return {"compared": True, "tokens": list(ids.shape), "largest_difference": difference, "largest_logit": largest}


def why_not(format: str) -> str | None:
    """Return why nothing here computes the logits of a format, None if something does."""
    if format not in _PROGRAMS:
        return f"no framework here runs the {format} format"
    absent = [name for name in _PROGRAMS[format][0] if importlib.util.find_spec(name) is None]
    return f"{' and '.join(absent)}, which computes the logits of {format}, is not installed" if absent else None


def run_logits(format: str, weights: Weights, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the logits (B, T, vocab_size) of ids (B, T), computed in float32. Raises CheckpointError if the program
    that runs the format fails.
    """
    _, module, function = _PROGRAMS[format]
    # MindSpore warns about devices that this machine does not have
    os.environ.setdefault("GLOG_v", "3")
    try:
        logits: NDArray[np.float32] = getattr(importlib.import_module(module), function)(
            weights.path, weights.model, ids
        )
        return logits
    except GPT2Error:
        raise
    except Exception as error:  # a framework may raise anything
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError(
            f"{weights.path}: its framework for {format} could not run it: {reason}; convert"
            " without --verify, or fix the cause"
        ) from error


def config_of(model: ResolvedModel, folder: Path) -> Run:
    """Return the configuration that a backend needs to open a model on a CPU."""
    needed = {"output_dir": str(folder), "train": {"micro_batch_size": 1}, "optimizer": {"learning_rate": 1.0}}
    tree = {**needed, "device": "cpu", "model": model.model_dump(exclude_none=True)}
    return resolve_config(build_config(tree))
