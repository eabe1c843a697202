"""An ONNX folder: the graph, its weights in a file that can be mapped, and the model's sizes. It is
written a tensor at a time, and run with onnxruntime on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.config.resolved import ResolvedModel
from common.errors import ConfigError
from common.paths import require_package
from common.systems.weights import Weights, require_blocks
from common.tensor_files.checksummed import ChecksummedFile

GRAPH_FILE = "model.onnx"
DATA_FILE = "model.onnx.data"


def write_onnx(folder: Path, weights: Weights, dtype: str | None, *, cache: bool = True) -> dict[str, int]:
    """Write into an empty folder, a tensor at a time; returns the CRC-32 of each file.

    dtype: float32 when left out, float16, int8 or int4; int8 of weights that come with a scheme
    keeps its scales. cache: whether the graph takes and returns keys and values. Raises ConfigError
    where the sizes do not suit the dtype; OSError is left to the caller.
    """
    require_package("onnx", extra="export", purpose="which writes ONNX")
    from common.systems.onnx.model import BITS, BLOCK, GPT2Graph

    model, dtype = weights.model, dtype or "float32"
    scheme = weights.scheme if dtype == "int8" else None
    if scheme:
        dtype = "float32"
    if dtype in BITS:
        require_blocks(model, dtype, BLOCK)
    with ChecksummedFile(folder / DATA_FILE) as data:
        content = GPT2Graph(weights, dtype, data, DATA_FILE, cache=cache, scheme=scheme).write()
    with ChecksummedFile(folder / GRAPH_FILE) as file:
        file.write(content)
    return {GRAPH_FILE: file.checksum, DATA_FILE: data.checksum}


Cache = list[NDArray[np.float32]]
"""Keys and values (B, nh, T, hs) of all layers, in the order of the graph."""

_PAST = "past_key_values."
_QUIET = 3
"""Level of onnxruntime's log that leaves only errors."""


class OnnxModel:
    """Graph that computes logits. It keeps keys and values if it was written with a cache."""

    def __init__(self, file: Path, positions: int, threads: int = 0) -> None:
        """Open a graph. positions: number of those of the model. threads: number for one operator, 0 for onnxruntime's
        default. Raises ConfigError unless the file is a graph of a GPT-2.
        """
        require_package("onnxruntime", extra="export", purpose="which runs ONNX")
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = _QUIET
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            self._session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
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
        self._last = positions - 1
        self._kept: list[Any] = []
        self.has_cache = bool(self._pasts)

    @property
    def cache(self) -> Cache:
        """Keys and values of the tokens so far. May be set."""
        return [kept.numpy() for kept in self._kept]

    @cache.setter
    def cache(self, arrays: Cache) -> None:
        from onnxruntime import OrtValue

        self._kept = [OrtValue.ortvalue_from_numpy(np.ascontiguousarray(each)) for each in arrays]

    def reorder(self, rows: list[int]) -> None:
        """Give row i the keys and values of row ``rows[i]``."""
        self.cache = [array[rows] for array in self.cache]

    def run(self, ids: NDArray[np.int64], mask: NDArray[np.int64]) -> NDArray[np.float32]:
        """Implement ``common.generation.generate.ExportedModel``."""
        from onnxruntime import OrtValue

        # the place of each new token in its own sequence; that of padding is 0
        positions = (mask.cumsum(1) - 1).clip(0, self._last)[:, -ids.shape[1] :]
        feed = {
            name: OrtValue.ortvalue_from_numpy(np.ascontiguousarray(value, np.int64))
            for name, value in (
                ("input_ids", ids), ("attention_mask", mask), ("position_ids", positions),
            )
        }  # fmt: skip
        if self._pasts and mask.shape == ids.shape:  # new sequences begin
            shapes = ((len(ids), heads, 0, size) for _, heads, _, size in self._pasts.values())
            self.cache = [np.zeros(shape, np.float32) for shape in shapes]
        feed |= dict(zip(self._pasts, self._kept, strict=True))
        logits, *self._kept = self._session.run_with_ort_values(["logits", *self._presents], feed)
        result: NDArray[np.float32] = logits.numpy()
        return result


