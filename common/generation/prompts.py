"""Prompts from the configuration and from files, as tokens that fit the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from common.dataset.encodings import require_no_nul
from common.errors import ConfigError, DataError
from common.generation.logit_rules import known_ids, sequence_biases
from common.parallel.run import Run
from common.structured_files import MAX_JSON_BYTES, MalformedError, parse_json, read_bytes
from common.tokenizer import Tokenizer
from common.tokenizer.text_tokenizer import encode_prompt, whole_text

DEFAULT_NEW_TOKENS = 100
Given: TypeAlias = str | Sequence[int]
"""A prompt as it was given: text or ids."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    text: str
    ids: list[int]
    new_tokens: int
    """Most tokens to add."""
    is_given_as_ids: bool = False
    """Whether the prompt was given as ids, and ``text`` was decoded from them."""


def encode_prompts(config: Run, tokenizer: Tokenizer, given: Sequence[Given] | None = None) -> list[Prompt]:
    """Return the prompts of predict.prompt, then those of predict.prompt_file, or only ``given``.

    Each fits the model together with the tokens to be added, unless the window slides. logit_bias and bad_words are
    checked here too, before weights are loaded. Raises ConfigError or DataError, with the line of a file.
    """
    sequence_biases(config.predict, tokenizer)
    places = given_prompts(config) if given is None else [("predict.prompt", each) for each in given]
    return [_encode(each, where, config, tokenizer) for where, each in places]


def sliding_window(config: Run) -> int | None:
    """Return predict.window, or the number of positions if max_new_tokens is above it.

    None means that texts stay within the positions. Raises ConfigError with beam search, which cannot slide.
    """
    settings, positions = config.predict, config.model.max_positions
    if settings.window is None and (settings.max_new_tokens or 0) <= positions:
        return None
    if settings.method == "beam_search":
        raise ConfigError(
            f"predict.strategy=beam_search: sequences stay within {positions} positions; leave"
            " predict.window out and lower predict.max_new_tokens, or set predict.strategy=sampling"
        )
    return settings.window or positions


def given_prompts(config: Run) -> list[tuple[str, Given]]:
    """Return the place and the text or ids of each prompt: predict.prompt, then
    predict.prompt_file. Raises ConfigError or DataError.
    """
    settings = config.predict
    found: list[tuple[str, Given]] = [("predict.prompt", each) for each in settings.prompt]
    if settings.prompt_file is not None:
        found += read_prompts(Path(settings.prompt_file))
    if not found:
        raise ConfigError(
            "predict.prompt is not given; for example predict.prompt='Once upon a time', or predict.prompt_file=FILE"
        )
    return found


def read_prompts(path: Path) -> list[tuple[str, Given]]:
    """Return the place and the text or ids of each prompt of a file. Blank lines are skipped.

    Raises DataError.
    """
    try:
        raw = read_bytes(path, limit=MAX_JSON_BYTES, error=DataError)
        require_no_nul(raw, f"{path}:")
        content = raw.decode("utf-8-sig")
    except DataError as error:
        raise DataError(f"predict.prompt_file: {error}; expected a text or .jsonl file of prompts") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}, line {line}: byte 0x{error.object[error.start]:02x} is not UTF-8; convert the file to UTF-8"
        ) from None
    lines = [
        (f"{path}, line {number}", line.removesuffix("\r"))
        for number, line in enumerate(content.split("\n"), 1)
        if line.strip()
    ]
    if path.suffix.lower() == ".json":
        raise DataError(f"predict.prompt_file={path}: expected one object a line; name such a file .jsonl")
    is_json = path.suffix.lower() in (".jsonl", ".ndjson")
    prompts: list[tuple[str, Given]] = list(_from_json(lines)) if is_json else [*lines]
    if not prompts:
        raise DataError(f"predict.prompt_file={path}: holds no prompt; write one a line")
    return prompts


def _from_json(lines: list[tuple[str, str]]) -> Iterator[tuple[str, Given]]:
    for where, line in lines:
        try:
            entry = parse_json(line)
        except MalformedError as error:
            raise DataError(
                f'{where}: not JSON ({error}); expected an object such as {{"prompt": "Once upon a time"}}'
            ) from None
        fields = entry if isinstance(entry, dict) else {}
        given = [fields[key] for key in ("prompt", "text", "ids") if fields.get(key) is not None]
        is_ids = bool(given) and isinstance(given[0], list) and all(type(each) is int for each in given[0])
        if not given or not (isinstance(given[0], str) or is_ids):
            raise DataError(
                f"{where}: expected an object with the text field prompt (or text), or a list of"
                f" ids in prompt (or ids), found {line[:60]}"
            )
        yield where, given[0]


def _encode(given: Given, where: str, config: Run, tokenizer: Tokenizer) -> Prompt:
    if isinstance(given, str):
        text, ids = given, encode_prompt(tokenizer, given).tolist()  # special tokens, too
    else:
        ids = [*known_ids(given, where, tokenizer)]
        text = whole_text(tokenizer, ids)
    if not ids:
        raise ConfigError(f"{where} is empty; give at least one token of text")
    positions = config.model.max_positions
    room, most, least = (positions - len(ids), config.predict.max_new_tokens, config.predict.min_new_tokens)
    wanted = most or max(least, 1)
    is_sliding = sliding_window(config) is not None
    if room < wanted and not is_sliding:
        key = "max_new_tokens" if most else "min_new_tokens"
        place = "" if where == "predict.prompt" else f"{where}: "
        raise ConfigError(
            f"{place}a prompt of {len(ids)} tokens and {wanted} to add go beyond the model's"
            f" {positions} positions; shorten the"
            f" prompt{f' or ask for predict.{key}={room}' if room > 0 and wanted > 1 else ''}"
            f"{f'; with predict.window={positions} the window slides' if most else ''}"
        )
    new = max(least, DEFAULT_NEW_TOKENS)
    return Prompt(
        text=text,
        ids=ids,
        new_tokens=most or (new if is_sliding else min(room, new)),
        is_given_as_ids=not isinstance(given, str),
    )
