"""What lies where a checkpoint of this project was expected: another system's weights, with the commands that convert them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from common.conversion import hugging_face
from common.conversion.convert import FORMATS, detect
from common.conversion.mindformers import files_of
from common.conversion.model_yaml import MODEL_YAML
from common.conversion.weights import match_name_map
from common.errors import CheckpointError, UserError
from common.paths import looked_in
from common.tensor_files.containers import open_tensors
from common.training.checkpoint import NoCheckpointError
from common.weights.names import EMBEDDING

_ROOT = Path(__file__).resolve().parents[2]
_TOOL = Path("tools") / "convert_weight.py"
_HEAD_WIDTH = 64
_KINDS = {
    "hf": "a Hugging Face folder",
    "mindformers": "a checkpoint of MindFormers (.ckpt)",
    "mindformers_r0.3": "a checkpoint of MindFormers before 0.6 (.ckpt)",
    "megatron": "a checkpoint of Megatron-LM",
    "megatron_core": "a checkpoint of Megatron-Core",
    "openai": "a TensorFlow checkpoint of OpenAI's GPT-2",
    "fleetx": "a checkpoint of PaddleFleetX",
}


def explained(error: NoCheckpointError) -> CheckpointError:
    """Return the error that says what is there instead of a checkpoint, and what to do about it."""
    return CheckpointError(f"{error.where}: no whole checkpoint here ({error.why}): {explain(error.where, error.why)}")


def explain(where: Path, why: str) -> str:
    """Say what is at ``where``, which holds no checkpoint, and what to do about it. why: the key that names it, or its purpose."""
    if not where.exists():
        return _absent(where, why)
    try:
        if where.is_file() and where.suffix in (".safetensors", ".bin", ".json"):
            if FORMATS["torch_gpt2"].is_here(where.parent):
                return f"it is a file of a checkpoint; give the folder {where.parent}"
            if hugging_face.is_here(where.parent):
                where = where.parent
        format = detect(where)
        first = _write_model_yaml(where, format)
    except (UserError, OSError):
        return "expected a run folder, its checkpoints folder or a step_... folder"
    output = _free_folder(where)
    say = f"it is {_KINDS.get(format, format)}"
    if first:
        say += f", without the {MODEL_YAML} that tells the number of heads; check the number below, write the file"
        return f"{say} and convert:\n  {first}\n{_convert(where, output, why, format)}"
    return f"{say}; convert it first:\n{_convert(where, output, why, format)}"


def _absent(where: Path, why: str) -> str:
    say = f"there is no such file or folder{looked_in(where)}"
    if _key(why) is None or not _is_name(where):
        return say
    return (
        f"{say}. Nothing is downloaded by name: get the model's folder (config.json, model.safetensors) from Hugging Face, then convert it:"
        f"\n{_convert(Path(where.name), _free_folder(where), why, 'hf')}"
    )


def _is_name(where: Path) -> bool:
    """As gpt2 or openai-community/gpt2."""
    if where.is_absolute() or where.suffix:
        return False
    return len(where.parts) == 1 or (len(where.parts) == 2 and not where.parent.exists())


def _key(why: str) -> str | None:
    found = re.match(r"checkpoint\.(init_from|load|resume)", why)
    return found and found[0]


def _convert(where: Path, output: Path, why: str, format: str) -> str:
    """The command, and the key for its result."""
    tool = _TOOL if _TOOL.is_file() else _ROOT / _TOOL
    key = _key(why)
    if key == "checkpoint.resume" and not FORMATS[format].holds_run:
        key = "checkpoint.init_from"
    words = ["python", str(tool), "--to", "torch_gpt2", "--input", str(where), "--output", str(output)]
    return f"  {shlex.join(words)}\n" + (f"then give {key}={output}" if key else f"and give {output} instead")


def _free_folder(where: Path) -> Path:
    stem = re.sub(r"[^\w.-]+", "_", where.resolve().name.removesuffix(where.suffix)) or "weights"
    names = (f"{stem}_converted{number}" for number in ("", *(f"_{n}" for n in range(2, 1000))))
    return next(path for name in names if not (path := Path("output") / name).exists())


def _write_model_yaml(where: Path, format: str) -> str | None:
    """A shell command that writes the sizes of a MindFormers file beside it; None where they are known."""
    if not format.startswith("mindformers"):
        return None
    files = files_of(where)
    target = files[0].parent / MODEL_YAML
    if target.is_file():
        return None
    sizes = ", ".join(f"{key}: {value}" for key, value in _sizes(files[0], format).items())
    return f"echo 'model: {{{sizes}}}' > {shlex.quote(str(target))}"


def _sizes(file: Path, format: str) -> dict[str, Any]:
    """The section model as far as shapes tell it, with heads as wide as in OpenAI's models. Raises CheckpointError."""
    with open_tensors(file) as stored:
        name_map = match_name_map(file, format, stored)
        layers = 0
        while any(row.theirs.format(layer=layers) in stored for row in name_map.layer):
            layers += 1
        rows = {row.ours[0]: row for row in name_map.rows(1) if row.theirs in stored}
        shapes = {name: stored[row.theirs].shape for name, row in rows.items()}
        vocabulary, hidden = shapes.get(EMBEDDING, (0, 0))
        inner = shapes.get("h.0.mlp.c_fc.bias", (0,))[0]
    sizes = {"num_layers": layers, "hidden_size": hidden, "num_heads": max(1, hidden // _HEAD_WIDTH)}
    sizes |= {"seq_length": shapes.get("wpe.weight", (0, 0))[0], "vocab_size": vocabulary}
    return sizes | ({} if inner == 4 * hidden else {"ffn_hidden_size": inner})
