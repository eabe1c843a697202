"""Error for a path that is not a checkpoint of this project: what is there, and what to do."""

from __future__ import annotations

import re
from pathlib import Path

from common.checkpoint.folders import NoCheckpointError
from common.errors import CheckpointError, UserError
from common.paths import looked_in
from common.systems.strangers import stranger_at
from common.systems.table import FORMATS, detect


def explained(error: NoCheckpointError) -> CheckpointError:
    """Return the error that says what is there instead of a checkpoint, and what to do."""
    return CheckpointError(f"{error.where}: no whole checkpoint here ({error.why}): {explain(error.where, error.why)}")


def explain(where: Path, why: str) -> str:
    """Return a sentence on what is at ``where``, which holds no checkpoint, and what to do. why:
    the key that names the path, or its purpose.
    """
    key = re.match(r"checkpoint\.(init_from|load|resume)", why)
    if not where.exists():
        say = f"there is no such file or folder{looked_in(where)}"
        if key is None or where.is_absolute() or where.suffix or len(where.parts) != 1:
            return say
        return f"{say}; a model of the Hugging Face hub is named as hf://OWNER/NAME, such as hf://openai-community/gpt2"
    try:
        if where.is_file() and where.suffix in (".safetensors", ".bin", ".json"):
            if FORMATS["torch_gpt2"].detects(where.parent):
                return f"it is a file of a checkpoint; give the folder {where.parent}"
            if FORMATS["hf"].detects(where.parent):
                where = where.parent
        format = FORMATS[detect(where)]
    except (UserError, OSError):
        return stranger_at(where) or "expected a run folder, its checkpoints folder or a step_... folder"
    if format.open is None:
        return f"it is {format.title}, which is written only; give the weights that it was made of"
    return f"it is {format.title}; give {key[0] if key else 'checkpoint.load'}={where}"
