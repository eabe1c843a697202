"""Task of a run of --run_mode eval, opened from its config."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice

from common.config.schema import EvaluationConfig
from common.dataset.sampler import Tokens
from common.errors import ConfigError, DataError
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
) -> TrainingData | RowTask:
    """Open the windows of a validation in ``corpus``, or read the file of a task on text.

    rank: data-parallel rank, which selects validation windows. Raises ConfigError and TokenizerError.
    """
    settings = config.evaluation
    for name, field in EvaluationConfig.model_fields.items():
        value = getattr(settings, name)
        if name != "task" and name not in _SETTINGS[settings.task] and value != field.default:
            tasks = " or ".join(task for task, names in _SETTINGS.items() if name in names)
            raise ConfigError(
                f"evaluation.{name}={value} is for task {tasks}, and evaluation.task={settings.task};"
                " change the task or leave it out"
            )
    if corpus is not None:
        return open_data(config, corpus, rank=rank)
    window, stride = config.model.seq_length, settings.stride
    if stride is not None and stride > window:
        raise ConfigError(
            f"evaluation.stride={stride} is above model.seq_length={window}, and tokens between the"
            f" windows would be left out; give {window} or less"
        )
    file = read_evaluation_file(settings)
    assert tokenizer is not None
    opened = open_text if settings.task == "text" else open_lambada
    return opened(file, tokenizer, config)


def _watched(windows: Iterator[Tokens]) -> Iterator[Tokens]:
    for number, tokens in enumerate(windows):
        beat(number, "evaluating")
        yield tokens


def run_task(
    task: TrainingData | RowTask,
    config: Run,
    measure: Callable[[Iterable[Tokens]], tuple[float, int]],
    make_scorer: Callable[[], Scorer],
    quantization: QuantizedModel | None = None,
) -> EvaluationResult:
    """Return the result of a task: of rows, or the loss on the validation windows as an engine sums it in training.

    measure: returns the loss of windows, summed over their tokens in nats, and the number of these. quantization: whose
    missing scales are measured on the first batches. Raises DataError without any windows.
    """
    if isinstance(task, RowTask):
        rows, score, size = task.rows, make_scorer(), config.evaluation.batch_size
        if quantization is not None:
            some = rows[: size * CALIBRATION_BATCHES]
            quantization.calibrate(lambda: score_rows(some, score, size, task.unit))
        return task.result(score_rows(rows, score, size, task.unit))
    if not (parts := task.validation):
        raise DataError(
            f"there is nothing to evaluate on: {task.no_validation}; give data.validation, or a"
            " data.split with a validation part"
        )
    if quantization is not None:
        every = chain.from_iterable(_watched(windows()) for windows in parts.values())
        quantization.calibrate(lambda: measure(islice(every, CALIBRATION_BATCHES)))
    sums = {name: measure(_watched(windows())) for name, windows in parts.items()}
    figures = validation_figures(sums, task.validation_bytes())
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
    return EvaluationResult(file_name="evaluation.json", record=record, lines=[line, *part_lines(figures)])
