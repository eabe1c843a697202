"""The run modes predict, eval and serve, with any function that opens the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from common.config.load import apply_overrides
from common.config.schema import PredictConfig, TokenizerConfig
from common.conversion.export import RECORD
from common.dataset.sampler import Tokens
from common.errors import ConfigError
from common.evaluation.corpus import report
from common.evaluation.rows import ScoredRow, Scorer, score_rows
from common.evaluation.task import open_task, run_task
from common.generation.generate import rows_at_once
from common.generation.output import write_continuations
from common.generation.prompts import encode_prompts
from common.inference.language_model import LanguageModel, checked_settings
from common.inference.load import PACKAGES, open_program
from common.inference.runner import Runner
from common.inference.source import PROGRAMS, Source, find_source, require_same_tokenizer
from common.log import LOG
from common.parallel.run import Run
from common.resolve.derive import resolve_other
from common.serving.engine import Slots
from common.serving.server import serve
from common.systems.table import FORMATS
from common.tokenizer import Tokenizer
from common.training.data import Corpus, describe_tokenizer
from common.training.export import OF_A_COMMAND
from common.training.start import multiple_for, require_same_model

Opener: TypeAlias = Callable[[dict[str, Any]], Runner]
"""Opens the model of a run. Takes the record of the tokenizer."""


def continue_prompts(config: Run, tokenizer: Tokenizer, opener: Opener) -> None:
    """Continue the prompts of the config, which are checked before the model is opened, and write the results."""
    prompts = encode_prompts(config, tokenizer)
    for prompt in prompts:
        if lost := sum(each == tokenizer.unknown_id for each in prompt.ids):
            LOG.warning(f"prompt {prompt.text[:40]!r}: the vocabulary lacks {lost} of its {len(prompt.ids)} tokens")
    runner = opener(describe_tokenizer(tokenizer))
    rows = rows_at_once(config.predict, len(prompts))
    write_continuations(runner.decoder(rows), prompts, config, tokenizer)


def serve_completions(config: Run, tokenizer: Tokenizer, opener: Opener, backend: str | None = None) -> None:
    """Serve completions over HTTP. backend: what computes, where the config has another."""

    def open_slots(count: int) -> Slots:
        slots = opener(describe_tokenizer(tokenizer)).slots
        assert slots is not None
        return slots(count)

    serve(config, tokenizer, open_slots, backend)


def continue_with(model: LanguageModel, words: Sequence[str]) -> None:
    """Continue prompts with an open model. words: settings ``predict.key=value``; others are those of the model's
    folder. Raises ConfigError.
    """
    own = model.source.run.get("predict") or {}
    known = PredictConfig.model_fields.keys() - set(OF_A_COMMAND)
    tree = {"predict": {key: value for key, value in own.items() if key in known}}
    apply_overrides(tree, {}, words)
    settings = checked_settings(tree["predict"])
    config = resolve_other(model.config, world_size=1, predict=settings)
    continue_prompts(config, model.tokenizer, lambda _: model.runner)


def program_to_use(config: Run) -> Source | None:
    """Return the export that checkpoint.load names, if it runs without conversion, else None.

    Raises CheckpointError for a broken export.
    """
    path = Path(config.checkpoint.load or "")
    is_export = (path / RECORD).is_file() or (path.parent / RECORD).is_file()
    is_graph = path.exists() and FORMATS["onnx"].detects(path)
    if config.checkpoint.load is None or not (is_export or is_graph):
        return None
    source = find_source(path)
    return source if source.is_program else None


def of_program(config: Run, source: Source) -> dict[str, Any]:
    """Return the keys that follow from an export: its vocabulary, and its tokenizer unless
    data.tokenizer names one. Raises CheckpointError if the config has another model.
    """
    require_same_model({"config": {"model": source.model.model_dump()}}, config, source.path)
    multiple = multiple_for(source.model.vocab_size, config.model.vocab_multiple)
    found: dict[str, Any] = {"model": {"vocab_multiple": multiple}}
    if config.data.tokenizer is None:
        found["data"] = {"tokenizer": TokenizerConfig(folder=str(source.folder))}
    backend = PROGRAMS[source.format][0]
    if backend in PACKAGES:
        found["backend"] = backend
    if source.run.get("precision"):
        found["precision"] = source.run["precision"]
    return found


def run_program(run_mode: str, config: Run, source: Source, corpus: Corpus | None, tokenizer: Tokenizer | None) -> None:
    """Predict, evaluate or serve with an export.

    Raises TokenizerError if the tokenizer is not that of the export.
    """

    def opener(record: dict[str, Any] | None) -> Runner:
        if record is not None:
            require_same_tokenizer(source, record)
        return open_program(source, config)

    if run_mode == "eval":
        task = open_task(config, corpus=corpus, tokenizer=tokenizer)
        scorer = opener(task.tokenizer_record).scorer()
        result = run_task(task, config, partial(_sum_losses, scorer), lambda: scorer)
        report(config, source.path, result)
        return
    assert tokenizer is not None
    if run_mode == "predict":
        continue_prompts(config, tokenizer, opener)
        return
    if source.format != "onnx":
        raise ConfigError(
            f"checkpoint.load={source.path}: --run_mode serve runs exports of ONNX, not of"
            f" {source.format}; give the checkpoint from which it was exported"
        )
    serve_completions(config, tokenizer, opener, source.format)


def _sum_losses(scorer: Scorer, batches: Iterable[Tokens]) -> tuple[float, int]:
    """Return the loss over validation windows in nats, and their number of tokens."""
    loss, tokens = 0.0, 0
    for windows in batches:
        rows = [ScoredRow(tokens=row, scored=len(row) - 1) for row in windows]
        loss += float(score_rows(rows, scorer, len(rows)).losses.sum())
        tokens += sum(row.scored for row in rows)
    return loss, tokens
