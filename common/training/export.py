"""Export of any checkpoint as one safetensors file, a tensor at a time and without a framework.

weights/model.safetensors    the file that a single rank would have written: true vocabulary,
                             float32, or 8 bits as ``common.weights.pieces`` says
weights/manifest.json        the checkpoint's own, only for this file, so that checkpoint.load
                             and checkpoint.init_from take the folder
weights/vocab.json, ...      the files of data.tokenizer, where they are there
weights/model.yaml           a config for --run_mode predict from inside the folder: model,
                             precision, tokenizer and how to generate
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from common import run_folder
from common.checkpoint.manifest import write_manifest
from common.checkpoint.snapshot import MODEL_FILE, SETTINGS_FILE
from common.config.resolved import ResolvedModel
from common.errors import ConfigError, GPT2Error
from common.files import atomic_write, whole_folder
from common.interrupts import exiting_at_sigterm
from common.log import LOG
from common.parallel.run import Run
from common.quantization import in_integers
from common.resolve.derive import fitting_vocabulary
from common.tensor_files.arrays import TensorKind
from common.tensor_files.safetensors_file import stream_safetensors
from common.tokenizer.folder import TOKENIZER_JSON, companions_in, vocabulary_in
from common.training.opened_checkpoint import Checkpoint
from common.training.start import weights_to_use
from common.weights.names import parameter_shapes
from common.yaml_files import dump_yaml

OF_A_COMMAND = ("prompt", "prompt_file", "output_file", "output_folder")
"""Settings of predict that belong to one command, and do not go along with a model."""


def exported_vocabulary(model: ResolvedModel, checkpoint: Checkpoint) -> dict[str, int]:
    """Return the key of model that changes if the config has the padded size of a vocabulary."""
    with suppress(GPT2Error, KeyError):  # it is reported where the checkpoint is verified
        size = checkpoint.manifest(model)["config"]["model"]["vocab_size"]
        return fitting_vocabulary(model, size, f"the checkpoint {checkpoint}")
    return {}


def export(config: Run, checkpoint: Checkpoint) -> None:
    """Write ``weights`` in the run folder.

    Raises CheckpointError naming every tensor that is missing, unexpected or incomplete, and
    StorageError; an older export is then untouched.
    """
    folder = Path(config.output_dir) / "weights"
    refuse_to_replace(folder, config)
    weights_to_use(config, checkpoint, None)
    manifest = checkpoint.manifest(config.model)
    shapes = parameter_shapes(config.model)
    values = checkpoint.weights(config.model)
    if config.export.weights == "int8":
        kinds, arrays = in_integers(shapes, values, checkpoint.scheme())
    else:
        kinds = {name: TensorKind(dtype="float32", shape=shape) for name, shape in shapes.items()}
        arrays = (array for _, array in values)
    with run_folder.owned_folder(folder.parent), export_folder(folder) as temporary:
        file = temporary / MODEL_FILE
        checksum = stream_safetensors(file, kinds, arrays)
        size = file.stat().st_size
        files = {MODEL_FILE: {"bytes": size, "crc32": checksum}}
        write_manifest(temporary, {**manifest, "exported_from": str(checkpoint.path.resolve()), "files": files})
        has_tokenizer = put_tokenizer_files(temporary, config)
        settings = config.model_dump(include={"backend", "seed", "precision", "model", "predict"})
        for name in OF_A_COMMAND:
            settings["predict"].pop(name)
        settings["optimizer"] = {"learning_rate": config.optimizer.learning_rate}
        settings |= {"output_dir": ".", "checkpoint": {"load": "."}}  # the folder itself
        if has_tokenizer and config.data.tokenizer is not None:
            settings["data"] = {"tokenizer": {"type": config.data.tokenizer.type, "folder": "."}}
        with atomic_write(temporary / SETTINGS_FILE, "w") as target:
            target.write(dump_yaml(settings))
    LOG.info(
        f"{folder / MODEL_FILE}: {len(kinds)} tensors, {size / 1e6:.1f} MB, of {checkpoint}, step"
        f" {manifest['state'].get('step')}"
    )


def put_tokenizer_files(folder: Path, config: Run) -> bool:
    """Copy the existing files of data.tokenizer; return whether there is a vocabulary.

    Raises StorageError, and TokenizerError for a file that cannot be read.
    """
    wish = config.data.tokenizer
    if wish is None:
        return False
    if wish.folder:
        source = Path(wish.folder)
        found = vocabulary_in(source)
    else:
        file = Path(wish.vocab_file or "")
        source, names = file.parent, {file.name: file}
        if wish.merge_file:
            names = {"vocab.json": file, "merges.txt": Path(wish.merge_file)}
            names[TOKENIZER_JSON] = source / TOKENIZER_JSON  # which may have added tokens
        found = {name: each.read_bytes() for name, each in names.items() if each.is_file()}
    if not found:
        LOG.warning(
            f"data.tokenizer: {wish.vocab_file or wish.folder} is not there; the export holds no"
            " tokenizer, and generating with it needs one"
        )
        return False
    for name, content in (companions_in(source) | found).items():
        with atomic_write(folder / name) as copy:
            copy.write(content)
    return True


def refuse_to_replace(folder: Path, config: Run) -> None:
    """Raise ConfigError if an export exists and export.overwrite is false."""
    if folder.exists() and not config.export.overwrite:
        raise ConfigError(
            f"{folder}: an export is there; add export.overwrite=true to replace it, or choose"
            " another output_dir with checkpoint.load"
        )


def describe_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Return size and SHA-256 of each file below ``folder``, by its path from there."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                checksum = hashlib.file_digest(file, "sha256").hexdigest()
            name = path.relative_to(folder).as_posix()
            found[name] = {"bytes": path.stat().st_size, "sha256": checksum}
    return found


@contextmanager
def export_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder to fill, which is renamed to ``folder`` at the end.

    Nothing is left if a signal ends the process. Raises StorageError if the disk fails; an older one then stays.
    """
    remedy = "an older export is untouched; make room there, or choose another output_dir and say checkpoint.load"
    with exiting_at_sigterm(), whole_folder(folder, what="the export", remedy=remedy) as temporary:
        yield temporary
