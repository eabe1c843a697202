"""Task lambada: the last word of each passage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from common.errors import DataError
from common.evaluation.corpus import EvaluationFile, EvaluationResult, table
from common.evaluation.rows import RowScores, ScoredRow
from common.parallel.run import Run
from common.tokenizer import Tokenizer
from common.tokenizer.lines import encode_documents
from common.training.data import describe_tokenizer
from common.training.loop import perplexity


@dataclass(frozen=True, kw_only=True, eq=False)
class LambadaTask:
    """Predict the last word of each passage (Paperno et al. 2016), as lm-eval's lambada_openai.

    The word begins after the last space and is encoded together with its context. It is right when
    each of its tokens is the most probable one after those before it. The perplexity is of words,
    not of tokens.
    """

    file: EvaluationFile
    tokenizer_record: dict[str, Any]
    rows: list[ScoredRow]
    cut: int
    """Passages longer than the window, whose beginning is left out."""
    config: Run
    unit = "passage"

    @classmethod
    def open(cls, file: EvaluationFile, tokenizer: Tokenizer, config: Run) -> LambadaTask:
        """Encode the passages. Raises DataError for a plain text, a passage of one word, and a last
        word that is longer than the window.
        """
        if not file.is_json:
            raise DataError(
                f'{file.path}: is plain text; LAMBADA is read from JSON Lines, {{"text": "..."}}'
                " for each passage"
            )
        passages = file.texts[: config.evaluation.max_samples or None]
        contexts = [passage.rstrip().rpartition(" ")[0].rstrip() for passage in passages]
        for number, (passage, context) in enumerate(zip(passages, contexts, strict=True), 1):
            if not context:
                raise DataError(
                    f"{file.path}: passage {number} is one word, {passage[:40]!r}; expected a"
                    " context and a last word"
                )
        window = config.model.seq_length
        rows, cut = [], 0
        encoded = encode_documents(tokenizer, [passage.rstrip() for passage in passages]).rows()
        for number, (tokens, context_ids) in enumerate(
            zip(encoded, encode_documents(tokenizer, contexts).rows(), strict=True), 1
        ):
            scored = len(tokens) - len(context_ids)
            if not 0 < scored <= window:
                raise DataError(
                    f"{file.path}: the last word of passage {number} has {scored} tokens, expected"
                    f" 1 to model.seq_length={window}; remove the passage"
                )
            rows.append(ScoredRow(tokens=tokens[-(window + 1) :], scored=scored))
            cut += len(tokens) > window + 1
        return cls(
            file=file,
            tokenizer_record=describe_tokenizer(tokenizer),
            rows=rows,
            cut=cut,
            config=config,
        )

    def result(self, scores: RowScores) -> EvaluationResult:
        right = int(
            sum(hits == row.scored for hits, row in zip(scores.hits, self.rows, strict=True))
        )
        passages, loss = len(self.rows), float(scores.nats.mean())
        record = {
            "task": "lambada",
            **self.file.record(),
            "passages": passages,
            "cut_passages": self.cut,
            "last_word_tokens": sum(row.scored for row in self.rows),
            "tokenizer": self.tokenizer_record,
            "window": self.config.model.seq_length,
            "correct": right,
            "accuracy": right / passages,
            "loss": loss,
            "perplexity": perplexity(loss),
        }
        lines = [
            f"{self.file.path}: last word of {passages:,} passages; {self.cut} cut to the window of"
            f" {self.config.model.seq_length}",
            *table(
                {
                    "accuracy": right / passages,
                    "loss of a word": loss,
                    "perplexity": perplexity(loss),
                }
            ),
            f" validation results on LAMBADA | number correct: {right:.4E} | total examples:"
            f" {passages:.4E} | avg accuracy: {right / passages:.4E}",
        ]
        return EvaluationResult(file_name="evaluation_lambada.json", record=record, lines=lines)
