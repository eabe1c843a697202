"""Checkpoints of Megatron-DeepSpeed (``deepspeed``), of any tensor and pipeline size, with the
optimizer of ZeRO 0, 1 and 2.

Layout of the optimizer: ``state_dict`` in deepspeed/runtime/zero/stage_1_and_2.py,
bf16_optimizer.py, fp16/fused_optimizer.py, fp16/unfused_optimizer.py, and of torch's.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from common.config.values import STATE_PARTS, rule_keeping
from common.dialects.rules import whole
from common.errors import CheckpointError, ConfigError
from common.systems.deepspeed.files import NAME_MAP, Checkpoint, find_folder, open_checkpoint, short_name
from common.systems.megatron_args import args_of, in_version, weights_of_ranks
from common.systems.name_map import name_in_order, require_same
from common.systems.run_state import NO_SCALE, first_number, new_run
from common.systems.strangers import UNDER_DEEPSPEED
from common.systems.weights import Weights
from common.tensor_files.arrays import FileTensor, TensorFile
from common.tensor_files.pickled_values import Foreign
from common.weights.names import POSITIONS

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""Parameters by name, in the order of a vector."""


def cut(vector: Sequence[FileTensor], shapes: Shapes, gaps: Sequence[int] = (), first: int = 0) -> dict[str, Any]:
    """Return the parameters in a vector that is given in parts.

    gaps: elements between each parameter and the next; empty for none. first: elements before
    them. Up to two elements a part may fill the end. Raises ValueError where the vector holds other
    parameters.
    """
    found = {}
    for (name, shape), gap in zip(shapes.items(), gaps or [0] * len(shapes), strict=True):
        found[name] = _part(name, shape, vector, first)
        first += math.prod(shape) + gap
    there = _elements(part.shape for part in vector)
    if there >= first + 2 * len(vector):
        raise ValueError(f"it has {there} elements, and these weights {first}")
    return found


def own_parameters(vectors: Sequence[FileTensor], shapes: Shapes) -> dict[str, FileTensor]:
    """Return the parameters in the vectors of an optimizer without partitions.

    One vector holds all of them, or two hold the matrices and the vectors. The last stage of a
    pipeline has a copy of the embeddings before its own parameters. Raises ValueError.
    """
    matrices = {name: shape for name, shape in shapes.items() if len(shape) > 1}
    rest = {name: shape for name, shape in shapes.items() if name not in matrices}
    groups = [shapes] if len(vectors) == 1 else [matrices, rest]
    if len(vectors) == 2 and vectors[0].shape == (_elements(rest.values()),):
        groups.reverse()
    found: dict[str, FileTensor] = {}
    for vector, group in zip(vectors, groups, strict=True):
        first = math.prod(vector.shape) - _elements(group.values())
        found |= cut([vector], group, first=first)
    return {name: found[name] for name in shapes}


def _elements(shapes: Iterable[tuple[int, ...]]) -> int:
    return sum(map(math.prod, shapes))


def _part(name: str, shape: tuple[int, ...], vector: Sequence[FileTensor], first: int) -> FileTensor:
    """Return the tensor whose elements begin at ``first`` of a vector."""
    start, end = 0, first + math.prod(shape)
    pieces: list[tuple[FileTensor, slice]] = []
    for part in vector:
        if part.dtype != "float32" or len(part.shape) != 1:
            raise ValueError(f"a part of it is {part.dtype} {list(part.shape)}")
        low, high = max(first - start, 0), min(end - start, part.shape[0])
        if low < high:
            pieces.append((part, slice(low, high)))
        start += part.shape[0]
    there = sum(span.stop - span.start for _, span in pieces)
    if there != end - first:
        raise ValueError(f"of {name} {list(shape)} only {there} of {end - first} elements are there")

    def load() -> NDArray[Any]:
        arrays = [part.read()[span] for part, span in pieces]
        return arrays[0] if len(arrays) == 1 else np.concatenate([np.empty(0, np.float32), *arrays])

    return FileTensor(dtype="float32", shape=shape, load=load)


@dataclass(frozen=True, kw_only=True)
class Saved:
    """State of a model-parallel rank's optimizer, by the names of the parameters."""

    parts: Mapping[str, dict[str, FileTensor]]
    """Parts of the state, and as "" the float32 weights, which are absent where the weights themselves are float32."""
    steps: Mapping[Path, int | None]
    """Number of updates that were made, by file."""
    state: Mapping[str, Any]
    """Tree of the optimizer, which holds the loss scale."""


