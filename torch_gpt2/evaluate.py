"""Evaluate a checkpoint: validation loss, perplexity of a text, accuracy on LAMBADA."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from common.backends import Inputs
from common.cluster.environment import ALONE, Process
from common.config.load import flatten
from common.evaluation.corpus import report
from common.evaluation.rows import RowBatch, Scorer, Scores
from common.evaluation.task import open_task, run_task
from common.parallel.run import Run
from common.parallel.sharding import slices_of_rank
from common.training.opened_checkpoint import check_everywhere
from common.training.start import weights_to_use
from torch_gpt2.checkpoint import fill_weights
from torch_gpt2.device import TorchDevice
from torch_gpt2.engine import sum_losses
from torch_gpt2.int8 import load_integer_model
from torch_gpt2.loss import ROWS_AT_ONCE
from torch_gpt2.model import GPT2
from torch_gpt2.parallel.layout import build_parts
from torch_gpt2.parallel.pipeline_parallel import Pipeline
from torch_gpt2.parallel.world import open_world
from torch_gpt2.products import use_fastest_products
from torch_gpt2.quantize import Quantization


def evaluate(config: Run, inputs: Inputs, process: Process = ALONE) -> None:
    device, topology = inputs.device, config.topology
    assert inputs.checkpoint is not None
    if topology.world_size == 1:
        process = replace(process, rank=0, world_size=1)
    at = topology.coordinates(process.rank)
    task = open_task(config, corpus=inputs.corpus, tokenizer=inputs.tokenizer, rank=at.data)
    chosen = partial(weights_to_use, config, inputs.checkpoint, task.tokenizer_record)
    with open_world(config, process, device) as world:
        use_fastest_products(device, world)
        checkpoint = world.decide_on_rank_0(chosen)
        world.require_equal(dict(flatten(config.model_dump(exclude={"context"}))))
        check_everywhere(world, checkpoint, "checkpoint")
        integer = load_integer_model(config, device, checkpoint)
        parts = [integer] if integer else build_parts(config, device, world)
        if integer is None:
            parameters = {name: parameter for part in parts for name, parameter in part.named_parameters()}
            pieces = slices_of_rank(config, topology, world.at, parameters)
            fill_weights(parameters, checkpoint.weights(config.model, pieces))
        quantization = None if integer or not config.quantization else Quantization(config, parts, world)
        if quantization is not None:
            quantization.load(checkpoint)
        pipeline = Pipeline(parts, config, world, device) if topology.pipeline > 1 else None
        measure = partial(
            sum_losses,
            parts,
            pipeline.evaluate if pipeline else parts[0].loss_sum,
            device=device,
            world=world,
            packing=config.packing,
        )
        scorer = partial(make_scorer, parts[0], device)
        result = run_task(task, config, measure, scorer, quantization)
        if world.rank == 0:
            report(config, checkpoint.path, result)


def make_scorer(model: GPT2, device: TorchDevice) -> Scorer:
    """Wrap the model for ``score_rows``. Logits exist for ROWS_AT_ONCE targets at a time."""

    @torch.no_grad()
    def score(batch: RowBatch) -> Scores:
        count = len(batch.owners)
        ids, places, targets = (
            torch.from_numpy(values).to(device.torch_device, torch.int64)
            for values in (batch.ids, batch.places[:count], batch.targets[:count])
        )
        hidden = model(ids).flatten(0, 1)[places]  # (n, C)
        losses: list[Tensor] = []
        hits: list[Tensor] = []
        for start in range(0, hidden.shape[0], ROWS_AT_ONCE):
            # (ROWS_AT_ONCE, vocab_size)
            logits = model.logits(hidden[start : start + ROWS_AT_ONCE])
            target = targets[start : start + ROWS_AT_ONCE]
            losses.append(logits.logsumexp(1) - logits.gather(1, target[:, None])[:, 0])
            hits.append(logits.argmax(1) == target)
        return Scores(losses=torch.cat(losses).cpu().numpy(), hits=torch.cat(hits).cpu().numpy())

    model.eval()
    return score
