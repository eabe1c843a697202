"""Prompts from the configuration and from files, as tokens that fit the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError, DataError
from common.parallel.resolved_run import ResolvedRun
from common.structured_files import MAX_JSON_BYTES, MalformedError, parse_json, read_bytes
from common.tokenizer import Tokenizer
from common.tokenizer.lines import encode_prompt

DEFAULT_NEW_TOKENS = 100


@dataclass(frozen=True, kw_only=True)
class Prompt:
    text: str
    ids: list[int]
    new_tokens: int
    """Most tokens to add."""


def encode_prompts(config: ResolvedRun, tokenizer: Tokenizer) -> list[Prompt]:
    """The prompts of predict.prompt, then those of predict.prompt_file; each fits the model
    together with what is to be added, unless the window slides.

    Raises ConfigError or DataError, with the line of a file.
    """
    positions = config.model.max_positions
    return [
        _encode(text, where, config, tokenizer, positions) for where, text in given_prompts(config)
    ]


def sliding_window(config: ResolvedRun) -> int | None:
    """Return predict.window, or the positions where max_new_tokens is above them; None: a text
    stays within the positions.
    """
    settings, positions = config.predict, config.model.max_positions
    if settings.window is None and (settings.max_new_tokens or 0) <= positions:
        return None
    return settings.window or positions


def given_prompts(config: ResolvedRun) -> list[tuple[str, str]]:
    """Where each prompt stands, and its text: predict.prompt, then predict.prompt_file. Raises
    ConfigError or DataError.
    """
    settings = config.predict
    found = [("predict.prompt", text) for text in settings.prompt]
    if settings.prompt_file is not None:
        found += read_prompts(Path(settings.prompt_file))
    if not found:
        raise ConfigError(
            "predict.prompt is not given; for example predict.prompt='Once upon a time', or"
            " predict.prompt_file=FILE"
        )
    return found


def read_prompts(path: Path) -> list[tuple[str, str]]:
    """Where each prompt of a file stands, and its text. A blank line is no prompt. Raises
    DataError.
    """
    try:
        content = read_bytes(path, limit=MAX_JSON_BYTES, error=DataError).decode("utf-8-sig")
    except DataError as error:
        raise DataError(
            f"predict.prompt_file: {error}; expected a text or .jsonl file of prompts"
        ) from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}, line {line}: byte 0x{error.object[error.start]:02x} is not UTF-8; convert the"
            " file to UTF-8"
        ) from None
    lines = [
        (f"{path}, line {number}", line.removesuffix("\r"))
        for number, line in enumerate(content.split("\n"), 1)
        if line.strip()
    ]
    if path.suffix.lower() == ".json":
        raise DataError(
            f"predict.prompt_file={path}: expected one object a line; name such a file .jsonl"
        )
    prompts = list(_from_json(lines)) if path.suffix.lower() in (".jsonl", ".ndjson") else lines
    if not prompts:
        raise DataError(f"predict.prompt_file={path}: holds no prompt; write one a line")
    return prompts


def _from_json(lines: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    for where, line in lines:
        try:
            entry = parse_json(line, finite=False)  # Python writes NaN into such files
        except MalformedError as error:
            raise DataError(
                f'{where}: not JSON ({error}); expected an object such as {{"prompt": "Once upon a'
                ' time"}'
            ) from None
        text = (
            next((entry[key] for key in ("prompt", "text") if entry.get(key) is not None), None)
            if isinstance(entry, dict)
            else None
        )
        if not isinstance(text, str):
            raise DataError(
                f"{where}: expected an object with the text field prompt (or text), found"
                f" {line[:60]}"
            )
        yield where, text


def _encode(
    text: str, where: str, config: ResolvedRun, tokenizer: Tokenizer, positions: int
) -> Prompt:
    ids = encode_prompt(tokenizer, text).tolist()  # special tokens too, as transformers does
    if not ids:
        raise ConfigError(f"{where} is empty; give at least one token of text")
    room, most, least = (
        positions - len(ids),
        config.predict.max_new_tokens,
        config.predict.min_new_tokens,
    )
    wanted = most or max(least, 1)
    if sliding_window(config) is not None:
        return Prompt(text=text, ids=ids, new_tokens=most or max(least, DEFAULT_NEW_TOKENS))
    if room < wanted:
        key = "max_new_tokens" if most else "min_new_tokens"
        place = "" if where == "predict.prompt" else f"{where}: "
        raise ConfigError(
            f"{place}a prompt of {len(ids)} tokens and {wanted} to add go beyond the model's"
            f" {positions} positions; shorten the"
            f" prompt{f' or ask for predict.{key}={room}' if room > 0 and wanted > 1 else ''}"
            f"{f'; with predict.window={positions} the window slides' if most else ''}"
        )
    return Prompt(text=text, ids=ids, new_tokens=most or min(room, max(least, DEFAULT_NEW_TOKENS)))