def read_optimizers(there: Checkpoint) -> tuple[list[Saved], str]:
    """Return the optimizer of each model-parallel rank, or nothing and why not.

    Raises CheckpointError where files of partitions do not fit the weights, and where ranks do not
    fit each other. Raises ConfigError for ZeRO-3.
    """
    if there.optimizers:
        found = [
            _read_partitions(files, model, there) for files, model in zip(there.optimizers, there.models, strict=True)
        ]
    elif not all(isinstance(model.tree.get("optimizer"), dict) for model in there.models):
        return [], ""
    else:
        left: list[list[Shapes]] = [
            [{name: part.shape for name, part in layer.items()} for layer in layers] for layers in there.layers
        ]
        ranks, last_stage = len(left), len(there.models) - len(left)
        try:
            found = [
                _read_whole(model, left[number % ranks], is_last=number >= last_stage)
                for number, model in enumerate(there.models)
            ]
        except _OTHER_FORMS as error:
            return [], f"not of these weights, or of an unknown form ({error!r}): only weights"
    told = {path: {"number of updates": steps} for one in found for path, steps in one.steps.items()}
    require_same(told, lambda path: path.name)
    return found, ""


_OTHER_FORMS = (KeyError, IndexError, TypeError, AttributeError, ValueError)
"""Errors of reading a tree of another form."""


def _read_partitions(files: Sequence[TensorFile], model: TensorFile, there: Checkpoint) -> Saved:
    path = files[0].path
    try:
        states = [file.tree["optimizer_state_dict"] for file in files]
        for file, state in zip(files, states, strict=True):
            stage = state.get("zero_stage", 1)  # BF16_Optimizer names none, and cuts as 1 does
            if (stage.arguments[0] if isinstance(stage, Foreign) else stage) not in (0, 1, 2):
                raise ConfigError(
                    f"{file.path}: ZeRO-3, whose weights lie in pieces of each; save the checkpoint"
                    " with zero_optimization.stage 1, or make a universal one of it and load that"
                )
        shapes = model.tree["param_shapes"]
        groups: list[Shapes] = [
            {short_name(name, there.blocks): tuple(shape) for name, shape in group.items()}
            for group in (shapes if isinstance(shapes, list) else [shapes])
        ]
        gaps = states[0].get("param_alignment_paddings") or [()] * len(groups)
        inner = [_records(state) for state in states]

        def merged(ranks: Iterable[Sequence[FileTensor]]) -> dict[str, FileTensor]:
            """ranks: the vector of each group, by data rank."""
            found: dict[str, FileTensor] = {}
            for group, gap, vectors in zip(groups, gaps, zip(*ranks, strict=True), strict=True):
                found |= cut(vectors, group, gap)
            return found

        kept = [part for part in STATE_PARTS if inner[0] and part in inner[0][0]]
        return Saved(
            parts={"": merged(state["single_partition_of_fp32_groups"] for state in states)}
            | {part: merged([record[part] for record in records] for records in inner) for part in kept},
            steps={
                file.path: _steps(records, state) for file, records, state in zip(files, inner, states, strict=True)
            },
            state=states[0],
        )
    except _OTHER_FORMS as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(
            f"{path}: its optimizer is not of these weights, or of an unknown form: {reason}; copy"
            f" all {len(files)} of its files again, or take them away"
        ) from None


