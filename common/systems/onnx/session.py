"""Execution of an ONNX folder with onnxruntime on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.config.resolved import ResolvedModel
from common.errors import ConfigError
from common.packages import require_package
from common.systems.onnx.write import GRAPH_FILE

Cache = list[NDArray[np.float32]]
"""Keys and values (B, nh, T, hs) of all layers, in the order of the graph."""

_PAST = "past_key_values."
_QUIET = 3
"""Level of onnxruntime's log that leaves only errors."""


class OnnxModel:
    """Graph that computes logits. It keeps keys and values if it was written with a cache."""

    def __init__(self, file: Path, threads: int = 0) -> None:
        """Open a graph. threads: number for one operator, 0 for onnxruntime's default. Raises
        ConfigError unless the file is a graph of a GPT-2.
        """
        require_package("onnxruntime", extra="export", purpose="which runs ONNX")
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = _QUIET
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            self._session = onnxruntime.InferenceSession(
                str(file), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # errors of many types, none of them documented
            raise ConfigError(
                f"{file}: onnxruntime {onnxruntime.__version__} cannot open it"
                f" ({str(error).partition(chr(10))[0]}); export it again"
            ) from None
        inputs = {each.name: each.shape for each in self._session.get_inputs()}
        outputs = [each.name for each in self._session.get_outputs()]
        if not {"input_ids", "attention_mask", "position_ids"} <= inputs.keys():
            raise ConfigError(
                f"{file}: its inputs are {', '.join(inputs)}; expected input_ids, attention_mask"
                " and position_ids, as --run_mode export writes them"
            )
        self._pasts = {name: shape for name, shape in inputs.items() if name.startswith(_PAST)}
        self._presents = outputs[1:]
        self._kept: list[Any] = []
        self.has_cache = bool(self._pasts)

    @property
    def cache(self) -> Cache:
        """Keys and values of the tokens so far. May be set; an empty one begins a new text."""
        return [kept.numpy() for kept in self._kept]

    @cache.setter
    def cache(self, arrays: Cache) -> None:
        from onnxruntime import OrtValue

        self._kept = [OrtValue.ortvalue_from_numpy(np.ascontiguousarray(each)) for each in arrays]

    def forget(self) -> None:
        """Begin with new sequences."""
        self._kept = []

    def reorder(self, rows: list[int]) -> None:
        """Give row i the keys and values of row ``rows[i]``."""
        from onnxruntime import OrtValue

        self._kept = [
            OrtValue.ortvalue_from_numpy(np.ascontiguousarray(kept.numpy()[rows]))
            for kept in self._kept
        ]

    def run(
        self,
        ids: NDArray[np.int64],
        mask: NDArray[np.int64],
        positions: NDArray[np.int64],
    ) -> NDArray[np.float32]:
        """Add tokens (B, T) to the cache and return logits (B, T, vocab_size). mask: (B, all tokens
        so far), 0 for padding. positions: (B, T).
        """
        from onnxruntime import OrtValue

        feed = {
            name: OrtValue.ortvalue_from_numpy(np.ascontiguousarray(value, np.int64))
            for name, value in (
                ("input_ids", ids), ("attention_mask", mask), ("position_ids", positions),
            )
        }  # fmt: skip
        if self._pasts and not self._kept:
            self._kept = [
                OrtValue.ortvalue_from_numpy(
                    np.zeros((len(ids), shape[1], 0, shape[3]), np.float32)
                )
                for shape in self._pasts.values()
            ]
        feed |= dict(zip(self._pasts, self._kept, strict=True))
        logits, *self._kept = self._session.run_with_ort_values(["logits", *self._presents], feed)
        result: NDArray[np.float32] = logits.numpy()
        return result


def logits(folder: Path, model: ResolvedModel, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the logits of an ONNX folder for ids (B, T)."""
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    return OnnxModel(folder / GRAPH_FILE).run(ids, np.ones_like(ids), positions)
