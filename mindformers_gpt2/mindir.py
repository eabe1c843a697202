"""Run the graphs that ``mindformers_gpt2.export`` writes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from numpy.typing import NDArray

from common.errors import CheckpointError
from common.inference.runner import Runner, score_by_logits
from common.inference.source import Source, read_export
from common.parallel.run import Run
from mindformers_gpt2.device import DTYPES, open_device
from mindformers_gpt2.predict import Decoder

_LENGTHS = 32
"""Multiple to which lengths are padded."""


class MindIRModel:
    def __init__(self, folder: Path, config: Run) -> None:
        """Open the graphs. config: with the model's sizes and the precision of the export."""
        graphs = read_export(folder)["graphs"]
        self._logits, self._decode = (_load(folder / graphs[name]["file"]) for name in ("model", "decode"))
        self._config = config
        batch = graphs["model"]["inputs"][0]["shape"][0]
        self._batch = batch if isinstance(batch, int) else None

    def decoder(self, rows: int) -> Decoder:
        return _Decoder(self, self._batch or rows, self._config)

    def logits(self, ids: NDArray[Any]) -> NDArray[np.float32]:
        """Return logits (B, T, vocab_size) of ids (B, T).

        The ids are padded on the right, which does not change the result, because each new length
        costs MindSpore time.
        """
        rows, length = ids.shape
        width = min(self._config.model.max_positions, -(-length // _LENGTHS) * _LENGTHS)
        padded = np.zeros((self._batch or rows, width), np.int32)
        padded[:rows, :length] = ids
        found: NDArray[np.float32] = self._logits(Tensor(padded)).asnumpy()
        return found[:rows, :length]

    def decode(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Compute one more token of each row, like ``GPT2.decode``."""
        outputs: tuple[Tensor, ...] = self._decode(*inputs)
        return outputs

    def follow(self, ids: Tensor, last: Tensor) -> Tensor:
        """Return logits (B, vocab_size) for the tokens that follow those at ``last`` among all B
        T.
        """
        found = self.logits(ids.asnumpy())
        return Tensor(found.reshape((-1, found.shape[-1]))[last.asnumpy()])


class _Decoder(Decoder):
    """Decoder that runs the graphs in place of the model's own."""

    def __init__(self, runner: MindIRModel, rows: int, config: Run) -> None:
        self.rows = rows
        self._decode, self._follow = runner.decode, runner.follow
        self._config = config
        self._last = config.model.max_positions - 1
        self._width = 0

    def _new_caches(self) -> tuple[Tensor, Tensor]:
        model = self._config.model
        head_size = model.hidden_size // model.num_heads
        shape = (model.num_layers, self.rows, model.num_heads, model.max_positions, head_size)
        dtype = DTYPES[self._config.precision.compute]
        return ops.zeros(shape, dtype), ops.zeros(shape, dtype)


def _load(file: Path) -> Any:
    try:
        return nn.GraphCell(ms.load(str(file)))
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"{file}: MindSpore {ms.__version__} cannot open it ({reason}); export.json names the"
            " version that wrote it: export again with this one"
        ) from None


def open_mindir(source: Source, config: Run) -> Runner:
    """Open a folder of MindIR. Raises CheckpointError, ConfigError and DeviceError."""
    open_device(config)
    model = MindIRModel(source.path, config)
    return Runner(decoder=model.decoder, scorer=partial(score_by_logits, model.logits), has_fixed_shapes=True)
