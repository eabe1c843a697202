"""Task lambada: the last word of each passage."""

from __future__ import annotations

from common.errors import DataError
from common.evaluation.corpus import EvaluationFile, EvaluationResult, RowTask, table
from common.evaluation.rows import RowScores, ScoredRow
from common.parallel.run import Run
from common.tokenizer import Tokenizer
from common.tokenizer.text_tokenizer import encode_documents
from common.training.data import describe_tokenizer
from common.training.loop import perplexity


def open_lambada(file: EvaluationFile, tokenizer: Tokenizer, config: Run) -> RowTask:
    """Return the task to predict the last word of each passage (Paperno et al. 2016), as lm-eval's
    lambada_openai.

    The word begins after the last space and is encoded together with its context. It is right when
    each of its tokens is the most probable one after those before it. The perplexity is of words,
    not of tokens. Raises DataError for a plain text, a passage of one word, and a last word that is
    longer than the window.
    """
    if not file.is_json:
        raise DataError(
            f'{file.path}: is plain text; LAMBADA is read from JSON Lines, {{"text": "..."}} for each passage'
        )
    passages = file.texts[: config.evaluation.max_samples or None]
    contexts = [passage.rstrip().rpartition(" ")[0].rstrip() for passage in passages]
    for number, (passage, context) in enumerate(zip(passages, contexts, strict=True), 1):
        if not context:
            raise DataError(
                f"{file.path}: passage {number} is one word, {passage[:40]!r}; expected a context and a last word"
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
                f"{file.path}: the last word of passage {number} has {scored} tokens, expected 1 to"
                f" model.seq_length={window}; remove the passage"
            )
        rows.append(ScoredRow(tokens=tokens[-(window + 1) :], scored=scored))
        cut += len(tokens) > window + 1
    tokenizer_record = describe_tokenizer(tokenizer)

    def result(scores: RowScores) -> EvaluationResult:
        right = int(sum(hits == row.scored for hits, row in zip(scores.hits, rows, strict=True)))
        count, loss = len(rows), float(scores.nats.mean())
        record = {
            "task": "lambada",
            **file.record(),
            "passages": count,
            "cut_passages": cut,
            "last_word_tokens": sum(row.scored for row in rows),
            "tokenizer": tokenizer_record,
            "window": window,
            "correct": right,
            "accuracy": right / count,
            "loss": loss,
            "perplexity": perplexity(loss),
        }
        lines = [
            f"{file.path}: last word of {count:,} passages; {cut} cut to the window of {window}",
            *table({"accuracy": right / count, "loss of a word": loss, "perplexity": perplexity(loss)}),
            f" validation results on LAMBADA | number correct: {right:.4E} | total examples:"
            f" {count:.4E} | avg accuracy: {right / count:.4E}",
        ]
        return EvaluationResult(file_name="evaluation_lambada.json", record=record, lines=lines)

    return RowTask(tokenizer_record=tokenizer_record, rows=rows, result=result, unit="passage")