def logits(folder: Path, model: ResolvedModel, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the logits of an ONNX folder for ids (B, T)."""
    return OnnxModel(folder / GRAPH_FILE, ids.shape[1]).run(ids, np.ones_like(ids))


_Logits = NDArray[np.float32]


class OnnxSlots:
    """Implements ``common.serving.engine.Slots``. The graph's batch holds the sequences of the last
    step, which end at the same column. The caches of the others are kept beside it.
    """

    def __init__(self, model: OnnxModel, count: int) -> None:
        """Make empty slots. Raises ConfigError for a graph without a cache."""
        if not model.has_cache:
            raise ConfigError(
                "the graph takes no keys and values, so that each token would cost a pass over the"
                " whole text; export it again with export.cache=true"
            )
        self.count = count
        self._model = model
        self._batch: list[int | None] = []
        """Slot of each row of the batch, None for a row that is free."""
        self._lengths = [0] * count
        self._aside: dict[int, Cache] = {}
        """Keys and values (1, nh, T, hs) of slots outside the batch."""

    def admit(
        self, slot: int, ids: Sequence[int], reuse: int, observe: Callable[[int, _Logits], None] | None
    ) -> _Logits:
        batch, own = self._model.cache, self._cache_of(slot, reuse) if reuse else []
        self._leave(slot)
        self._model.cache = own
        logits = self._model.run(np.array([ids[reuse:]], np.int64), np.ones((1, len(ids)), np.int64))[0]
        self._aside[slot], self._lengths[slot] = self._model.cache, len(ids)
        self._model.cache = batch
        if observe is not None:
            observe(reuse, logits)
        last: _Logits = logits[-1]
        return last

    def step(self, slots: Sequence[int], tokens: Sequence[int], places: Sequence[int]) -> _Logits:
        held = [self._lengths[slot] for slot in slots]
        if self._batch != list(slots) or held != list(places):
            self._gather(slots, places)
        longest = max(places)
        columns = np.arange(longest + 1)[None]
        mask = (columns >= longest - np.array(places)[:, None]).astype(np.int64)
        logits = self._model.run(np.array(tokens, np.int64)[:, None], mask)
        for slot, place in zip(slots, places, strict=True):
            self._lengths[slot] = place + 1
        last: _Logits = logits[:, -1]
        return last

    def copy(self, source: int, slot: int, length: int) -> None:
        cache = self._cache_of(source, length)
        self._leave(slot)
        self._aside[slot], self._lengths[slot] = cache, length

    def _leave(self, slot: int) -> None:
        """Take a slot out of the batch. Its row is free afterwards."""
        self._batch = [None if each == slot else each for each in self._batch]

    def _cache_of(self, slot: int, length: int, batch: Cache | None = None) -> Cache:
        """Return copies of the keys and values of a slot's first tokens. batch: the cache of all rows."""
        if slot not in self._batch:
            return [each[:, :, :length].copy() for each in self._aside[slot]]
        row = self._batch.index(slot)
        return [
            each[row : row + 1, :, each.shape[2] - self._lengths[slot] :][:, :, :length].copy()
            for each in batch or self._model.cache
        ]

    def _gather(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Make a batch of these slots, and keep the others beside it."""
        batch = self._model.cache
        for slot in self._batch:
            if slot is not None:
                self._aside[slot] = self._cache_of(slot, self._lengths[slot], batch)
        self._batch = []
        parts = [self._cache_of(slot, length) for slot, length in zip(slots, lengths, strict=True)]
        longest = max(lengths)
        cache = []
        for arrays in zip(*parts, strict=True):
            _, heads, _, size = arrays[0].shape
            whole = np.zeros((len(slots), heads, longest, size), np.float32)
            for row, (array, length) in enumerate(zip(arrays, lengths, strict=True)):
                whole[row, :, longest - length :] = array[0]
            cache.append(whole)
        self._model.cache, self._batch = cache, list(slots)
        for slot in slots:
            del self._aside[slot]
