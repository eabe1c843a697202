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
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common import run_folder
from common.config.resolved import ResolvedModel
from common.conversion.logits import run_logits, why_not
from common.errors import CheckpointError, ConfigError, RunError
from common.files import atomic_write, reading
from common.generation.generate import ExportedModel
from common.generation.logit_rules import bad_words_ids, logit_biases
from common.log import LOG, progress_bar
from common.parallel.run import Run
from common.paths import require_package
from common.systems.gguf import write_gguf
from common.systems.hugging_face.tokenizer import put_tokenizer, special_ids
from common.systems.hugging_face.weights import write_config
from common.systems.onnx.folder import GRAPH_FILE, OnnxModel, write_onnx
from common.systems.table import FORMATS, detect
from common.systems.weights import Weights
from common.training.data import load_given_tokenizer
from common.training.export import describe_files, export_folder, refuse_to_replace
from common.training.opened_checkpoint import Checkpoint
from common.training.start import weights_to_use

TOLERANCE = 1e-4
"""Largest accepted difference of float32 logits: absolute for logits up to 10, relative to the
largest logit above that.
"""
_ROUNDING = {"float16": 2.0e-4, "int8": 0.0077, "int4": 0.087}
"""Standard deviation of the rounding error of a weight, relative to that of the weights.

float16 has 11 bits. In blocks of 32 the largest weight is 2.4 deviations, and a step is 1/128
(int8) or 1/8 (int4) of it. The inputs that such weights multiply are rounded to 8 bits as well.
"""
_MARGIN = 4
"""Safety factor: trained layers have outliers, and their blocks have larger steps."""
_MAX_NOISE = 0.5
"""Upper limit of the noise: a wrong order or scale makes an error as large as the logits."""


