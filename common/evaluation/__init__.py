"""Evaluation without the model: rows of tokens to score, and figures from their scores."""

from common.evaluation.report import EvaluationResult, report
from common.evaluation.rows import (
    RowBatch,
    RowScores,
    ScoredRow,
    Scorer,
    TokenScores,
    score_rows,
    score_tokens,
    sliding_windows,
)
from common.evaluation.task import open_task, run_task

__all__ = [
    "EvaluationResult",
    "RowBatch",
    "RowScores",
    "ScoredRow",
    "Scorer",
    "TokenScores",
    "open_task",
    "report",
    "run_task",
    "score_rows",
    "score_tokens",
    "sliding_windows",
]
