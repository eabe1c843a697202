"""Evaluate a checkpoint: validation loss, perplexity of a text, accuracy on LAMBADA."""

from __future__ import annotations

from functools import partial

import mindspore as ms
from mindspore import Tensor, nn, ops

from common.backends import Inputs
from common.cluster.environment import ALONE, Process
from common.evaluation.corpus import report
from common.evaluation.rows import RowBatch, Scorer, Scores
from common.evaluation.task import open_task, run_task
from common.parallel.run import Run
from common.training.start import weights_to_use
from mindformers_gpt2.checkpoint import load_model
from mindformers_gpt2.device import MindSporeDevice
from mindformers_gpt2.engine import sum_losses
from mindformers_gpt2.loss import ROWS_AT_ONCE
from mindformers_gpt2.model import GPT2
from mindformers_gpt2.parallel.world import World
from mindformers_gpt2.quantize import Quantization


def evaluate(config: Run, inputs: Inputs, process: Process = ALONE) -> None:
    device = inputs.device
    assert inputs.checkpoint is not None
    task = open_task(config, corpus=inputs.corpus, tokenizer=inputs.tokenizer)
    checkpoint = weights_to_use(config, inputs.checkpoint, task.tokenizer_record)
    model = load_model(config, device, checkpoint)
    quantization = Quantization(config, model, World()) if config.quantization else None
    if quantization is not None:
        quantization.load(checkpoint)
    measure = partial(sum_losses, device.compile(model.loss_sum), world=World(), packing=config.packing)
    result = run_task(task, config, measure, partial(make_scorer, model, device), quantization)
    report(config, checkpoint.path, result)


def make_scorer(model: GPT2, device: MindSporeDevice) -> Scorer:
    """Wrap the model for ``score_rows``. Logits exist for ROWS_AT_ONCE targets at a time."""
    token_scores = device.compile(_TokenScores(model))

    def score(batch: RowBatch) -> Scores:
        losses, hits = token_scores(Tensor(batch.ids), Tensor(batch.places), Tensor(batch.targets))
        return Scores(losses=losses.asnumpy(), hits=hits.asnumpy())

    return score


class _TokenScores(nn.Cell):
    """Cell that maps ids (B, T), places and targets (N,) to losses and hits (N,)."""

    def __init__(self, model: GPT2) -> None:
        super().__init__(auto_prefix=False)
        self.model = model
        self.log_softmax = ops.LogSoftmax(-1)
        self.most_probable = ops.Argmax(-1, ms.int32)

    def construct(self, ids: Tensor, places: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        # Calling the Cell would run decode instead, once a Decoder has compiled that.
        hidden = self.model.construct(ids)
        hidden = ops.Gather()(hidden.reshape((-1, hidden.shape[-1])), places, 0)
        losses: tuple[Tensor, ...] = ()
        hits: tuple[Tensor, ...] = ()
        for start in range(0, hidden.shape[0], ROWS_AT_ONCE):
            rows, target = (hidden[start : start + ROWS_AT_ONCE], targets[start : start + ROWS_AT_ONCE])
            if start:
                rows = ops.depend(rows, losses[-1])  # one chunk after the other
            logits = self.model.logits(rows)  # (ROWS_AT_ONCE, vocab_size)
            losses = (*losses, -ops.GatherD()(self.log_softmax(logits), 1, ops.expand_dims(target, 1)).reshape((-1,)))
            hits = (*hits, self.most_probable(logits) == target)
        return ops.concat(losses), ops.concat(hits)
