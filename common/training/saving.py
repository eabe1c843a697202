"""Choice of the steps to save, and weights of a run as transformers reads them.

Weights of a diverging run must not replace good ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from common.checkpoint.manifest import MANIFEST, read_manifest
from common.checkpoint.snapshot import TrainState
from common.checkpoint.writer import CheckpointWriter, Snapshot
from common.files import whole_folder
from common.log import LOG
from common.parallel.batch import batch_sizes, epochs_done
from common.processes.heartbeat import beat
from common.systems.hugging_face.tokenizer import put_tokenizer
from common.systems.hugging_face.weights import CONFIG, write_with_pickle
from common.systems.own_folder import open_project

SANE_LOSS = 10.0
"""Limit of a sane loss, as a multiple of a uniform guess's, ln(vocabulary).

A loss up to this limit shows that the weights before the step were good.
"""


class Saver:
    """Saver that passes the result of ``take`` to ``writer``. It must be told every step.

    Weights are those after a step. The next step or a validation gives their first loss. So nothing
    is saved after a step whose loss is not finite, or if every step since the last save was
    skipped. The newest checkpoint whose weights gave a sane loss is never pruned.
    """

    def __init__(
        self,
        writer: CheckpointWriter,
        take: Callable[[TrainState], Snapshot | None],
        *,
        vocabulary: int,
        saved_step: int | None,
    ) -> None:
        """Create a saver. saved_step: step of the checkpoint in the run's own folder from which it resumes."""
        self.saved_step = saved_step
        self._writer, self._take = writer, take
        self._most = SANE_LOSS * math.log(max(vocabulary, 3))
        self._loss = 0.0
        self._validation = (-1, 0.0)
        """Step and loss of the last validation."""
        self._learnt = False
        """Whether a step since the last save changed the weights."""
        self._told = False
        self.is_postponed = False
        if saved_step is not None:
            writer.resume(saved_step)

    def step(self, row: Mapping[str, Any]) -> None:
        self._learnt |= not row["skipped"]
        self._loss = row["loss"]
        self._judge(row["step"] - 1, self._loss)

    def validation(self, row: Mapping[str, Any]) -> None:
        self._validation = row["step"], row["validation_loss"]
        self._judge(*self._validation)

    def loss_of(self, step: int) -> float:
        """Return the loss of the last validation after ``step``, else the loss of the step itself."""
        return self._validation[1] if self._validation[0] == step else self._loss

    def _judge(self, step: int, loss: float) -> None:
        if math.isfinite(loss) and loss <= self._most:
            self._writer.confirm(step)

    def reason_not_saved(self) -> str:
        """Return why the weights must not be saved; empty if they may be."""
        if not math.isfinite(self._loss):
            return f"the loss is {self._loss}"
        if not self._learnt:
            return "every step since the last checkpoint was skipped"
        return ""

    def save_unless_diverging(self, state: TrainState) -> None:
        """Save; otherwise log the reason once and postpone the save."""
        reason = self.reason_not_saved()
        if reason:
            if not self._told:
                LOG.warning(
                    f"step {state.step}: no checkpoint is written: {reason}; those that are there stay as they are"
                )
            self._told = self.is_postponed = True
            return
        self._save(state)

    def save_last(self, state: TrainState) -> None:
        """Save the end of a run if its last loss is finite. No later step will test its weights."""
        self._judge(state.step, self.loss_of(state.step))
        self._save(state)

    def _save(self, state: TrainState) -> None:
        beat(state.step, "saving")
        self._writer.wait()  # it reads the memory into which the next snapshot is copied
        snapshot = self._take(state)
        if snapshot is not None:
            self._writer.save(snapshot)
        self.saved_step = state.step
        self._learnt = self._told = self.is_postponed = False


def write_epoch_models(checkpoint: Path, *, missing: bool = False) -> None:
    """Write the folders of transformers that are due at a checkpoint of a run: model_epoch{n} and
    final_model in output_dir, as GPT2-Chinese names them.

    missing: skip those that are newer than the checkpoint. Raises StorageError; an older folder of
    the same name is then unchanged.
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
        file, saved = target / CONFIG, (checkpoint / MANIFEST).stat().st_mtime_ns
        if missing and file.is_file() and file.stat().st_mtime_ns >= saved:
            continue
        remedy = "the checkpoint is whole; make room there, and start the run again"
        weights = open_project(checkpoint)
        with whole_folder(target, what="the model", remedy=remedy) as folder:
            put_tokenizer(folder, weights)
            write_with_pickle(folder, weights)
        LOG.info(f"{target}: the weights after step {step}, as transformers reads them")