def _records(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the state of each group's vector in the optimizer inside ZeRO's."""
    base = state["base_optimizer_state"]
    if isinstance(base, list):  # one record for each group: the elastic form
        return base
    ids = [number for group in base["param_groups"] for number in group["params"]]
    return [base["state"][number] for number in ids] if base["state"] else []


def _steps(records: Sequence[Mapping[str, Any]], state: Mapping[str, Any]) -> int | None:
    """Return the number of updates, which a vector's record, its group or ZeRO's state holds."""
    base = state.get("base_optimizer_state", state)
    group = base["param_groups"][0] if isinstance(base, dict) else {}
    places = [*(records[:1]), group, {"step": state.get("base_optimizer_state_step")}]
    found = next((place["step"] for place in places if place.get("step") is not None), None)
    return None if found is None else whole(first_number(found))


def _read_whole(model: TensorFile, layers: list[Shapes], *, is_last: bool) -> Saved:
    """Read an optimizer without partitions.

    layers: parameters of the layers after the earlier stages. Those of this stage are removed from it. They are found
    by the number of elements in its optimizer.
    """
    tree = model.tree["optimizer"]
    inner = tree.get("optimizer_state_dict", tree)
    ids = [number for group in inner["param_groups"] for number in group["params"]]
    records = [inner["state"][number] for number in ids if number in inner["state"]]
    copies = [copy for group in tree.get("fp32_groups", ()) for copy in group]
    flat = list(tree.get("fp32_groups_flat", ()))
    lists = {part: [one[part] for one in records] for part in STATE_PARTS if records and part in records[0]}
    own = copies or flat or next(iter(lists.values()), [])
    elements, shapes = _elements(one.shape for one in own), dict[str, tuple[int, ...]]()
    while layers and (is_last or elements > 0):
        layer = layers.pop(0)
        shapes |= layer
        elements -= _elements(layer.values())
    if not is_last and elements:
        raise ValueError("the layers do not end where it ends")

    def named(values: Sequence[FileTensor]) -> dict[str, FileTensor]:
        if flat:
            return own_parameters(values, shapes)
        # a last stage has a copy of the embeddings before its own matrices
        matrices = [value for value in values if len(value.shape) > 1]
        others = matrices[: max(0, len(matrices) - sum(len(shape) > 1 for shape in shapes.values()))]
        return name_in_order(shapes, [value for value in values if value not in others])

    lists |= {"": copies or flat} if copies or flat else {}
    return Saved(
        parts={part: named(values) for part, values in lists.items()},
        steps={model.path: _steps(records, inner)},
        state=tree,
    )


def detects(path: Path) -> bool:
    try:
        return find_folder(path) is not None
    except (CheckpointError, ConfigError):  # reported when the files are opened
        return True


def open_deepspeed(path: Path) -> Weights:
    """Open a checkpoint.

    path: the root with ``latest``, its folder global_stepN, or a file in that. Raises CheckpointError and ConfigError.
    """
    there = open_checkpoint(path)
    first = there.models[0]
    if any(name.endswith(f".{POSITIONS}") for name in first):
        root = there.folder.parent
        raise CheckpointError(f"{path}: {UNDER_DEEPSPEED.format(root=root)}")
    name_map = in_version(first.path, first.tree.get("checkpoint_version", 0), NAME_MAP)
    ranks = [{name: tensor for layer in layers for name, tensor in layer.items()} for layers in there.layers]
    saved, why_not = read_optimizers(there)
    parts = {
        # a last stage has a copy of the embeddings of the first
        part: [
            dict(ChainMap(*(one.parts.get(part, {}) for one in saved[rank :: len(ranks)])))
            for rank in range(len(ranks))
        ]
        for part in (saved[0].parts if saved else ())
    }
    why = "weights of less precision, of which the optimizer has the float32"
    notes = {"module": why} if "" in parts else {}
    step = first.tree.get("global_steps", first.tree.get("iteration", 0))
    return weights_of_ranks(
        path, "deepspeed", first, there.folder, name_map, ranks,
        masters=parts.pop("", []), moments=parts, notes=notes, counter="global_steps", step=step,
        new_run=lambda: _run_of(first, saved[0], step),
        without_run={"optimizer": why_not} if why_not else {},
    )  # fmt: skip


def _run_of(first: TensorFile, saved: Saved, step: Any) -> dict[str, Any]:
    """Return the state of the run, as far as DeepSpeed's numbers hold it."""
    skipped = whole(first.tree.get("skipped_steps", 0))
    samples = args_of(first).get("consumed_train_samples")
    steps = next(iter(saved.steps.values()))
    run = new_run(
        rule_keeping([part for part in saved.parts if part]),
        step=step,
        updates=step - skipped if steps is None else steps,
        scale=_scale(saved.state),
        consumed_samples=whole(first.tree.get("global_samples", 0) if samples is None else samples),
    )
    run["state"]["skipped_steps"] = skipped
    return run


def _scale(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of the loss scale: FP16_Optimizer's own values, or those of ZeRO's
    loss_scaler (deepspeed/runtime/fp16/loss_scaler.py).
    """
    scaler = state.get("loss_scaler")
    values = scaler.state if isinstance(scaler, Foreign) else state
    if not isinstance(values, dict) or "cur_scale" not in values:
        return dict(NO_SCALE)
    dynamic = "last_overflow_iter" in values
    value = float(values["cur_scale"])
    if not dynamic:
        return dict(NO_SCALE) if value == 1 else {**NO_SCALE, "mode": "static", "value": value}
    since = whole(values["cur_iter"]) - whole(values["last_overflow_iter"]) - 1
    shift = whole(values.get("delayed_shift", 1))
    return {
        "mode": "dynamic",
        "value": value,
        "finite_steps": max(0, since) % max(1, whole(values["scale_window"])),
        "overflows": max(0, shift - whole(values.get("cur_hysteresis", shift))),
    }
