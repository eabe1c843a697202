"""Export a checkpoint as a folder that other programs run: ONNX, GGUF or a program of torch.

FORMAT/model.onnx, model.onnx.data, config.json    onnx
FORMAT/model.gguf                                  gguf
FORMAT/model.pt2, config.json                      pt2
FORMAT/generation_config.json                      how to generate, in transformers' words
FORMAT/export.json                                 where the weights come from, what the check
                                                   found, size and SHA-256 of each file
and the files of the tokenizer
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import run_folder
from common.config.resolved import ResolvedModel
from common.conversion.check import allowed_noise, compare, random_rows
from common.conversion.logits import installed_runners, run_logits
from common.errors import CheckpointError, ConfigError
from common.files import atomic_write, reading
from common.generation.exported import ExportedModel
from common.generation.transformers_config import generation_config
from common.log import LOG, progress_bar
from common.packages import require_package
from common.parallel.run import Run
from common.systems.gguf.write import write_gguf
from common.systems.hugging_face.config import CONFIG, write_config
from common.systems.hugging_face.tokenizer import put_tokenizer, special_ids, without_tokenizer
from common.systems.onnx.session import OnnxModel
from common.systems.onnx.write import GRAPH_FILE, write_onnx
from common.systems.table import FORMATS, detect
from common.systems.weights import Weights
from common.training.export import describe_files, export_folder, refuse_to_replace
from common.training.opened_checkpoint import Checkpoint
from common.training.start import weights_to_use

FORMAT_VERSION = 1
RECORD = "export.json"
_OWN = "torch_gpt2"
"""Name of our own folders among FORMATS."""


@dataclass(frozen=True, kw_only=True)
class ProgramFormat:
    """Functions that write a format and run it for the check."""

    write: Callable[[Path, Weights, Run], object]
    """Function that fills an empty folder."""
    open: Callable[[Path, ResolvedModel], ExportedModel] | None = None
    """Function that opens the export for the check; None if nothing here can run it."""
    hugging_face_config: bool = True
    """Whether transformers' config.json belongs to the export."""
    packages: tuple[str, ...] = ()
    """Packages of the extra export that writing and checking need."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the packages needed to read the files, for the record."""


PROGRAMS = {
    "onnx": ProgramFormat(
        write=lambda folder, weights, config: write_onnx(
            folder, weights, config.export.weights, cache=config.export.cache
        ),
        open=lambda folder, _: OnnxModel(folder / GRAPH_FILE),
        packages=("onnx", "onnxruntime"),
    ),
    "gguf": ProgramFormat(
        write=lambda folder, weights, config: write_gguf(folder, weights, config.export.weights),
        hugging_face_config=False,
        packages=("gguf",),
    ),
}
"""Formats that need no backend, by export.format."""


def export_program(
    config: Run, checkpoint: Checkpoint, program: ProgramFormat | None = None
) -> None:
    """Write the folder export.format inside the run folder.

    program: how to write and run it, if the format is one of the backend's own. Raises
    CheckpointError, ConfigError and StorageError, and RunError if the check fails. An older export
    is then unchanged.
    """
    format = config.export.format
    assert format is not None
    program = program or PROGRAMS[format]
    for package in program.packages:
        require_package(package, extra="export", purpose=f"which export.format={format} needs")
    folder = Path(config.output_dir) / format
    refuse_to_replace(folder, config)
    generation = generation_config(config)
    path = weights_to_use(config, checkpoint, None).path
    source_format = detect(path)
    opened = FORMATS[source_format].open
    assert opened is not None
    with (
        run_folder.owned_folder(folder.parent),
        reading(path, CheckpointError),
        opened(path) as weights,
        export_folder(folder) as temporary,
    ):
        put_tokenizer(temporary, weights)
        for reason in without_tokenizer(weights).values():
            LOG.warning(f"the export lacks the {reason}")
        size = sum(weight.nbytes for weight in weights.tensors.values())
        LOG.info(f"{folder}: writing {size / 1e6:.1f} MB of weights as {config.export.weights}")
        with progress_bar(total=size, unit="B", description=folder.name) as bar:
            program.write(temporary, weights.with_progress(bar.update), config)
        if program.hugging_face_config:
            write_config(temporary / CONFIG, weights.model, "float32", special_ids(weights))
        comparison = _check(program, temporary, weights, source_format, config)
        _write_generation(temporary, weights, generation)
        sizes = write_record(
            temporary,
            config,
            format=format,
            weights=config.export.weights,
            cache=config.export.cache,
            checkpoint=str(path.resolve()),
            step=None if weights.run is None else weights.run["state"]["step"],
            model=weights.model.model_dump(),
            tokenizer=weights.tokenizer,
            **comparison,
            **program.versions,
        )
    LOG.info(f"{folder}: weights of {checkpoint} as {config.export.weights}; {sizes}")


def write_record(folder: Path, config: Run, **facts: Any) -> str:
    """Write the record of the files in a folder, and return their sizes in words."""
    files = describe_files(folder)
    predict = config.predict.model_dump(exclude={"prompt", "prompt_file", "output_file"})
    record = {"format_version": FORMAT_VERSION, **facts, "predict": predict, "files": files}
    with atomic_write(folder / RECORD, "w") as file:
        json.dump(record, file, indent=1)
    return ", ".join(f"{name} {each['bytes'] / 1e6:.1f} MB" for name, each in files.items())


def _check(
    program: ProgramFormat,
    folder: Path,
    weights: Weights,
    source_format: str,
    config: Run,
) -> dict[str, Any]:
    """Return the differences between the logits of the folder and of the backend, by case. Nothing
    is compared if export.check is false or if nothing here runs the format.
    """
    if program.open is None or not config.export.check:
        return {"largest_difference": None}
    own = {"torch": _OWN, "mindspore": "mindspore"}[config.backend]
    runner = own if source_format == _OWN else source_format
    runners = installed_runners()
    if runner not in runners:
        raise ConfigError(
            f"export.check: nothing here computes the logits of {weights.path} ({source_format});"
            " install its framework, or set export.check=false"
        )
    ids = random_rows(weights.model.vocab_size, weights.model.max_positions)
    allowed = allowed_noise(config.export.weights, weights.model.num_layers)
    opened = program.open(folder, weights.model)
    found = compare(opened, ids, run_logits(runners, runner, weights, ids), allowed)
    for case, difference in found.items():
        noise = (
            "" if allowed is None else f", noise {difference.noise:.2g} of {allowed:.2g} allowed"
        )
        LOG.info(
            f"{case}: the export differs from backend={config.backend} by"
            f" {difference.largest:.2g}{noise}"
        )
    largest = {case: difference.largest for case, difference in found.items()}
    if allowed is None:
        return {"largest_difference": largest}
    noises = {case: difference.noise for case, difference in found.items()}
    return {"largest_difference": largest, "noise": noises, "allowed_noise": allowed}


def _write_generation(folder: Path, weights: Weights, fields: dict[str, Any]) -> None:
    ids = {name: each for name, each in special_ids(weights).items() if each is not None}
    if (end := ids.get("eos_token_id")) is not None:
        fields["pad_token_id"] = end[0] if isinstance(end, list) else end
    fields |= ids
    with atomic_write(folder / "generation_config.json", "w") as file:
        json.dump(fields, file, indent=1)
