"""The weights of a run as GPT2-Chinese leaves them: model_epoch{n} and final_model, folders of
transformers in output_dir.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.files import whole_folder
from common.log import LOG
from common.systems.hugging_face.tokenizer import put_tokenizer
from common.systems.hugging_face.write import write_with_pickle
from common.systems.own_folder import open_project
from common.training.checkpoint_writer import after_saving
from common.training.epochs import epochs_done
from common.training.manifest import read_manifest


@contextmanager
def written_after_epochs() -> Iterator[None]:
    """Write them in the run of this block."""
    after_saving.append(write_epoch_models)
    try:
        yield
    finally:
        after_saving.remove(write_epoch_models)


def write_epoch_models(checkpoint: Path) -> None:
    """Write the folders that are due at a checkpoint of a run.

    Raises StorageError; an older folder of the name is then untouched.
    """
    manifest = read_manifest(checkpoint, checksums=False)
    train, step = manifest["config"]["train"], manifest["state"]["step"]
    batch, samples = train["global_batch_size"], manifest["samples_per_epoch"]
    epoch = epochs_done(step, batch, samples)
    names = [f"model_epoch{epoch}"] if epoch > epochs_done(step - 1, batch, samples) else []
    if step == train["max_steps"]:
        names.append("final_model")
    for name in names:
        target = checkpoint.parents[1] / name
        remedy = "the checkpoint is whole; make room there, and start the run again"
        with (
            open_project(checkpoint) as weights,
            whole_folder(target, what="the model", remedy=remedy) as folder,
        ):
            put_tokenizer(folder, weights)
            write_with_pickle(folder, weights)
        LOG.info(f"{target}: the weights after step {step}, as transformers reads them")
