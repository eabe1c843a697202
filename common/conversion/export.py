"""Export a checkpoint as a folder that other programs run: ONNX or GGUF.

FORMAT/model.onnx, model.onnx.data, config.json    onnx
FORMAT/model.gguf                                  gguf
FORMAT/generation_config.json                      how to generate, in transformers' words
FORMAT/export.json                                 where the weights come from, what the check
                                                   found, size and SHA-256 of each file
and the files of the tokenizer
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from common import run_folder
from common.conversion.logits import run_logits
from common.conversion.runners import installed_runners
from common.errors import CheckpointError, ConfigError
from common.files import atomic_write, reading
from common.generation.transformers_config import generation_config
from common.log import LOG, progress_bar
from common.parallel.resolved_run import ResolvedRun
from common.systems.hugging_face.config import CONFIG, write_config
from common.systems.hugging_face.tokenizer import end_of_text, put_tokenizer, without_tokenizer
from common.systems.onnx.write import write_onnx
from common.systems.table import FORMATS, detect
from common.systems.weights import Weights
from common.training.export import describe_files, export_folder, refuse_to_replace
from common.training.start import weights_to_use

FORMAT_VERSION = 1
RECORD = "export.json"
_OWN = "torch_gpt2"
"""The name of our own folders among FORMATS."""


def export_program(config: ResolvedRun) -> None:
    """Write the folder export.format in the run folder.

    Raises CheckpointError, ConfigError, StorageError, and RunError where the check fails; an older
    export is then untouched.
    """
    format = config.export.format
    assert format is not None
    folder = Path(config.output_dir) / format
    refuse_to_replace(folder, config)
    generation = generation_config(config)
    checkpoint = weights_to_use(config, None, export=True)
    source_format = detect(checkpoint)
    opened = FORMATS[source_format].open
    assert opened is not None
    with (
        run_folder.owned_folder(folder.parent),
        reading(checkpoint, CheckpointError),
        opened(checkpoint) as weights,
        export_folder(folder) as temporary,
    ):
        put_tokenizer(temporary, weights)
        for reason in without_tokenizer(weights).values():
            LOG.warning(f"the export lacks the {reason}")
        size = sum(weight.nbytes for weight in weights.tensors.values())
        with progress_bar(total=size, unit="B", description=folder.name) as bar:
            _write(format, temporary, weights.with_progress(bar.update), config)
        difference = _check(temporary, weights, source_format, config) if format == "onnx" else None
        _write_generation(temporary, weights, generation)
        files = describe_files(temporary)
        record = {
            "format_version": FORMAT_VERSION,
            "format": format,
            "weights": config.export.weights,
            "cache": config.export.cache,
            "checkpoint": str(checkpoint.resolve()),
            "step": None if weights.run is None else weights.run["state"]["step"],
            "model": weights.model.model_dump(),
            "tokenizer": weights.tokenizer,
            "largest_difference": difference,
            "files": files,
        }
        with atomic_write(temporary / RECORD, "w") as file:
            json.dump(record, file, indent=1)
    LOG.info(
        f"{folder}: weights of {checkpoint} as {config.export.weights}; "
        + ", ".join(f"{name} {record['bytes'] / 1e6:.1f} MB" for name, record in files.items())
    )


def _write(format: str, folder: Path, weights: Weights, config: ResolvedRun) -> None:
    write = FORMATS[format].write
    assert write is not None
    if format == "onnx":
        write = partial(write_onnx, cache=config.export.cache)
    write(folder, weights, config.export.weights)
    if FORMATS[format].hugging_face_config:
        write_config(folder / CONFIG, weights.model, "float32", end_of_text(weights))


def _check(
    folder: Path, weights: Weights, source_format: str, config: ResolvedRun
) -> Mapping[str, float] | None:
    """Return the largest difference of logits between the folder and the backend, by case; None
    where export.check is false.
    """
    if not config.export.check:
        return None
    from common.systems.onnx.check import compare, random_rows

    own = {"torch": _OWN, "mindspore": "mindspore"}[config.backend]
    runner = own if source_format == _OWN else source_format
    runners = installed_runners()
    if runner not in runners:
        raise ConfigError(
            f"export.check: nothing here computes the logits of {weights.path} ({source_format});"
            " install its framework, or set export.check=false"
        )
    ids = random_rows(weights.model.vocab_size, weights.model.max_positions)
    expected = run_logits(runners, runner, weights, ids)
    differences = compare(folder, ids, expected, is_exact=config.export.weights == "float32")
    for case, difference in differences.items():
        LOG.info(f"{case}: onnxruntime differs from backend={config.backend} by {difference:.2g}")
    return differences


def _write_generation(folder: Path, weights: Weights, fields: dict[str, Any]) -> None:
    if (end := end_of_text(weights)) is not None:
        fields |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end)
    with atomic_write(folder / "generation_config.json", "w") as file:
        json.dump(fields, file, indent=1)
