"""A run with every derived value, as all code after the reading of files uses it.

Values computed from it (topology, batch, sizes, padded vocabulary) are computed once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from common.accelerators import Hardware
from common.config.resolved import ResolvedModel, ResolvedParallel, ResolvedTrain, ResolvedValidation, as_run
from common.config.schema import DataConfig, ParallelConfig, RunConfig
from common.errors import ConfigError
from common.parallel.batch import BatchSizes, batch_sizes, pad_vocabulary
from common.parallel.topology import MAX_STAGES, Topology

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Sizes:
    """Sizes of a micro batch on one rank; number types are given as their bytes.

    between: ranks that split activations between tensor-parallel regions, all with sequence parallelism, else 1.
    """

    def __init__(self, run: Run) -> None:
        model, precision, self.tensor = run.model, run.precision, run.parallel.model_parallel
        self.tokens = run.train.micro_batch_size * model.seq_length
        self.seq_length, self.heads = model.seq_length, model.num_heads
        self.hidden, self.ffn = model.hidden_size, model.ffn_hidden_size
        self.vocabulary = run.vocab_rows
        self.between = self.tensor if run.parallel.sequence_parallel else 1
        self.held, self.compute = BYTES[precision.parameters], BYTES[precision.compute]
        self.norm, self.softmax = BYTES[precision.layer_norm], BYTES[precision.softmax]
        self.region = self.tokens * self.hidden * self.compute
        """Input of attention or MLP, whole on each rank."""
        self.residual = self.region // self.between
        """Residual stream between blocks, which stages also send each other."""
        self.inner = self.tokens * self.ffn * self.compute // self.tensor
        """One tensor of the MLP's inner width."""
        self.mask = self.tokens * self.hidden // self.between
        """Dropout mask of a residual branch."""


UNCOUNTED = -1
"""Target of a position whose loss does not count."""


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Treatment of documents in a window. The rules are those of Megatron's get_ltor_masks_and_position_ids: a document
    ends with its end-of-document token, and the token after it is the first one of the next.

    eod: the token that ends a document. positions: count them from 0 in each document. attention:
    let a token attend to its own document only. masks_loss: leave out the losses of positions
    whose input is ``eod`` (True), or whose target is it ("targets").
    """

    eod: int
    positions: bool
    attention: bool
    masks_loss: bool | Literal["targets"]

    @property
    def separates(self) -> bool:
        """Whether the model needs to know the documents, and not only the loss."""
        return self.positions or self.attention

    def uncounted(self, tokens: Any) -> Any:
        """Return where a loss of windows (rows, columns) is left out, (rows, columns - 1) of bool.

        tokens: an array of numpy or a tensor. For packings with ``masks_loss``.
        """
        return (tokens[:, 1:] if self.masks_loss == "targets" else tokens[:, :-1]) == self.eod

    def counted(self, tokens: npt.NDArray[np.int32]) -> int:
        """Return the number of predictions that count in windows (rows, columns)."""
        out = np.count_nonzero(self.uncounted(tokens)) if self.masks_loss else 0
        return tokens[:, 1:].size - int(out)


def wanted_keys(data: DataConfig) -> list[str]:
    """Return the keys in use that need the end-of-document token, with their section."""
    names = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
    return [f"data.{name}" for name in names if getattr(data, name)]


class Run(RunConfig):
    """A run made by ``common.backends.make_run``. It is written and read as a RunConfig."""

    model: ResolvedModel
    train: ResolvedTrain
    validation: ResolvedValidation
    parallel: ResolvedParallel
    hardware: Hardware | None = Field(default=None, exclude=True)
    """The device that it computes on, as far as it is known."""

    @cached_property
    def topology(self) -> Topology:
        """Ranks, groups and stages."""
        return topology_of(self.parallel, self.parallel.data_parallel)

    @cached_property
    def batch_sizes(self) -> BatchSizes:
        """Sizes of the global batch along the run."""
        return batch_sizes(self.train.global_batch_size, self.train.rampup_batch_size)

    @cached_property
    def vocab_rows(self) -> int:
        """Rows of the embedding table, padding included."""
        return pad_vocabulary(self.model.vocab_size, self.model.vocab_multiple, self.parallel.model_parallel)

    @cached_property
    def sizes(self) -> Sizes:
        return Sizes(self)

    @cached_property
    def packing(self) -> Packing | None:
        """Treatment of documents that share a window; None if a window is one text.

        It is also None without the token, which ``open_data`` fills in: other work reads no windows.
        """
        data = self.data
        if data.eod_id is None or not wanted_keys(data):
            return None
        return Packing(
            eod=data.eod_id,
            positions=data.reset_position_ids,
            attention=data.reset_attention_mask,
            masks_loss=data.eod_mask_loss,
        )

    @cached_property
    def whole(self) -> Run:
        """The layout that the model has before DeepSpeed's ZeRO cuts it."""
        return as_run(Run, self, parallel={"zero_stage": 0, "shard_size": None})

    @cached_property
    def rounds_weights_once(self) -> bool:
        """Whether a step rounds float32 weights of linear layers once, for all its micro batches.

        torch's native engine does so where neither DDP nor FSDP needs the gradients of float32
        parameters, and no schedule adds up gradients by itself.
        """
        precision, parallel = self.precision, self.parallel
        return (
            (self.backend, self.engine) == ("torch", "native")
            and precision.parameters == "float32" != precision.compute
            and self.train.accumulation_steps > 1
            and self.quantization is None
            and precision.float8 == "none"
            and parallel.strategy == "ddp"
            and parallel.zero_stage == 0
            and (parallel.data_parallel == 1 or parallel.pipeline_stage > 1)
            and not (parallel.pipeline_stage > 1 and "zero_bubble" in parallel.pipeline_schedule)
        )


def topology_of(parallel: ParallelConfig, data: int) -> Topology:
    """Return the layout with this many data-parallel ranks.

    Raises ConfigError where virtual stages and the schedule contradict each other, and for more stages than MAX_STAGES.
    """
    schedule, virtual = parallel.pipeline_schedule, parallel.virtual_stages
    if schedule in ("gpipe", "1f1b") and (virtual or 1) > 1:
        raise ConfigError(
            f"parallel.virtual_stages={virtual}: parallel.pipeline_schedule={schedule} gives a rank one stage;"
            " choose pipeline_schedule=interleaved_1f1b or interleaved_zero_bubble, or leave virtual_stages out"
        )
    if schedule == "zbv_zero_bubble" and virtual not in (None, 2):
        raise ConfigError(
            f"parallel.virtual_stages={virtual}: parallel.pipeline_schedule={schedule} has 2 per"
            " rank; leave virtual_stages out"
        )
    has_several = parallel.pipeline_stage > 1 and schedule not in ("gpipe", "1f1b")
    virtual = (virtual or 2) if has_several else 1
    if parallel.pipeline_stage * virtual > MAX_STAGES:
        times = f" x {virtual} virtual stages = {parallel.pipeline_stage * virtual} stages" if virtual > 1 else ""
        raise ConfigError(
            f"parallel.pipeline_stage={parallel.pipeline_stage}{times}: at most {MAX_STAGES}"
            " stages are supported; lower it"
        )
    return Topology(
        data=data,
        tensor=parallel.model_parallel,
        pipeline=parallel.pipeline_stage,
        virtual=virtual,
        v_shape=schedule == "zbv_zero_bubble" and parallel.pipeline_stage > 1,
        stage_layers=tuple(parallel.stage_layers) if parallel.stage_layers is not None else None,
    )
