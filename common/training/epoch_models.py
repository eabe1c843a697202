"""Export the weights of a run in the layout of GPT2-Chinese: model_epoch{n} and final_model,
folders of transformers in output_dir.
"""

from __future__ import annotations

from pathlib import Path

from common.checkpoint.manifest import MANIFEST, read_manifest
from common.files import whole_folder
from common.log import LOG
from common.parallel.ramp import batch_sizes, epochs_done
from common.systems.hugging_face.tokenizer import put_tokenizer
from common.systems.hugging_face.weights import CONFIG, write_with_pickle
from common.systems.own_folder import open_project


def write_epoch_models(checkpoint: Path, *, missing: bool = False) -> None:
    """Write the folders that are due at a checkpoint of a run. missing: skip those that are newer
    than the checkpoint.

    Raises StorageError; an older folder of the same name is then unchanged.
    """
    manifest = read_manifest(checkpoint, checksums=False)
    train, step = manifest["config"]["train"], manifest["state"]["step"]
    batches = batch_sizes(train["global_batch_size"], train.get("rampup_batch_size"))
    samples = manifest["samples_per_epoch"]
    epoch = epochs_done(step, batches, samples)
    names = [f"model_epoch{epoch}"] if epoch > epochs_done(step - 1, batches, samples) else []
    if step == train["max_steps"]:
        names.append("final_model")
    for name in names:
        target = checkpoint.parents[1] / name
        if missing and _is_newer(target, checkpoint):
            continue
        remedy = "the checkpoint is whole; make room there, and start the run again"
        with (
            open_project(checkpoint) as weights,
            whole_folder(target, what="the model", remedy=remedy) as folder,
        ):
            put_tokenizer(folder, weights)
            write_with_pickle(folder, weights)
        LOG.info(f"{target}: the weights after step {step}, as transformers reads them")


def _is_newer(target: Path, checkpoint: Path) -> bool:
    try:
        written = (target / CONFIG).stat().st_mtime_ns
    except OSError:
        return False
    return written >= (checkpoint / MANIFEST).stat().st_mtime_ns
