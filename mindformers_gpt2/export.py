"""Write a checkpoint as MindIR, which MindSpore runs without this project, and run such a folder.

export/model.mindir    ids (B, T) int32 -> logits (B, T, vocab_size) float32
export/decode.mindir   token (B, 1), position (B,) int32, keys, values (L, B, nh, K, hs)
                       -> logits (B, vocab_size), keys, values
export/vocab.json, ... the existing files of data.tokenizer
export/export.json     inputs and outputs, origin of the weights, result of the check,
                       SHA-256 of each file

MindSpore puts weights above 1 GB beside their graph: model_graph.mindir and model_variables/. Each file is loaded again
and compared with the model before the folder is published. The folder is complete or absent.
"""

from __future__ import annotations

import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from numpy.typing import NDArray

from common import run_folder
from common.backends import Inputs
from common.cluster.environment import ALONE, Process
from common.conversion.export import write_record
from common.errors import CheckpointError, RunError
from common.files import fsync_folder
from common.inference.runner import Runner, score_by_logits
from common.inference.source import Source, read_export
from common.log import LOG
from common.parallel.run import Run
from common.training.export import export_folder, put_tokenizer_files, refuse_to_replace
from common.training.start import weights_to_use
from mindformers_gpt2.checkpoint import load_model
from mindformers_gpt2.device import DTYPES, MindSporeDevice, open_device
from mindformers_gpt2.model import GPT2, cache_shape, new_caches
from mindformers_gpt2.predict import Decoder

_LENGTHS = 32
"""Multiple to which lengths are padded."""


