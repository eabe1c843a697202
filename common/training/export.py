"""Any checkpoint, in whichever parts ranks have written it, as one safetensors file: a tensor at a
time, and without a framework.

weights/model.safetensors    the file that one rank alone would have written: float32, true
vocabulary weights/manifest.json        the checkpoint's own, for this file alone, so that
checkpoint.load and checkpoint.init_from take the folder
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from common import run_folder
from common.files import whole_folder
from common.log import LOG
from common.parallel.resolved_run import ResolvedRun
from common.resolve.derive import resolve_vocabulary
from common.tensor_files.arrays import TensorKind
from common.tensor_files.safetensors_file import stream_safetensors
from common.training.checkpoint_reader import CheckpointReader
from common.training.manifest import read_manifest, write_manifest
from common.training.snapshot import MODEL_FILE
from common.training.start import weights_to_use
from common.weights.names import parameter_shapes


def export(config: ResolvedRun) -> None:
    """Write ``weights`` in the run folder. Raises CheckpointError naming every tensor that is
    missing, unexpected or not whole, and StorageError; an older export is then untouched.
    """
    checkpoint = weights_to_use(config, None, export=True)
    manifest = read_manifest(checkpoint, checksums=False)
    config = resolve_vocabulary(
        config, manifest["config"]["model"]["vocab_size"], f"the checkpoint {checkpoint}"
    )
    kinds = {
        name: TensorKind(dtype="float32", shape=shape)
        for name, shape in parameter_shapes(config.model).items()
    }
    folder = Path(config.output_dir) / "weights"
    with run_folder.owned_folder(folder.parent), export_folder(folder) as temporary:
        file = temporary / MODEL_FILE
        checksum = stream_safetensors(
            file,
            kinds,
            (values for _, values in CheckpointReader(checkpoint).weights(config.model)),
        )
        size = file.stat().st_size
        files = {MODEL_FILE: {"bytes": size, "crc32": checksum}}
        write_manifest(
            temporary, {**manifest, "exported_from": str(checkpoint.resolve()), "files": files}
        )
    LOG.info(
        f"{folder / MODEL_FILE}: {len(kinds)} tensors, {size / 1e6:.1f} MB, of {checkpoint}, step"
        f" {manifest['state'].get('step')}"
    )


def export_folder(folder: Path) -> AbstractContextManager[Path]:
    """A folder to fill, which gets the name ``folder`` at the end. Raises StorageError when the
    disk refuses, and an older one stays.
    """
    remedy = (
        "an older export is untouched; make room there, or choose another output_dir and say"
        " checkpoint.load"
    )
    return whole_folder(folder, what="the export", remedy=remedy)
