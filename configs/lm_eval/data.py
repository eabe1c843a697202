"""Documents of the tasks beside this file, from files that ``--metadata`` names.

Each function takes the harness's metadata: the key of its name is the file, as in
``--metadata '{"lambada": "data/lambada_test.jsonl"}'``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from datasets import Dataset
from lm_eval.tasks.wikitext.preprocess_wikitext import (
    process_results as process_wikitext,
    wikitext_detokenizer as detokenize_wikitext,
)

from common.errors import DataError
from common.structured_files import MalformedError, parse_json, read_text

__all__ = ["chid", "detokenize_wikitext", "lambada", "process_wikitext", "wikitext"]

_LIMIT = 2**30
_WORDS = {str: "a text", list: "a list", int: "a whole number"}
_ARTICLE = re.compile(r"^(?= ?\n = [^=\n]+ = ?$)", re.MULTILINE)
"""Beginning of an article of WikiText: an empty line and its title, with one = on each side. Titles
of sections have more.
"""


def lambada(**metadata: Any) -> dict[str, Dataset]:
    """JSON Lines with the field text: OpenAI's lambada_test.jsonl."""
    path = _file(metadata, "lambada")
    return _test(path, _rows(path, {"text": str}))


def wikitext(**metadata: Any) -> dict[str, Dataset]:
    """A file such as wiki.test.raw, a document an article; or JSON Lines with the field page."""
    path = _file(metadata, "wikitext")
    if path.suffix in (".jsonl", ".json"):
        return _test(path, _rows(path, {"page": str}))
    pages = _ARTICLE.split(read_text(path, limit=_LIMIT, error=DataError))
    return _test(path, [{"page": page} for page in pages if page.strip()])


def chid(**metadata: Any) -> dict[str, Dataset]:
    """JSON Lines of FewCLUE's ChID: content with #idiom# in the place of an idiom, candidates, and
    answer, the number of the right one from 0. Adds sentences: the content with each candidate.
    """
    path = _file(metadata, "chid")
    rows = _rows(path, {"content": str, "candidates": list, "answer": int})
    for number, row in enumerate(rows, 1):
        if "#idiom#" not in row["content"] or not 0 <= row["answer"] < len(row["candidates"]):
            raise DataError(
                f"{path}: row {number}: expected #idiom# in content, and answer below the number of candidates"
            )
        row["sentences"] = [row["content"].replace("#idiom#", each) for each in row["candidates"]]
    return _test(path, [{name: row[name] for name in ("sentences", "answer")} for row in rows])


def _file(metadata: dict[str, Any], name: str) -> Path:
    if not isinstance(metadata.get(name), str):
        raise DataError(f'no file for this task; give it as --metadata \'{{"{name}": "FILE"}}\'')
    return Path(metadata[name])


def _rows(path: Path, fields: dict[str, type]) -> list[dict[str, Any]]:
    """The lines of a file that have the fields. Raises DataError for any other line."""
    rows = []
    for number, line in enumerate(read_text(path, limit=_LIMIT, error=DataError).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line, strict=False)
        except MalformedError as fault:
            raise DataError(f"{path}:{number}: not valid JSON: {fault}") from None
        for name, kind in fields.items():
            if not isinstance(row, dict) or not isinstance(row.get(name), kind):
                raise DataError(f"{path}:{number}: expected the field {name}, {_WORDS[kind]}")
        rows.append({name: row[name] for name in fields})
    return rows


def _test(path: Path, rows: list[dict[str, Any]]) -> dict[str, Dataset]:
    if not rows:
        raise DataError(f"{path}: holds no document")
    return {"test": Dataset.from_list(rows)}
