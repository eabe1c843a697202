"""Place of each rank: rank <-> (data, tensor, pipeline), groups of ranks, and their layers.

Ranks are numbered in Megatron's order (``order="tp-cp-ep-dp-pp"`` of megatron.core.parallel_state.RankGenerator):
tensor fastest, then data, then pipeline. The busiest group thus lies within a server. MindSpore's semi-automatic mode
assigns stages the same way: a stage is a contiguous range of ranks.

A stage is a piece of the stack of layers. With virtual stages a pipeline rank holds several. Rank s has stages s + k x
pipeline (Megatron, arXiv 2104.04473, section 2.2). In ZB-V's shape it has s and the one as far from the end (arXiv
2401.10241, section 6).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from common.errors import ConfigError
from common.parallel.batch import check_divides

MAX_STAGES = 256
"""Most stages of a pipeline: more than the layers of any GPT, and few enough to plan within a second."""


class GroupKind(StrEnum):
    TENSOR = "tensor"
    """Ranks that share the layers of a stage and the samples, each with its part of every layer."""
    DATA = "data"
    """Ranks that hold the same weights and see different samples; ZeRO splits over them."""
    PIPELINE = "pipeline"
    """Ranks that pass the same samples from stage to stage."""
    EMBEDDING = "embedding"
    """Ranks of the first and the last stage, which both hold the tied embedding and sum its gradients.

    It is one rank where the pipeline is a V. Ranks of other stages have no such group.
    """


@dataclass(frozen=True, kw_only=True)
class Coordinates:
    """Place of a rank on each axis, from 0.

    ``data`` decides which samples it reads, ``pipeline`` which stages it holds.
    """

    data: int
    tensor: int
    pipeline: int


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Sizes of the three axes, each at least 1, and the order of stages on the pipeline axis."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    """Stages of each pipeline rank."""
    v_shape: bool = False
    """Let the second stages of the ranks run back from the last rank to the first."""
    stage_layers: tuple[int, ...] | None = None
    """Layers of each stage; None for equally many."""

    def __str__(self) -> str:
        ranks = "rank" if self.world_size == 1 else "ranks"
        return f"{self.world_size} {ranks} = data {self.data} x tensor {self.tensor} x pipeline {self.pipeline}"

    @property
    def world_size(self) -> int:
        return self.data * self.tensor * self.pipeline

    def coordinates(self, rank: int) -> Coordinates:
        """Return the place of a rank."""
        assert 0 <= rank < self.world_size, (rank, self)
        rest, tensor = divmod(rank, self.tensor)
        pipeline, data = divmod(rest, self.data)
        return Coordinates(data=data, tensor=tensor, pipeline=pipeline)

    def rank(self, at: Coordinates) -> int:
        inside = 0 <= at.data < self.data and 0 <= at.tensor < self.tensor and 0 <= at.pipeline < self.pipeline
        assert inside, (at, self)
        return (at.pipeline * self.data + at.data) * self.tensor + at.tensor

    def group(self, kind: GroupKind, rank: int) -> Sequence[int]:
        """Return the ranks of the group that contains ``rank``, ascending; empty if there is none."""
        at, stage = self.coordinates(rank), self.data * self.tensor
        match kind:
            case GroupKind.TENSOR:
                return range(rank - at.tensor, rank - at.tensor + self.tensor)
            case GroupKind.DATA:
                first = rank - at.data * self.tensor
                return range(first, first + stage, self.tensor)
            case GroupKind.PIPELINE:
                return range(rank % stage, self.world_size, stage)
            case GroupKind.EMBEDDING:
                line, places = self.group(GroupKind.PIPELINE, rank), self.embedding_places
                return [line[place] for place in places] if at.pipeline in places else []

    def groups(self, kind: GroupKind) -> list[list[int]]:
        """Return all groups of a kind, by their first rank.

        Every process must create them in this order, member or not, as frameworks require.
        """
        found = (self.group(kind, rank) for rank in range(self.world_size))
        return [[*group] for rank, group in enumerate(found) if group and group[0] == rank]

    @property
    def stages(self) -> int:
        return self.pipeline * self.virtual

    def stages_of(self, place: int) -> tuple[int, ...]:
        """Return the stages of the pipeline rank at this place, in the order of the forward pass."""
        assert 0 <= place < self.pipeline, (place, self)
        if self.v_shape:
            return place, self.stages - 1 - place
        return tuple(range(place, self.stages, self.pipeline))

    def place_of_stage(self, stage: int) -> int:
        """Return the pipeline rank that holds a stage."""
        assert 0 <= stage < self.stages, (stage, self)
        return self.stages - 1 - stage if self.v_shape and stage >= self.pipeline else stage % self.pipeline

    @property
    def embedding_places(self) -> tuple[int, ...]:
        """Return the pipeline ranks that hold ``wte.weight``.

        They have the first stage, which embeds tokens, and the last, whose head is tied to it. A
        rank with both holds it once.
        """
        return tuple(sorted({0, self.place_of_stage(self.stages - 1)}))

    def holds_head(self, rank: int) -> bool:
        """Tell whether a rank has the last stage: the final layer norm, the head and the loss."""
        return self.coordinates(rank).pipeline == self.place_of_stage(self.stages - 1)

    def layers_of_stage(self, stage: int, num_layers: int) -> range:
        """Return the layers of a stage. Raises ConfigError if they do not divide or ``stage_layers`` does not fit."""
        assert 0 <= stage < self.stages, (stage, self)
        if self.stage_layers is not None:
            if len(self.stage_layers) != self.stages:
                virtual = f" x {self.virtual} virtual stages" if self.virtual > 1 else ""
                raise ConfigError(
                    f"parallel.stage_layers={list(self.stage_layers)} names {len(self.stage_layers)} stages, but"
                    f" parallel.pipeline_stage={self.pipeline}{virtual} makes {self.stages}; give one number per stage"
                )
            if sum(self.stage_layers) != num_layers:
                raise ConfigError(
                    f"parallel.stage_layers={list(self.stage_layers)} add up to {sum(self.stage_layers)}, but"
                    f" model.num_layers={num_layers}; make them agree"
                )
            first = sum(self.stage_layers[:stage])
            return range(first, first + self.stage_layers[stage])
        if num_layers % self.stages and self.virtual > 1:
            raise ConfigError(
                f"parallel.pipeline_stage={self.pipeline} x {self.virtual} virtual stages ="
                f" {self.stages} do not divide model.num_layers={num_layers}; change them, or give"
                " parallel.stage_layers, the layers of each"
            )
        check_divides("parallel.pipeline_stage", self.stages, "model.num_layers", num_layers)
        count = num_layers // self.stages
        return range(stage * count, (stage + 1) * count)

    def layers_of(self, place: int, num_layers: int) -> list[int]:
        """Return the layers of a pipeline rank, ascending."""
        return [layer for stage in self.stages_of(place) for layer in self.layers_of_stage(stage, num_layers)]

    def layer_count(self, place: int, num_layers: int) -> int:
        """Return the number of layers of a pipeline rank, without listing them."""
        return sum(len(self.layers_of_stage(stage, num_layers)) for stage in self.stages_of(place))
