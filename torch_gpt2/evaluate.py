"""What a checkpoint is worth: loss on the validation windows, perplexity of a text, last words of LAMBADA."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from common.cluster.environment import ALONE, Process
from common.config.load import flatten
from common.evaluation import RowBatch, Scorer, TokenScores, ValidationTask, open_task, report, score_rows
from common.parallel.resolved_run import ResolvedRun
from common.parallel.sharding import slices_of_rank
from common.training import setup
from common.training.agreement import check_everywhere
from common.training.loop import Tokens
from torch_gpt2.checkpoint import load_weights
from torch_gpt2.data import inputs_and_targets
from torch_gpt2.device import TorchDevice, open_device
from torch_gpt2.loss import ROWS_AT_ONCE
from torch_gpt2.model import GPT2
from torch_gpt2.parallel.data_parallel import LossSum
from torch_gpt2.parallel.layout import build_parts
from torch_gpt2.parallel.pipeline_parallel import Pipeline
from torch_gpt2.parallel.world import World, open_world


def evaluate(config: ResolvedRun, process: Process = ALONE) -> None:
    device = open_device(config, process)
    setup.check_memory(config, process, device)
    topology = config.topology
    if topology.world_size == 1:
        process = replace(process, rank=0, world_size=1)
    task, config = open_task(config, rank=topology.coordinates(process.rank).data)
    with open_world(config, process, device) as world:
        checkpoint = world.decide_on_rank_0(lambda: setup.weights_to_use(config, task.tokenizer_record))
        world.require_equal(dict(flatten(config.model_dump(exclude={"context"}))))
        check_everywhere(world, checkpoint, "checkpoint")
        parts = build_parts(config, device, world)
        parameters = {name: parameter for part in parts for name, parameter in part.named_parameters()}
        load_weights(parameters, config.model, checkpoint, slices_of_rank(config, topology, world.at, parameters))
        if isinstance(task, ValidationTask):
            pipeline = Pipeline(parts, config, world, device) if topology.pipeline > 1 else None
            loss_sum, counts = (pipeline.evaluate, pipeline.has_loss) if pipeline else (parts[0].loss_sum, True)
            figures = sum_losses(parts, loss_sum, task.windows(), device, world, counts=counts and world.at.tensor == 0)
            result = task.result(*figures)
        else:
            result = task.result(score_rows(task.rows, make_scorer(parts[0], device), config.evaluation.batch_size, task.unit))
        if world.rank == 0:
            report(config, checkpoint, result)


@torch.no_grad()
def sum_losses(
    parts: Sequence[GPT2], loss_sum: LossSum, batches: Iterable[Tokens], device: TorchDevice, world: World, *, counts: bool
) -> tuple[float, int]:
    """Sum of the losses over all predicted tokens of all ranks, in nats, and their number. counts: whether this rank's losses do."""
    for part in parts:
        part.eval()
    total, tokens = 0.0, 0
    for batch in batches:
        # a rank without a batch goes through the model all the same, for the ranks that need its part
        ids, targets = inputs_and_targets(batch if len(batch) else np.zeros((1, batch.shape[1]), np.int32), device)
        loss = loss_sum(ids, targets).item()
        if len(batch):
            total += loss
            tokens += targets.numel()
    total, all_tokens = world.sum(total, tokens) if counts else world.sum(0.0, 0.0)
    return total, int(all_tokens)


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
