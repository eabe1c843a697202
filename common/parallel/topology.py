"""Which rank does what: rank <-> (data, tensor, pipeline), the groups that ranks form, and the
layers of each.

Ranks are numbered in Megatron's order (``order="tp-cp-ep-dp-pp"`` of
megatron.core.parallel_state.RankGenerator): tensor fastest, so that the busiest group lies within a
server, then data, then pipeline. MindSpore's semi-automatic mode cuts ranks into stages the same
way: a stage is a contiguous range of ranks.

A stage is a piece of the stack of layers. With virtual stages a pipeline rank holds several: stage
s + k x pipeline on rank s (Megatron, arXiv 2104.04473, section 2.2), or, in ZB-V's shape, s and the
one as far from the end (arXiv 2401.10241, section 6).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from common.errors import ConfigError
from common.parallel.batch import check_divides

MAX_STAGES = 256
"""Most stages of a pipeline: more than the layers of any GPT, and few enough to plan each within a
second.
"""


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
    """Ranks of the first and the last stage, which both hold the tied embedding and sum its
    gradients; one rank where the pipeline is a V. The others have no such group.
    """


@dataclass(frozen=True, kw_only=True)
class Coordinates:
    """Where a rank stands on each axis, from 0. ``data`` says which samples it reads, ``pipeline``
    which stages it holds.
    """

    data: int
    tensor: int
    pipeline: int


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Sizes of the three axes, each at least 1, and how stages lie on the pipeline axis."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    """Stages of each pipeline rank."""
    v_shape: bool = False
    """The second stages of the ranks run back from the last rank to the first."""
    stage_layers: tuple[int, ...] | None = None
    """Layers of each stage; None for equally many."""

    def __str__(self) -> str:
        ranks = "rank" if self.world_size == 1 else "ranks"
        return (
            f"{self.world_size} {ranks} = data {self.data} x tensor {self.tensor} x pipeline"
            f" {self.pipeline}"
        )

    @property
    def world_size(self) -> int:
        return self.data * self.tensor * self.pipeline

    def coordinates(self, rank: int) -> Coordinates:
        """Raises ConfigError for a rank that is not in this world."""
        if not 0 <= rank < self.world_size:
            raise ConfigError(
                f"rank {rank} is not among {self}; expected 0 to {self.world_size - 1}: start as"
                " many processes as that"
            )
        rest, tensor = divmod(rank, self.tensor)
        pipeline, data = divmod(rest, self.data)
        return Coordinates(data=data, tensor=tensor, pipeline=pipeline)

    def rank(self, at: Coordinates) -> int:
        assert (
            0 <= at.data < self.data
            and 0 <= at.tensor < self.tensor
            and 0 <= at.pipeline < self.pipeline
        ), (at, self)
        return (at.pipeline * self.data + at.data) * self.tensor + at.tensor

    def group(self, kind: GroupKind, rank: int) -> Sequence[int]:
        """The ranks of the group to which ``rank`` belongs, itself among them, ascending; empty
        where it belongs to none.
        """
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
                return [
                    first + tensor
                    for first in self.group(GroupKind.PIPELINE, rank - at.tensor)
                    for tensor in range(self.tensor)
                ]
            case GroupKind.EMBEDDING:
                line, places = self.group(GroupKind.PIPELINE, rank), self.embedding_places
                return [line[place] for place in places] if at.pipeline in places else []

    def groups(self, kind: GroupKind) -> list[list[int]]:
        """All groups of a kind, by their first rank. Every process makes them in this order, member
        or not, as frameworks ask.
        """
        found: list[list[int]] = []
        seen: set[int] = set()
        for rank in range(self.world_size):
            if rank not in seen and (group := self.group(kind, rank)):
                found.append(list(group))
                seen.update(group)
        return found

    @property
    def stages(self) -> int:
        return self.pipeline * self.virtual

    def stages_of(self, place: int) -> tuple[int, ...]:
        """Stages that the pipeline rank at this place holds, in the order of the forward pass."""
        assert 0 <= place < self.pipeline, (place, self)
        if self.v_shape:
            return place, self.stages - 1 - place
        return tuple(range(place, self.stages, self.pipeline))

    def place_of_stage(self, stage: int) -> int:
        """The pipeline rank that holds it."""
        assert 0 <= stage < self.stages, (stage, self)
        return (
            self.stages - 1 - stage
            if self.v_shape and stage >= self.pipeline
            else stage % self.pipeline
        )

    @property
    def embedding_places(self) -> tuple[int, ...]:
        """Pipeline ranks that hold ``wte.weight``: with the first stage, which embeds tokens, and
        with the last, whose head is tied to it. A rank with both holds it once.
        """
        return tuple(sorted({0, self.place_of_stage(self.stages - 1)}))

    def holds_embedding(self, rank: int) -> bool:
        """True with the first stage: token and position embeddings."""
        return self.coordinates(rank).pipeline == 0

    def holds_head(self, rank: int) -> bool:
        """True with the last stage: the final layer norm, the head and the loss."""
        return self.coordinates(rank).pipeline == self.place_of_stage(self.stages - 1)

    def layers_of_stage(self, stage: int, num_layers: int) -> range:
        """Layers of a stage. Raises ConfigError where they do not divide, or where ``stage_layers``
        does not fit.
        """
        assert 0 <= stage < self.stages, (stage, self)
        if self.stage_layers is not None:
            self._check_split(num_layers)
            first = sum(self.stage_layers[:stage])
            return range(first, first + self.stage_layers[stage])
        if num_layers % self.stages and self.virtual > 1:
            raise ConfigError(
                f"parallel.pipeline_stage={self.pipeline} x {self.virtual} virtual stages ="
                f" {self.stages} do not divide model.num_layers={num_layers}; choose others, or"
                " give parallel.stage_layers, the layers of each"
            )
        check_divides("parallel.pipeline_stage", self.stages, "model.num_layers", num_layers)
        count = num_layers // self.stages
        return range(stage * count, (stage + 1) * count)

    def layers_of(self, place: int, num_layers: int) -> list[int]:
        """Layers of a pipeline rank, ascending."""
        return [
            layer
            for stage in self.stages_of(place)
            for layer in self.layers_of_stage(stage, num_layers)
        ]

    def layer_count(self, place: int, num_layers: int) -> int:
        """How many layers a pipeline rank holds, without listing them."""
        return sum(len(self.layers_of_stage(stage, num_layers)) for stage in self.stages_of(place))

    def stage_of_layer(self, layer: int, num_layers: int) -> int:
        """Raises ConfigError as ``layers_of_stage``."""
        assert 0 <= layer < num_layers, (layer, num_layers)
        return next(
            stage
            for stage in range(self.stages)
            if layer in self.layers_of_stage(stage, num_layers)
        )

    def _check_split(self, num_layers: int) -> None:
        split = self.stage_layers
        assert split is not None
        if len(split) != self.stages:
            virtual = f" x {self.virtual} virtual stages" if self.virtual > 1 else ""
            raise ConfigError(
                f"parallel.stage_layers={list(split)} names {len(split)} stages, but"
                f" parallel.pipeline_stage={self.pipeline}{virtual} makes {self.stages}; give one"
                " number a stage"
            )
        if sum(split) != num_layers:
            raise ConfigError(
                f"parallel.stage_layers={list(split)} add up to {sum(split)}, but"
                f" model.num_layers={num_layers}; make them agree"
            )
