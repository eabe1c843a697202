"""Which rank does what: rank <-> (data, tensor, pipeline), the groups that ranks form, and the layers of a stage.

Ranks are numbered in Megatron's order (``order="tp-cp-ep-dp-pp"`` of megatron.core.parallel_state.RankGenerator): tensor fastest, so that
the busiest group lies within a server, then data, then pipeline. MindSpore's semi-automatic mode cuts ranks into stages the same way:
a stage is a contiguous range of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from common.config.schema import ParallelConfig
from common.errors import ConfigError
from common.parallel.batch import check_divides


class GroupKind(StrEnum):
    TENSOR = "tensor"
    """Share the layers of a stage and the samples, each with its part of every layer."""
    DATA = "data"
    """Hold the same weights and see different samples; ZeRO splits over them."""
    PIPELINE = "pipeline"
    """Pass the same samples from stage to stage."""
    MODEL = "model"
    """Tensor x pipeline: together one whole model, so the gradient norm is summed over them."""
    EMBEDDING = "embedding"
    """First and last stage, which hold the tied embedding twice and sum its gradients. Ranks between them have no such group."""


@dataclass(frozen=True, kw_only=True)
class Coordinates:
    """Where a rank stands on each axis, from 0. ``data`` says which samples it reads, ``pipeline`` is its stage."""

    data: int
    tensor: int
    pipeline: int


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Sizes of the three axes, each at least 1."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1

    @classmethod
    def from_config(cls, parallel: ParallelConfig) -> Topology:
        """The layout as written; a ``data_parallel`` that nothing has derived yet is 1."""
        return cls(data=parallel.data_parallel or 1, tensor=parallel.model_parallel, pipeline=parallel.pipeline_stage)

    def __str__(self) -> str:
        ranks = "rank" if self.world_size == 1 else "ranks"
        return f"{self.world_size} {ranks} = data {self.data} x tensor {self.tensor} x pipeline {self.pipeline}"

    @property
    def world_size(self) -> int:
        return self.data * self.tensor * self.pipeline

    def coordinates(self, rank: int) -> Coordinates:
        """Raises ConfigError for a rank that is not in this world."""
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"rank {rank} is not among {self}; expected 0 to {self.world_size - 1}: start as many processes as that")
        rest, tensor = divmod(rank, self.tensor)
        pipeline, data = divmod(rest, self.data)
        return Coordinates(data=data, tensor=tensor, pipeline=pipeline)

    def rank(self, at: Coordinates) -> int:
        assert 0 <= at.data < self.data and 0 <= at.tensor < self.tensor and 0 <= at.pipeline < self.pipeline, (at, self)
        return (at.pipeline * self.data + at.data) * self.tensor + at.tensor

    def group(self, kind: GroupKind, rank: int) -> Sequence[int]:
        """The ranks of the group to which ``rank`` belongs, itself among them, ascending; empty where it belongs to none."""
        at, stage = self.coordinates(rank), self.data * self.tensor
        match kind:
            case GroupKind.TENSOR:
                return range(rank - at.tensor, rank - at.tensor + self.tensor)
            case GroupKind.DATA:
                first = rank - at.data * self.tensor
                return range(first, first + stage, self.tensor)
            case GroupKind.PIPELINE:
                return range(rank % stage, self.world_size, stage)
            case GroupKind.MODEL:
                return [first + tensor for first in self.group(GroupKind.PIPELINE, rank - at.tensor) for tensor in range(self.tensor)]
            case GroupKind.EMBEDDING:
                line = self.group(GroupKind.PIPELINE, rank)
                return [line[number] for number in self.embedding_stages] if at.pipeline in self.embedding_stages else []

    def groups(self, kind: GroupKind) -> list[list[int]]:
        """All groups of a kind, by their first rank. Every process makes them in this order, member or not, as frameworks ask."""
        found: list[list[int]] = []
        seen: set[int] = set()
        for rank in range(self.world_size):
            if rank not in seen and (group := self.group(kind, rank)):
                found.append(list(group))
                seen.update(group)
        return found

    @property
    def embedding_stages(self) -> tuple[int, ...]:
        """Stages that hold ``wte.weight``: the first embeds tokens, the last is the head tied to it. One stage holds it once."""
        return (0, self.pipeline - 1) if self.pipeline > 1 else (0,)

    def holds_embedding(self, rank: int) -> bool:
        """True on the first stage: token and position embeddings."""
        return self.coordinates(rank).pipeline == 0

    def holds_head(self, rank: int) -> bool:
        """True on the last stage: the final layer norm, the head and the loss."""
        return self.coordinates(rank).pipeline == self.pipeline - 1

    def layers_of_stage(self, stage: int, num_layers: int) -> range:
        """Layers of a stage, equally many on each. Raises ConfigError where they do not divide."""
        assert 0 <= stage < self.pipeline, (stage, self)
        check_divides("parallel.pipeline_stage", self.pipeline, "model.num_layers", num_layers)
        count = num_layers // self.pipeline
        return range(stage * count, (stage + 1) * count)

    def stage_of_layer(self, layer: int, num_layers: int) -> int:
        """Raises ConfigError where layers do not divide into stages."""
        assert 0 <= layer < num_layers, (layer, num_layers)
        return layer // len(self.layers_of_stage(0, num_layers))
