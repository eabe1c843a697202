"""Task of a run of --run_mode eval, opened from its config."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

from common.config.schema import EvaluationConfig
from common.dataset.sampler import Tokens
from common.errors import ConfigError
from common.evaluation.corpus import EvaluationResult, RowTask, read_evaluation_file
from common.evaluation.rows import Scorer, score_rows
from common.evaluation.text import open_lambada, open_text
from common.parallel.run import Run
from common.processes.heartbeat import beat
from common.quantization import CALIBRATION_BATCHES
from common.tokenizer import Tokenizer
from common.training.data import Corpus, TrainingData, open_data
from common.training.engine import QuantizedModel
from common.training.loop import validation_figures
from common.training.report import bits_a_byte, part_lines

Measure: TypeAlias = Callable[[Iterable[Tokens]], tuple[float, int]]
"""Returns the loss of windows in nats, the sum over all their tokens, and the number of these."""
VALIDATION_TASKS = ("validation",)
"""Tasks that measure on the validation windows of the data."""
_SETTINGS: dict[str, tuple[str, ...]] = {
    "validation": (),
    "text": ("file", "detokenize", "stride", "batch_size", "max_samples"),
    "lambada": ("file", "batch_size", "max_samples"),
}
"""Fields of EvaluationConfig that each task reads; others are refused, not ignored."""


def open_task(
    config: Run, *, corpus: Corpus | None = None, tokenizer: Tokenizer | None = None, rank: int = 0
) -> ValidationTask | RowTask:
    """Open the windows of a validation in ``corpus``, or read the file of a task on text.

    rank: data-parallel rank, which selects validation windows. Raises ConfigError and TokenizerError.
    """
    _check_settings(config.evaluation)
    if corpus is not None:
        return ValidationTask(config=config, data=open_data(config, corpus, rank=rank))
    window, stride = config.model.seq_length, config.evaluation.stride
    if stride is not None and stride > window:
        raise ConfigError(
            f"evaluation.stride={stride} is above model.seq_length={window}, and tokens between the"
            f" windows would be left out; give {window} or less"
        )
    file = read_evaluation_file(config.evaluation)
    assert tokenizer is not None
    opened = open_text if config.evaluation.task == "text" else open_lambada
    return opened(file, tokenizer, config)


def _check_settings(config: EvaluationConfig) -> None:
    for name, field in EvaluationConfig.model_fields.items():
        value = getattr(config, name)
        if name == "task" or name in _SETTINGS[config.task] or value == field.default:
            continue
        tasks = " or ".join(task for task, names in _SETTINGS.items() if name in names)
        raise ConfigError(
            f"evaluation.{name}={value} is for task {tasks}, and evaluation.task={config.task};"
            " change the task or leave it out"
        )


@dataclass(frozen=True, kw_only=True)
class ValidationTask:
    """Loss on the validation windows of the data, summed by an engine as during training."""

    config: Run
    data: TrainingData

    @property
    def tokenizer_record(self) -> dict[str, Any] | None:
        return self.data.tokenizer_record

    def windows(self) -> Iterator[Tokens]:
        """Yield the validation windows. Raises DataError when there are none."""
        for windows in self.data.require_validation().values():
            yield from _watched(windows())

    def result(self, measure: Measure) -> EvaluationResult:
        config = self.config
        figures = validation_figures(
            {name: measure(_watched(windows())) for name, windows in self.data.require_validation().items()},
            self.data.validation_bytes(),
        )
        tokens = figures.pop("validation_tokens")
        record = {
            "data": config.data.validation or config.data.train,
            "split": "whole" if config.data.validation else config.data.split,
            "window": config.model.seq_length,
            "tokens": tokens,
            **figures,
        }
        line = (
            f"validation loss {figures['validation_loss']:.6f}, perplexity"
            f" {figures['validation_perplexity']:.4f}{bits_a_byte(figures)} over {tokens} tokens in"
            f" windows of {config.model.seq_length}"
        )
        lines = [line, *part_lines(figures)]
        return EvaluationResult(file_name="evaluation.json", record=record, lines=lines)


def _watched(windows: Iterator[Tokens]) -> Iterator[Tokens]:
    for number, tokens in enumerate(windows):
        beat(number, "evaluating")
        yield tokens


def run_task(
    task: ValidationTask | RowTask,
    config: Run,
    measure: Measure,
    make_scorer: Callable[[], Scorer],
    quantization: QuantizedModel | None = None,
) -> EvaluationResult:
    """Return the result of a task.

    quantization: whose missing scales are measured on the first batches.
    """
    if isinstance(task, ValidationTask):
        if quantization is not None:
            quantization.calibrate(lambda: measure(islice(task.windows(), CALIBRATION_BATCHES)))
        return task.result(measure)
    score, size = make_scorer(), config.evaluation.batch_size
    if quantization is not None:
        some = task.rows[: size * CALIBRATION_BATCHES]
        quantization.calibrate(lambda: score_rows(some, score, size, task.unit))
    return task.result(score_rows(task.rows, score, size, task.unit))
