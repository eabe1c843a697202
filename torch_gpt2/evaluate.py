"""What a checkpoint is worth: loss on the validation windows, perplexity of a text, last words of LAMBADA."""

from __future__ import annotations

import torch
from torch import Tensor

from common.cluster.environment import ALONE, Process
from common.config.schema import RunConfig
from common.evaluation import RowBatch, Scorer, TokenScores, ValidationTask, open_task, report, score_rows
from common.training import setup
from torch_gpt2.checkpoint import load_weights
from torch_gpt2.device import TorchDevice, open_device
from torch_gpt2.engine import Engine
from torch_gpt2.loss import ROWS_AT_ONCE
from torch_gpt2.model import GPT2, build_model


def evaluate(config: RunConfig, process: Process = ALONE) -> None:
    device = open_device(config, process)
    task, config = open_task(config)
    checkpoint = setup.weights_to_use(config, task.tokenizer_record)
    model = build_model(config, device)
    load_weights(dict(model.named_parameters()), config.model, checkpoint)
    if isinstance(task, ValidationTask):
        result = task.result(*Engine(model, config, device).evaluate(task.windows()))
    else:
        result = task.result(score_rows(task.rows, make_scorer(model, device), config.evaluation.batch_size, task.unit))
    report(config, checkpoint, result)


def make_scorer(model: GPT2, device: TorchDevice) -> Scorer:
    """The model as ``score_rows`` uses it; logits exist for ROWS_AT_ONCE targets at one time, for padding never."""

    @torch.no_grad()
    def score(batch: RowBatch) -> TokenScores:
        count = len(batch.owners)
        ids, places, targets = (
            torch.from_numpy(values).to(device.torch_device, torch.int64)
            for values in (batch.ids, batch.places[:count], batch.targets[:count])
        )
        hidden = model(ids).flatten(0, 1)[places]  # (n, C)
        losses: list[Tensor] = []
        hits: list[Tensor] = []
        for start in range(0, hidden.shape[0], ROWS_AT_ONCE):
            logits = model.logits(hidden[start : start + ROWS_AT_ONCE])  # (ROWS_AT_ONCE, vocab_size)
            target = targets[start : start + ROWS_AT_ONCE]
            losses.append(logits.logsumexp(1) - logits.gather(1, target[:, None])[:, 0])
            hits.append(logits.argmax(1) == target)
        return TokenScores(losses=torch.cat(losses).cpu().numpy(), hits=torch.cat(hits).cpu().numpy())

    model.eval()
    return score
