"""Sections of a run with all derived values, and conversion of a config into them."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from pydantic import Field

from common.config.schema import (
    Count,
    Fraction,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    Section,
    TrainConfig,
    ValidationConfig,
)


class ResolvedModel(ModelConfig):
    ffn_hidden_size: Count
    max_positions: Count
    embedding_dropout: Fraction
    attention_dropout: Fraction
    hidden_dropout: Fraction


class ResolvedTrain(TrainConfig):
    micro_batch_size: Count
    global_batch_size: Count
    accumulation_steps: Count
    recompute: Literal["none", "selective", "full"] = "none"
    num_samples: Count | None = Field(default=None, exclude=True)
    """It counts in the log; the length is in steps."""

    @property
    def steps(self) -> int:
        """Return the length of a training in steps."""
        assert self.max_steps is not None
        return self.max_steps


class ResolvedValidation(ValidationConfig):
    micro_batch_size: Count
    max_batches: None = Field(default=None, exclude=True)
    """It has become max_samples."""


class ResolvedParallel(ParallelConfig):
    data_parallel: Count

    @property
    def shards(self) -> int:
        """Data-parallel ranks over which ZeRO splits; 1 if nothing is split."""
        return (self.shard_size or self.data_parallel) if self.zero_stage else 1


def resolve_model(model: ModelConfig) -> ResolvedModel:
    """Fill in the sizes and dropout rates that follow from others."""
    unsaid = [name for name, value in model if name.endswith("_dropout") and value is None]
    derived = {
        "ffn_hidden_size": model.ffn_hidden_size or 4 * model.hidden_size,
        "max_positions": model.max_positions or model.seq_length,
        **dict.fromkeys(unsaid, model.dropout),
    }
    return as_section(ResolvedModel, model, derived)


_Section = TypeVar("_Section", bound=Section)
_Run = TypeVar("_Run", bound=RunConfig)


def as_section(kind: type[_Section], section: Section, values: dict[str, Any]) -> _Section:
    """Return the section as this kind, with new values, which are not validated."""
    return kind.model_construct(**{**dict(section), **values})


def as_run(kind: type[_Run], config: RunConfig, **changes: Any) -> _Run:
    """Return the run as this kind.

    A mapping in ``changes`` updates a section; any other value replaces one.
    """
    values: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        old, new = getattr(config, name, field.default), changes.get(name, {})
        if not isinstance(new, dict):
            values[name] = new
        elif not new and type(old) is field.annotation:
            values[name] = old
        elif isinstance(old, Section) and isinstance(field.annotation, type):
            values[name] = as_section(field.annotation, old, new)
        else:
            values[name] = old
    return kind.model_construct(**values)
