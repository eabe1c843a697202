"""Convert GPT-2 weights from any supported format to any other.

Names and shapes are checked, and tensors are written as a stream. The target folder is complete or absent.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from common.config.resolved import ResolvedModel
from common.conversion.logits import compare_logits
from common.errors import CheckpointError, ConfigError, StorageError, TokenizerError, UserError
from common.files import atomic_write, fsync_folder, reading, refuse_to_overwrite, temporary_folder, whole_folder
from common.hub import located
from common.log import LOG, progress_bar
from common.systems.hugging_face.tokenizer import put_tokenizer, tokenizer_of
from common.systems.hugging_face.weights import open_without_config, write_config
from common.systems.mindformers.write import write_file
from common.systems.table import FORMATS, detect
from common.systems.weights import FLOATS, Weights
from common.tensor_files.arrays import bytes_of
from common.tokenizer import load_tokenizer

REPORT = "conversion.json"
_USUAL_HEADS = {768: (12,), 1024: (16,), 1280: (20,), 1600: (25,), 8192: (64, 32)}
"""Width -> number of heads, for OpenAI's models and MindFormers' 52B model, whose heads are 256 wide."""


def _require_source(path: Path) -> None:
    """Raise ConfigError if nothing has this name, or if a folder above is absent, with similar names beside it."""
    if path.exists():
        return
    path = next(each for each in (*reversed(path.parents), path) if not each.exists())
    parent = path.absolute().parent
    names = [entry.name for entry in parent.iterdir()] if parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=3)
    hint = (
        f"did you mean {' or '.join(str(path.with_name(name)) for name in near)}?"
        if near
        else "give a path, or hf://OWNER/NAME for a model of the Hugging Face hub"
    )
    raise ConfigError(f"{path}: does not exist in {parent}; {hint}")


def convert(
    source: Path,
    target: Path,
    *,
    target_format: str,
    source_format: str | None = None,
    dtype: str | None = None,
    weights_only: bool = False,
    verify: bool = False,
    model_parallel: int = 1,
    pipeline_stage: int = 1,
) -> dict[str, Any]:
    """Convert the weights of ``source`` into ``target``. Return what its conversion.json says, and the step of the run
    that went along: None for weights alone.

    source: a path, or a model by name as ``common.hub`` takes it. dtype: type of the weights; the optimizer's state
    keeps its own. weights_only: leave out the optimizer's state and the position of the run. verify: read the target
    back, compare it bit for bit, and compare the logits of both. model_parallel, pipeline_stage: numbers of ranks, for
    a target that has a file for each rank.

    Raises CheckpointError, ConfigError and StorageError; ``target`` then does not exist.
    """
    target = target.resolve()  # a link stays, and leads to what is written
    if target == Path.cwd():
        raise ConfigError(
            f"{target}: --output is the current folder, which would be replaced; give the name of one inside it"
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target}: exists and is not empty; choose another --output, or move it away")
    source = located(source)
    _require_source(source)
    format, write = FORMATS[target_format], _writer(target_format, model_parallel, pipeline_stage)
    if dtype is not None and dtype not in format.dtypes:
        raise ConfigError(f"--dtype {dtype}: {target_format} holds {', '.join(format.dtypes)}; choose one of these")
    with ExitStack() as stack:
        with reading(source, CheckpointError):
            source_format = source_format or detect(source)
            if (opened := FORMATS[source_format].open) is None:
                raise ConfigError(
                    f"--from {source_format}: this format is written only; give the weights that it was made of"
                )
            weights = opened(source)
        temporary = stack.enter_context(
            whole_folder(target, what="the weights", remedy="make room there, or choose another --output")
        )
        warn_of_heads(source, weights.model)
        is_float = dtype is None or dtype in FLOATS
        if weights_only or not format.holds_run or not is_float:
            weights = weights.without_run()
        if (why := put_tokenizer(temporary, weights)) is not None:
            left_out = {"tokenizer": f"files of the tokenizer: {why}"}
            weights = replace(weights, ignored={**weights.ignored, **left_out})
        size = sum(tensor.nbytes for tensor in (*weights.tensors.values(), *weights.moments.values()))
        reads = model_parallel + verify  # the part of each tensor rank is cut from the whole tensor
        bar = stack.enter_context(progress_bar(total=size * reads, unit="B", description=target.name))
        weights = weights.with_progress(bar.update)
        sums = write(temporary, weights, dtype)
        if format.hugging_face_config:
            write_config(temporary, weights)
        _open_again(temporary, target_format, source)
        report: dict[str, Any] = {
            "from": source_format,
            "to": target_format,
            "input": str(source),
            "dtype": dtype,
            "tensors": _counts(weights),
            "ignored": dict(weights.ignored),
            "crc32": sums,
        }
        if verify:
            if is_float and (open_written := format.open) is not None:
                written = open_written(temporary)
                report["sha256"] = _compare(weights, written)
            else:  # the source's weights describe it: the program that runs it may compare logits
                tensors = {name: replace(each, dtype=dtype or "float32") for name, each in weights.tensors.items()}
                written = replace(weights, path=temporary, format=target_format, tensors=tensors)
            report["text"] = _compare_text(weights, temporary)
            report["logits"] = compare_logits(weights, source_format, written, target_format)
        with atomic_write(temporary / REPORT, "w") as file:
            json.dump(report, file, indent=1)
        return report | {"step": None if weights.run is None else weights.run["state"]["step"]}


def _counts(weights: Weights) -> dict[str, int]:
    return {"weights": len(weights.tensors), "optimizer": len(weights.moments), "left_out": len(weights.ignored)}


def _open_again(folder: Path, format: str, source: Path) -> None:
    """Raise CheckpointError unless what was written can be opened, by its headers and manifests."""
    opened = FORMATS[format].open_again or FORMATS[format].open
    try:
        if opened is not None:
            opened(folder)
    except UserError as error:
        reason = str(error).replace(f"{folder}/", "")
        raise CheckpointError(
            f"{source}: what was made of it cannot be read back: {reason}. A value in its config or"
            " in its run is wrong; fix or remove it there"
        ) from error


def _writer(target_format: str, tensor: int, stages: int) -> Callable[[Path, Weights, str | None], dict[str, int]]:
    format = FORMATS[target_format]
    if min(tensor, stages) < 1:
        raise ConfigError(f"--model_parallel={tensor} --pipeline_stage={stages}: give numbers of ranks, 1 or more")
    if format.write is None:
        raise ConfigError(f"--to {target_format}: this format is read only; say --to hf, which other programs know")
    if (tensor, stages) == (1, 1):
        return format.write
    if not format.has_ranks:
        sharded = " and ".join(name for name, format in FORMATS.items() if format.has_ranks)
        raise ConfigError(
            f"--model_parallel={tensor} --pipeline_stage={stages}: {target_format} is one model for"
            f" any layout; leave them out (only {sharded} have a file for each rank)"
        )
    return partial(format.write, tensor=tensor, stages=stages)


def convert_as_mindformers_did(layers: int, source: Path, target: Path) -> dict[str, Any]:
    """Convert Hugging Face's ``pytorch_model.bin`` into one ``.ckpt`` as MindFormers' own did; report as ``convert``.

    Raises ConfigError, StorageError, and CheckpointError, also for another number of layers; ``target`` is unchanged.
    """
    _require_source(source)
    target = target.resolve()
    if target.is_dir():
        raise ConfigError(f"{target}: is a folder; give --mindspore_path a file, such as {target / 'gpt2.ckpt'}")
    shards = (
        source.parent.glob(f"*{Path(source.name.removesuffix('.index.json')).suffix}")
        if source.name.endswith(".index.json")
        else ()
    )
    refuse_to_overwrite([source, *shards], [target], "choose another --mindspore_path")
    weights = open_without_config(source, layers)
    try:
        with temporary_folder(target) as folder:
            write_file(folder / target.name, weights, None)
            (folder / target.name).replace(target)
            fsync_folder(target.parent)
    except OSError as error:
        reason = error.strerror or error
        raise StorageError(
            f"{target}: could not be written: {reason}; make room there, or choose another --mindspore_path"
        ) from error
    return {"from": "hf", "tensors": _counts(weights), "ignored": dict(weights.ignored), "step": None}


_TEXT = "Hello, world! It's 12:30.\n\n  你好，世界 🙂 "


def _compare_text(weights: Weights, folder: Path) -> str:
    """Return how many tokens of a text with every mark are equal, or why there are none. Raises
    CheckpointError unless both tokenizers give the same ids, begin, ends and padding.
    """
    try:
        source = tokenizer_of(weights)
    except TokenizerError as error:
        return f"not compared, {error}"
    if source is None:
        return "not compared, the source has no tokenizer"
    text = _TEXT + " and ".join(source.added)
    rows = range(weights.model.vocab_size)  # a mark without a row was added to the tokenizer only
    expected, found = (
        (
            each.encode(text, allow_special=True).tolist(), each.bos_id, each.ends,
            each.pad_id if each.pad_id in rows else None,
        )
        for each in (source, load_tokenizer(None, folder))
    )  # fmt: skip
    if found != expected:
        raise CheckpointError(
            f"{folder}: its tokenizer gives other ids than that of {weights.path}: {found} instead"
            f" of {expected} for {text!r:.500} (ids, begin, ends, padding)"
        )
    return f"{len(expected[0])} tokens of a text with every mark are equal"


def _compare(weights: Weights, written: Weights) -> dict[str, str]:
    """Return the sha256 of each tensor as written, by our names. Raises CheckpointError unless each
    tensor, and the run, equal the source bit for bit.
    """
    there, expected = {**written.tensors, **written.moments}, {**weights.tensors, **weights.moments}
    wrong = ["the list of tensors"] if there.keys() != expected.keys() else []
    if json.dumps(written.run, sort_keys=True) != json.dumps(weights.run, sort_keys=True):
        wrong.append("where training stood")
    sums = {}
    for name, found in there.items():
        sums[name] = hashlib.sha256(bytes_of(found.load())).hexdigest()
        if name in expected and sums[name] != hashlib.sha256(bytes_of(expected[name].load_as(found.dtype))).hexdigest():
            wrong.append(name)
    if wrong:
        raise CheckpointError(f"{written.path}: read back, {', '.join(wrong)} differs from {weights.path}")
    return sums


def warn_of_heads(path: Path, model: ResolvedModel) -> None:
    """Warn if the number of heads is unusual for the width.

    Any number of heads that divides the width fits the shapes, so a wrong number cannot be detected otherwise.
    """
    width, heads = model.hidden_size, model.num_heads
    sizes = (16, 32, 64) if width < 256 else (64, 80, 96, 128)  # widths of a head
    usual = _USUAL_HEADS.get(width) or tuple(width // size for size in sizes if width % size == 0)
    if usual and heads not in usual:
        LOG.warning(
            f"{path}: its config says {heads} heads, where a GPT-2 of width {width} has"
            f" {' or '.join(map(str, usual))}; any number that divides the width fits the tensors,"
            " and with a wrong one they compute another function: compare with how it was trained"
        )