class MindIRModel:
    def __init__(self, folder: Path, config: Run) -> None:
        """Open the graphs. config: with the model's sizes and the precision of the export."""
        graphs = read_export(folder)["graphs"]
        self._logits, self.decode = (_load(folder / graphs[name]["file"]) for name in ("model", "decode"))
        self._config = config
        batch = graphs["model"]["inputs"][0]["shape"][0]
        self._batch = batch if isinstance(batch, int) else None

    def decoder(self, rows: int) -> Decoder:
        dtype = DTYPES[self._config.precision.compute]
        return Decoder(self.decode, self.follow, self._config.model, dtype, self._batch or rows)

    def logits(self, ids: NDArray[Any]) -> NDArray[np.float32]:
        """Return logits (B, T, vocab_size) of ids (B, T).

        The ids are padded on the right, which does not change the result, because each new length costs MindSpore time.
        """
        rows, length = ids.shape
        width = min(self._config.model.max_positions, -(-length // _LENGTHS) * _LENGTHS)
        padded = np.zeros((self._batch or rows, width), np.int32)
        padded[:rows, :length] = ids
        found: NDArray[np.float32] = self._logits(Tensor(padded)).asnumpy()
        return found[:rows, :length]

    def follow(self, ids: Tensor, last: Tensor) -> Tensor:
        """Return logits (B, vocab_size) for the tokens that follow those at ``last`` among all B T."""
        found = self.logits(ids.asnumpy())
        return Tensor(found.reshape((-1, found.shape[-1]))[last.asnumpy()])


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


TOLERANCE = 1e-6
"""Largest allowed difference between a file and the model. On a CPU the difference is 0."""


def export(config: Run, inputs: Inputs, process: Process = ALONE) -> None:
    folder = Path(config.output_dir) / "export"
    refuse_to_replace(folder, config)
    assert inputs.checkpoint is not None
    device, checkpoint = inputs.device, weights_to_use(config, inputs.checkpoint, None)
    manifest = checkpoint.manifest(config.model)
    model = load_model(config, device, checkpoint)
    batches = (config.export.batch_size,) if config.export.batch_size else (1, 3)
    with run_folder.owned_folder(folder.parent), export_folder(folder) as temporary:
        graphs = {}
        for name, (cell, takes, returns) in _graphs(config).items():
            try:
                file = _write(name, cell(model), takes, temporary)
                difference = _check(file, cell, model, device, batches)
            except RuntimeError as error:  # MindSpore's errors have many lines; the usual reason is memory
                reason = str(error).strip().splitlines()[0]
                raise RunError(
                    f"{name}.mindir: MindSpore failed ({reason}); a smaller export.batch_size needs less memory"
                ) from None
            graphs[name] = {
                "file": file.name, "inputs": takes, "outputs": returns, "max_abs_difference": difference,
            }  # fmt: skip
            LOG.info(
                f"{file.name}: loaded again, it differs from the model by {difference:g} (batches"
                f" of {' and '.join(map(str, batches))})"
            )
        put_tokenizer_files(temporary, config)
        _seal(temporary)
        batch = {} if config.export.batch_size else {"batch": "1 or more"}
        sizes = write_record(
            temporary,
            config,
            format="mindir",
            graphs=graphs,
            dynamic=batch | {"length": f"1 to {config.model.max_positions}"},
            checkpoint=str(checkpoint.path.resolve()),
            step=manifest["state"].get("step"),
            tokenizer=manifest.get("tokenizer"),
            model=config.model.model_dump(),
            precision=config.precision.model_dump(),
            device=device.kind,
            mindspore=ms.__version__,
        )
    LOG.info(f"{folder}: weights of {checkpoint}; {sizes}")


class Logits(nn.Cell):
    """Logits of every position, (B, T, vocab_size) float32."""

    def __init__(self, model: GPT2) -> None:
        super().__init__(auto_prefix=False)  # the parameters keep their names
        self.model = model

    def construct(self, ids: Tensor) -> Tensor:
        hidden = self.model(ids).reshape((-1, self.model.config.hidden_size))
        return self.model.logits(hidden).reshape((*ids.shape, self.model.config.vocab_size))


class Decode(nn.Cell):
    """``GPT2.decode``."""

    def __init__(self, model: GPT2) -> None:
        super().__init__(auto_prefix=False)
        self.model = model

    def construct(self, token: Tensor, position: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        decoded: tuple[Tensor, ...] = self.model.decode(token, position, keys, values)
        return decoded


_Tensors = list[dict[str, Any]]
"""Name, shape and type of each, in the order of ``construct``. A size that is a word may vary from call to call."""


def _graphs(config: Run) -> dict[str, tuple[type[Logits] | type[Decode], _Tensors, _Tensors]]:
    """Return each graph's Cell, inputs and outputs by its name."""
    model, batch = config.model, config.export.batch_size or "batch"

    def tensor(name: str, dtype: str, *shape: int | str) -> dict[str, Any]:
        return {"name": name, "shape": list(shape), "dtype": dtype}

    caches = [tensor(name, config.precision.compute, *cache_shape(model, batch)) for name in ("keys", "values")]
    return {
        "model": (
            Logits,
            [tensor("ids", "int32", batch, "length")],
            [tensor("logits", "float32", batch, "length", model.vocab_size)],
        ),
        "decode": (
            Decode,
            [tensor("token", "int32", batch, 1), tensor("position", "int32", batch), *caches],
            [tensor("logits", "float32", batch, model.vocab_size), *caches],
        ),
    }


def _write(name: str, cell: nn.Cell, inputs: _Tensors, folder: Path) -> Path:
    """Export into ``folder``; return the file to load."""
    given = [
        Tensor(
            shape=[None if isinstance(size, str) else size for size in each["shape"]], dtype=getattr(ms, each["dtype"])
        )
        for each in inputs
    ]
    # MindSpore rejects paths with blanks or letters beyond ASCII, but follows links
    with tempfile.TemporaryDirectory() as plain:
        link = Path(plain) / "export"
        link.symlink_to(folder.resolve())
        ms.export(cell, *given, file_name=str(link / name), file_format="MINDIR")
    file = folder / f"{name}.mindir"
    return file if file.exists() else folder / f"{name}_graph.mindir"


def _check(
    file: Path, cell: type[Logits] | type[Decode], model: GPT2, device: MindSporeDevice, batches: tuple[int, ...]
) -> float:
    """Return the largest difference between the file and the model on random ids.

    Raises RunError if it is above the tolerance.
    """
    loaded, sizes, random = nn.GraphCell(ms.load(str(file))), model.config, np.random.default_rng(0)
    positions, distances = sizes.max_positions, []
    if cell is Logits:
        live: Any = Logits(model)
        # for GPT-2 124M on a CPU, 1024 positions would take 45 s and 8 GB more; 128 take under 10 s
        for batch, length in zip(batches, (128, 7), strict=False):
            length = max(1, min(length, positions, 256 // batch))
            ids = _int32(random.integers(0, sizes.vocab_size, (batch, length)))
            distances.append(_distance(loaded(ids), live(ids)))
    else:
        live = device.compile(model.decode)
        for batch in batches:
            found = wanted = new_caches(sizes, batch, model.compute_dtype)
            for position in sorted({0, positions // 2, positions - 1}):
                token = _int32(random.integers(0, sizes.vocab_size, (batch, 1)))
                at = _int32((position + np.arange(batch)) % positions)  # rows stand at different places
                logits, *found = loaded(token, at, *found)
                wanted_logits, *wanted = live(token, at, *wanted)
                both = zip((logits, *found), (wanted_logits, *wanted), strict=True)
                distances += [_distance(*each) for each in both]
    difference = float(np.max(distances))  # keeps a NaN
    if not difference <= TOLERANCE:
        raise RunError(
            f"{file.name}: what MindSpore {ms.__version__} loads again differs from the model by"
            f" {difference:g}, allowed is {TOLERANCE:g}; nothing was exported, an older export is"
            " untouched; try precision=float32, or another version of MindSpore"
        )
    return difference


def _distance(found: Tensor, wanted: Tensor) -> float:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return float("inf")
    return float(np.abs(found.astype(ms.float32).asnumpy() - wanted.astype(ms.float32).asnumpy()).max())


def _int32(values: Any) -> Tensor:
    return Tensor(np.array(values, np.int32))


def _seal(folder: Path) -> None:
    """Make all files durable, and as readable as other files of this user.

    MindSpore makes its files readable only by their owner.
    """
    mode = folder.stat().st_mode & 0o777
    for path in folder.rglob("*"):
        path.chmod(mode if path.is_dir() else mode & 0o666)
        if path.is_dir():
            fsync_folder(path)
            continue
        with path.open("rb") as file:
            os.fsync(file.fileno())