def _cases(
    model: ExportedModel, ids: NDArray[np.int64]
) -> Iterator[tuple[str, NDArray[np.float32], NDArray[np.bool_]]]:
    """Yield logits (B, T, vocab_size) of ids (B, T), each with its name and where there are some: all tokens at once,
    rows of different lengths with padding on the left, and a first part and then token by token.
    """
    everywhere, length = np.ones(ids.shape, bool), ids.shape[1]
    yield "all tokens at once", _logits(model, ids, [0, length]), everywhere
    yield "padding on the left", *_padded(model, ids)
    if model.has_cache:
        yield "token by token", _logits(model, ids, [0, *range(max(1, length // 2), length + 1)]), everywhere


def _logits(model: ExportedModel, ids: NDArray[np.int64], bounds: Sequence[int]) -> NDArray[np.float32]:
    """Return the logits of all tokens. Those between two of ``bounds`` are computed at once."""
    parts = [model.run(ids[:, first:last], np.ones((len(ids), last), np.int64)) for first, last in pairwise(bounds)]
    return np.concatenate(parts, 1)


def _padded(model: ExportedModel, ids: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Return the logits of the first tokens of each row, and where they stand. Row lengths differ."""
    rows, length = ids.shape
    lengths = [max(1, length - row * (length // rows)) for row in range(rows)]
    padded, mask = np.zeros_like(ids), np.zeros_like(ids)
    for row, own in enumerate(lengths):
        padded[row, length - own :] = ids[row, :own]
        mask[row, length - own :] = 1
    logits = model.run(padded, mask)
    found, there = np.zeros_like(logits), np.zeros(ids.shape, bool)
    for row, own in enumerate(lengths):
        found[row, :own], there[row, :own] = logits[row, length - own :], True
    return found, there


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
        open=lambda folder, model: OnnxModel(folder / GRAPH_FILE, model.max_positions),
        packages=("onnx", "onnxruntime"),
    ),
    "gguf": ProgramFormat(
        write=lambda folder, weights, config: write_gguf(folder, weights, config.export.weights),
        hugging_face_config=False,
        packages=("gguf",),
    ),
}
"""Formats that need no backend, by export.format."""


def export_program(config: Run, checkpoint: Checkpoint, program: ProgramFormat | None = None) -> None:
    """Write the folder export.format inside the run folder.

    program: how to write and run it, if the format is one of the backend's own. Raises CheckpointError, ConfigError and
    StorageError, and RunError if the check fails. An older export is then unchanged.
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
    with reading(path, CheckpointError):
        weights = opened(path)
    with (
        run_folder.owned_folder(folder.parent),
        reading(path, CheckpointError),
        export_folder(folder) as temporary,
    ):
        if (why := put_tokenizer(temporary, weights)) is not None:
            LOG.warning(f"the export lacks the files of the tokenizer: {why}")
        size = sum(weight.nbytes for weight in weights.tensors.values())
        LOG.info(f"{folder}: writing {size / 1e6:.1f} MB of weights as {config.export.weights}")
        with progress_bar(total=size, unit="B", description=folder.name) as bar:
            program.write(temporary, weights.with_progress(bar.update), config)
        if program.hugging_face_config:
            write_config(temporary, weights)
        comparison = _check(program, temporary, weights, source_format, config)
        ids = {name: each for name, each in special_ids(weights).items() if each is not None}
        if (end := ids.get("eos_token_id")) is not None:
            generation["pad_token_id"] = end[0] if isinstance(end, list) else end
        with atomic_write(temporary / "generation_config.json", "w") as file:
            json.dump(generation | ids, file, indent=1)
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


def _check(program: ProgramFormat, folder: Path, weights: Weights, source_format: str, config: Run) -> dict[str, Any]:
    """Return the largest differences between the logits of the folder and of the backend by case, and the noise:
    the standard deviation of the difference, relative to that of the logits. Where weights are not rounded, two orders
    of adding in float32 may differ by TOLERANCE. Nothing is compared if export.check is false or if nothing here runs
    the format. Raises RunError if the difference of a case is larger.
    """
    if program.open is None or not config.export.check:
        return {"largest_difference": None}
    own = {"torch": _OWN, "mindspore": "mindspore"}[config.backend]
    runner = own if source_format == _OWN else source_format
    if why_not(runner):
        raise ConfigError(
            f"export.check: nothing here computes the logits of {weights.path} ({source_format});"
            " install its framework, or set export.check=false"
        )
    shape = (3, min(weights.model.max_positions, 48))
    ids = np.random.default_rng(0).integers(0, weights.model.vocab_size, shape)
    allowed = None
    if rounding := _ROUNDING.get(config.export.weights):
        # each of the 4 products of a layer, the embedding and the head add the noise of one rounding
        allowed = min(_MARGIN * rounding * math.sqrt(4 * weights.model.num_layers + 2), _MAX_NOISE)
    model, expected = program.open(folder, weights.model), run_logits(runner, weights, ids)
    largest = float(np.abs(expected).max())  # a NaN stays a NaN, and fails every case
    differences, noises = {}, {}
    for case, found, compared in _cases(model, ids):
        errors = np.abs(found - expected)[compared]
        differences[case] = difference = float(errors.max())
        noises[case] = noise = float(np.sqrt((errors**2).mean()) / expected.std())
        is_right = difference <= TOLERANCE * max(1.0, largest / 10) if allowed is None else noise <= allowed
        if not is_right:
            raise RunError(
                f"the export, {case}: its logits differ from the model's by"
                f" {difference:.3g} of {largest:.3g} (noise {noise:.2g}), more than"
                " rounding does; nothing was exported, an older export is untouched; try another"
                " version of what runs it, or export.weights=float32"
            )
        told = "" if allowed is None else f", noise {noise:.2g} of {allowed:.2g} allowed"
        LOG.info(f"{case}: the export differs from backend={config.backend} by {difference:.2g}{told}")
    rounded = {} if allowed is None else {"noise": noises, "allowed_noise": allowed}
    return {"largest_difference": differences, **rounded}


def generation_config(config: Run) -> dict[str, Any]:
    """Return fields of generation_config.json, all but the ids of special tokens. Warns of settings that have none.

    Raises ConfigError and TokenizerError where texts of bad_words or logit_bias have no ids.
    """
    settings = config.predict
    fields: dict[str, Any] = {
        "do_sample": settings.method == "sampling",
        "max_new_tokens": settings.max_new_tokens,
        "min_new_tokens": settings.min_new_tokens,
        "num_return_sequences": settings.num_sequences,
        "repetition_penalty": settings.repetition_penalty,
        "no_repeat_ngram_size": settings.no_repeat_ngram_size,
        "stop_strings": settings.stop,
    }
    if settings.bad_words or settings.logit_bias:
        tokenizer, _ = load_given_tokenizer(config)
        words, biases = bad_words_ids(settings, tokenizer), logit_biases(settings, tokenizer)
        fields |= {
            "bad_words_ids": [list(ids) for ids in words],
            "sequence_bias": [[list(ids), value] for ids, value in biases.items()],
        }
    of_method = {
        "sampling": ("temperature", "top_k", "top_p", "min_p"),
        "beam_search": ("num_beams", "length_penalty", "early_stopping"),
    }
    fields |= {name: getattr(settings, name) for name in of_method.get(settings.method, ())}
    for name in ("presence_penalty", "frequency_penalty"):
        if value := getattr(settings, name):
            LOG.warning(f"predict.{name}={value} has no name in generation_config.json; left out")
    off = ("min_new_tokens", "no_repeat_ngram_size", "stop_strings", "bad_words_ids", "sequence_bias", "min_p")
    return {key: value for key, value in fields.items() if value is not None and (value or key not in off)}
