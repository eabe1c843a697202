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
from common.evaluation.task import ValidationTask, open_task

__all__ = [
    "EvaluationResult",
    "RowBatch",
    "RowScores",
    "ScoredRow",
    "Scorer",
    "TokenScores",
    "ValidationTask",
    "open_task",
    "report",
    "score_rows",
    "score_tokens",
    "sliding_windows",
]
