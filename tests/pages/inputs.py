"""The data, vocabularies and weights that a command of a page reads, as far as its words and its
configuration name them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from common.config.load import apply_overrides, flatten, read_own_config
from tests.pages.blocks import ROOT

_PROGRAM = re.compile(r"run_gpt2\.py|scripts/run_(?:distribute|standalone|slurm)\.sh")
_INPUTS = re.compile(
    r"data\.(?:train|validation|tokenizer(?:\.folder|\.vocab_file|\.merge_file)?)"
    r"|checkpoint\.(?:init_from|load)|evaluation\.file|predict\.prompt_file"
)
_READING = {"train", "finetune", "eval", "predict", "export", "serve"}
_MAKES = (
    (re.compile(r"(?:--local-dir|--output)[ =](\S+)"), ""),
    (re.compile(r"--output[-_]prefix[ =](\S+)"), "_text_document"),
    (re.compile(r"(?:--)?output_dir[ =](\S+)"), ""),
)


def made_by(command: str) -> Iterator[str]:
    """Paths that the command writes for later ones."""
    for pattern, ending in _MAKES:
        for found in pattern.findall(command):
            yield found + ending


def inputs_of(command: str, files: dict[str, Path]) -> Iterator[str]:
    """Paths that the command reads. files: configurations of the page itself, by name."""
    words = shlex.split(command)
    configs = [word.removeprefix("--config=") for word in words if word.endswith(".yaml")]
    if not (_PROGRAM.search(command) and configs and _READING & {*words}):
        return
    path = files.get(configs[0], ROOT / configs[0])
    if not path.is_file():  # a run's own, which names what the run had
        yield str(Path(configs[0]).parent)
        return
    changes = [word for word in words if re.match(r"[a-z_]+(?:\.[a-z_]+)*=", word)]
    tree, sources = read_own_config(path)
    apply_overrides(tree, sources, changes)
    for key, value in flatten(tree):
        if _INPUTS.fullmatch(key) and value is not None:
            for entry in value if isinstance(value, list) else [value]:
                if isinstance(entry, str) and not entry.startswith("hf://"):
                    yield entry.removeprefix(f"{ROOT}/")
