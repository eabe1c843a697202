"""Files of a tokenizer that go along where weights are written."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.errors import TokenizerError
from common.structured_files import MAX_JSON_BYTES, read_bytes, read_json_mapping
from common.tokenizer.folder import BESIDE, GENERATION, MODEL_IDS, VOCABULARIES

_NAMES = {
    "encoder.json": "vocab.json", "vocab.bpe": "merges.txt",  # OpenAI's
    "gpt2-vocab.json": "vocab.json", "gpt2-merges.txt": "merges.txt",  # Megatron-LM's
}  # fmt: skip
"""Files of a vocabulary that have another name in a copy."""


def vocabulary_in(folder: Path) -> dict[str, bytes]:
    """Return the content of the vocabulary's files in a folder, by their names in a copy. Raises
    TokenizerError.
    """
    return {_NAMES.get(name, name): _read(folder / name) for name in VOCABULARIES if (folder / name).is_file()}


def companions_in(folder: Path) -> dict[str, bytes]:
    """Return the content of what transformers keeps beside a vocabulary, by name. A
    generation_config.json is made of the ids in config.json where there is none. Raises
    TokenizerError.
    """
    names = [name for name in BESIDE if (folder / name).is_file()]
    found = {name: _read(folder / name) for name in names}
    if GENERATION not in found and (ids := ids_in(folder)):
        found[GENERATION] = (json.dumps(ids, indent=2) + "\n").encode()
    return found


def ids_in(folder: Path) -> dict[str, Any]:
    """Return the ids of the begin, the ends and the padding that generation_config.json names, else
    config.json; None stands for none.
    """
    found: dict[str, Any] = {}
    for file in (folder / "config.json", folder / GENERATION):
        with suppress(TokenizerError):  # not there, or no file of transformers
            fields = read_json_mapping(file, error=TokenizerError)
            given = {name: fields[name] for name in MODEL_IDS if name in fields}
            found = given | {name: each for name, each in found.items() if given.get(name) is None}
    return found


def _read(file: Path) -> bytes:
    return read_bytes(file, limit=MAX_JSON_BYTES, error=TokenizerError)
