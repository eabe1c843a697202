"""Error for a path that is not a checkpoint of this project: what is there, and the commands that
convert it.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from common.checkpoint.folders import NoCheckpointError
from common.errors import CheckpointError, UserError
from common.paths import TOOLS, looked_in
from common.systems.run_state import MODEL_YAML
from common.systems.strangers import stranger_at
from common.systems.table import FORMATS, detect

_TOOL = Path("tools") / "convert_weight.py"


def explained(error: NoCheckpointError) -> CheckpointError:
    """Return the error that says what is there instead of a checkpoint, and what to do."""
    return CheckpointError(
        f"{error.where}: no whole checkpoint here ({error.why}): {explain(error.where, error.why)}"
    )


def explain(where: Path, why: str) -> str:
    """Return a sentence on what is at ``where``, which holds no checkpoint, and what to do. why:
    the key that names the path, or its purpose.
    """
    if not where.exists():
        return _absent(where, why)
    try:
        if where.is_file() and where.suffix in (".safetensors", ".bin", ".json"):
            if FORMATS["torch_gpt2"].detects(where.parent):
                return f"it is a file of a checkpoint; give the folder {where.parent}"
            if FORMATS["hf"].detects(where.parent):
                where = where.parent
        format = detect(where)
        if FORMATS[format].open is None:
            return (
                f"it is {FORMATS[format].title}, which is written only; give the weights that it"
                " was made of"
            )
        missing_config = FORMATS[format].missing_config
        first = missing_config(where) if missing_config else None
    except (UserError, OSError):
        return (
            stranger_at(where)
            or "expected a run folder, its checkpoints folder or a step_... folder"
        )
    output = _free_folder(where)
    say = f"it is {FORMATS[format].title}"
    if first:
        say += (
            f", without the {MODEL_YAML} that tells the number of heads; check the number"
            " below, write the file"
        )
        return f"{say} and convert:\n  {first}\n{_convert(where, output, why, format)}"
    return f"{say}; convert it first:\n{_convert(where, output, why, format)}"


def _absent(where: Path, why: str) -> str:
    say = f"there is no such file or folder{looked_in(where)}"
    if _key(why) is None or where.is_absolute() or where.suffix or len(where.parts) != 1:
        return say
    return (
        f"{say}; a model of the Hugging Face hub is named as hf://OWNER/NAME, such as"
        " hf://openai-community/gpt2"
    )


def _key(why: str) -> str | None:
    found = re.match(r"checkpoint\.(init_from|load|resume)", why)
    return found and found[0]


def _convert(where: Path, output: Path, why: str, format: str) -> str:
    """Return the command that converts it, and the key that takes the result."""
    tool = _TOOL if _TOOL.is_file() else TOOLS / _TOOL.name
    key = _key(why)
    if key == "checkpoint.resume" and not FORMATS[format].holds_run:
        key = "checkpoint.init_from"
    command = [
        "python",
        str(tool),
        "--to",
        "torch_gpt2",
        "--input",
        str(where),
        "--output",
        str(output),
    ]
    return f"  {shlex.join(command)}\n" + (
        f"then give {key}={output}" if key else f"and give {output} instead"
    )


def _free_folder(where: Path) -> Path:
    stem = re.sub(r"[^\w.-]+", "_", where.resolve().name.removesuffix(where.suffix)) or "weights"
    names = (f"{stem}_converted{number}" for number in ("", *(f"_{n}" for n in range(2, 1000))))
    return next(path for name in names if not (path := Path("output") / name).exists())
