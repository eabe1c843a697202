"""A folder with a file for each generated text. A run that was stopped resumes filling it.

{i}-{j}.txt          continuation j of prompt i, both from 0, as GPT2-Chinese's generate_texts.py
                     names them: the prompt and what follows it
generation.json      the weights, the settings and the prompts that the texts come from
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.checkpoint.folders import NoCheckpointError
from common.config.schema import PredictConfig
from common.errors import ConfigError
from common.files import atomic_write
from common.generation.generate import Continuation
from common.generation.prompts import Prompt
from common.parallel.run import Run
from common.structured_files import read_json_mapping, shown
from common.training.opened_checkpoint import fingerprint, identity_of
from common.training.start import checkpoint_to_use

RECORD = "generation.json"
_DECISIVE = (
    "min_new_tokens", "max_new_tokens", "window", "top_k", "top_p",
    "repetition_penalty", "stop_at_end_of_text", "presence_penalty", "frequency_penalty",
    "logit_bias", "bad_words", "stop", "no_repeat_ngram_size", "min_p",
)  # fmt: skip
"""Settings of predict on which a text depends. The number of texts is not among them."""


class ArticleFolder:
    """Writes one file for each text. ``done``: index and number of the texts already written."""

    def __init__(self, folder: Path, prompts: Sequence[Prompt], config: Run) -> None:
        """Make the folder, or resume one that exists.

        Raises StorageError, and ConfigError if its texts come from other weights, settings or
        prompts.
        """
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"predict.output_folder={folder}: is a file; name a folder")
        self._folder = folder
        settings = config.predict
        record: dict[str, Any] = {
            "checkpoint": _identity(config),
            "seed": config.seed if settings.seed is None else settings.seed,
            "strategy": settings.method,
            "temperature": settings.temperature or 1.0,
            **{name: getattr(settings, name) for name in _DECISIVE},
            "prompts": [prompt.ids if prompt.is_given_as_ids else prompt.text for prompt in prompts],
        }
        if (folder / RECORD).exists():
            self._resume(record)
        with atomic_write(folder / RECORD, "w") as file:
            json.dump(record, file, ensure_ascii=False, indent=1)
        names = (re.fullmatch(r"(\d+)-(\d+)\.txt", path.name) for path in folder.iterdir())
        self.done = {(int(found[1]), int(found[2])) for found in names if found}

    def _resume(self, record: dict[str, Any]) -> None:
        """Check that the folder fits this run. Only the end of the list of prompts may differ."""
        before = read_json_mapping(self._folder / RECORD)
        unset = PredictConfig().model_dump()  # a folder may be older than a setting
        pairs = [(key, before.get(key, unset.get(key)), value) for key, value in record.items() if key != "prompts"]
        found = before.get("prompts")
        prompts = found if isinstance(found, list) else []
        for number, (old, new) in enumerate(zip(prompts, record["prompts"], strict=False)):
            pairs.append((f"prompt {number}", old, new))
        record["prompts"] += prompts[len(record["prompts"]) :]
        for name, old, new in pairs:
            if old != new:
                raise ConfigError(
                    f"predict.output_folder={self._folder}: its texts come from"
                    f" {name}={_quoted(name, old)}, and now it is {_quoted(name, new)};"
                    " choose another folder, or remove this one"
                )

    def write(self, sequence: Continuation) -> None:
        """Write one file whole. Raises StorageError."""
        path = self._folder / f"{sequence.index}-{sequence.number}.txt"
        with atomic_write(path, "w") as file:
            file.write(f"{(sequence.prompt.text + sequence.text).strip()}\n")


def _identity(config: Run) -> str:
    """Return a fingerprint of the weights: of a checkpoint, or of the files of an export."""
    try:
        return identity_of(checkpoint_to_use(config))
    except NoCheckpointError as error:  # an export
        return fingerprint(error.where)


def _quoted(name: str, value: Any) -> str:
    """Return a value for a message. Paths are not cut; their ends may differ."""
    return str(value) if name == "checkpoint" else shown(value)
