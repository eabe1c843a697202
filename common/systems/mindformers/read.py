"""Reader of MindFormers' ``.ckpt``, of one file or of a distributed run's ranks. A YAML beside it
holds heads and vocabulary. Before release 0.6 the names differed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.config.load import read_yaml
from common.config.resolved import ResolvedModel
from common.config.values import RuleName, rule_keeping
from common.dialects.mindformers import BASE
from common.errors import CheckpointError, ConfigError
from common.systems.dialect import read_foreign
from common.systems.mindformers.config import DIALECT
from common.systems.mindformers.slices import Slices, find_slices, strategy_file
from common.systems.name_map import LINEAR, NameMap, match_name_map, name_map
from common.systems.run_state import MODEL_YAML, NO_SCALE, new_run, read_model_yaml, require_moments, require_one_run
from common.systems.weights import Weight, Weights, checked_model, import_names, weights_from
from common.tensor_files.arrays import FileTensor
from common.tensor_files.containers import open_tensors
from common.weights.names import EMBEDDING, POSITIONS


def _names(block: str, norm: str) -> NameMap:
    return name_map(
        {
            EMBEDDING: "backbone.embedding.word_embedding.embedding_table",
            POSITIONS: "backbone.embedding.position_embedding.embedding_table",
            "ln_f": f"{norm}.gamma|beta",
            "ln_1": f"{block}layernorm1.gamma|beta",
            "attn.q_proj": f"{block}attention.dense1",
            "attn.k_proj": f"{block}attention.dense2",
            "attn.v_proj": f"{block}attention.dense3",
            "attn.c_proj": f"{block}attention.projection",
            "ln_2": f"{block}layernorm2.gamma|beta",
            "mlp.c_fc": f"{block}output.mapping",
            "mlp.c_proj": f"{block}output.projection",
        },
        transposed=LINEAR,
        ignored=r"backbone\.blocks\.\d+\.attention\.(masked_)?beta",
    )


NAME_MAPS = {
    "mindformers": (_names("backbone.blocks.{layer}.", "backbone.layernorm"),),
    "mindformers_r0.3": (_names("gpt2.backbone.transformer.encoder.blocks.{layer}.", "gpt2.backbone.layernorm"),),
}
"""Names of the parameters by format."""

_CONFIG = "config.yaml"
"""Name of the resolved config in a run folder of ours."""


def find_model(file: Path, folders: Iterable[Path]) -> tuple[ResolvedModel, dict[str, Any] | None] | None:
    """Return the model and the state of its run, from the first of ``folders`` that has a model.

    file: the weights, whose name chooses among several YAML files. Raises ConfigError.
    """
    for folder in dict.fromkeys(folders):
        ours = folder / MODEL_YAML
        if ours.is_file() and not _is_theirs(ours):
            return read_model_yaml(ours)
        found = [path for path in sorted(folder.glob("*.y*ml")) if _is_theirs(path)]
        found = [path for path in found if path.stem == file.stem] or found
        if len(found) > 1:
            raise ConfigError(
                f"{folder}: {', '.join(path.name for path in found)} have a model of MindFormers;"
                f" leave one there, or name it as {file.name}"
            )
        for path in found:
            tree, sources = read_foreign(path, BASE)
            section = tree.get("model")
            if not isinstance(section, dict) or "model_config" not in section:
                raise ConfigError(
                    f"{path}: has no model.model_config, nor have the files of its {BASE}; put the YAML"
                    " with the model beside the weights"
                )
            translated = DIALECT.translate({"model": section}, sources)
            return checked_model(path, translated.tree["model"]), None
        if (folder / _CONFIG).is_file():
            return read_model_yaml(folder / _CONFIG)[0], None
    return None


def _is_theirs(path: Path) -> bool:
    """Tell whether a YAML file has MindFormers' section model, or a base that may have it. Raises ConfigError."""
    try:
        tree, _ = read_yaml(path)
    except ConfigError as error:
        raise ConfigError(f"{error}; fix the file, or move it away from the weights") from None
    model = tree.get("model")
    return BASE in tree or (isinstance(model, dict) and "model_config" in model)


MOMENTS = {"exp_avg": "adam_m.", "exp_avg_sq": "adam_v.", "momentum_buffer": "moments."}
"""Parts of the optimizer's state by our names -> MindSpore's prefixes of a parameter's name."""
_SUMS = "accu_grads."
"""Prefix of the sum of a parameter's gradients."""
_COUNTERS = (
    "step_num", "epoch_num", "global_step", "loss_scale", "scale_sense", "current_iterator_step",
    "last_overflow_iterator_step",
    "learning_rate",
)  # fmt: skip
"""Numbers of the trainer, the optimizers and the loss scale, which MindSpore writes beside the parameters."""


def detects(path: Path, format: str = "mindformers") -> bool:
    try:
        found = _find(path)
        return found is not None and any(name.startswith("gpt2.") for name in _tensors(found)) == (
            format == "mindformers_r0.3"
        )
    except CheckpointError:  # reported when the files are opened
        return format == "mindformers"


def _find(path: Path) -> Path | Slices | None:
    """Return the file, or the ranks' files, that ``path`` names or contains. Raises CheckpointError."""
    if path.is_file():
        return find_slices(path) if path.suffix == ".ckpt" else None
    files = [file for file in sorted(path.glob("*.ckpt")) if file.is_file() and not strategy_file(file)]
    if len(files) == 1:
        return find_slices(files[0])
    found = find_slices(path) if path.is_dir() else None
    if files and found is None:
        raise CheckpointError(
            f"{path}: holds {len(files)} .ckpt files, and no strategy file that says how they"
            " belong together (ckpt_strategy.ckpt); give the path of one, or put that there"
        )
    return found


def _tensors(found: Path | Slices) -> Mapping[str, FileTensor]:
    return found.tensors() if isinstance(found, Slices) else open_tensors(found)


def open_mindformers(path: Path, model: ResolvedModel | None = None, format: str = "mindformers") -> Weights:
    """Open a file, its folder, or the folder above the ranks' files of a distributed run. model: where no file
    describes it. Raises CheckpointError and ConfigError.
    """
    found = _find(path)
    if found is None:
        raise CheckpointError(
            f"{path}: holds 0 .ckpt files of MindFormers; give the path of one, or of a folder with"
            " the rank_N folders of a run and its ckpt_strategy.ckpt"
        )
    if isinstance(found, Slices):
        file, folders = found.root, [path if path.is_dir() else path.parent, found.root, found.root.parent]
    else:
        file, folders = found, [found.parent]
    told = find_model(file, folders) or (None if model is None else (model, None))
    if told is None:
        raise ConfigError(
            f"{folders[0] / MODEL_YAML}: no such file, nor a YAML of MindFormers; heads and"
            " vocabulary cannot be read off shapes: put the section model of the config beside the"
            " weights, or the YAML that the run was started with"
        )
    model, run = told
    stored, notes = _tensors(found), {}
    name_map = match_name_map(file, format, NAME_MAPS[format], stored)
    ignored = {name: "causal mask" for name in stored if name_map.ignores(name)}
    ignored |= {name: "gradients under way" for name in stored if name.startswith(_SUMS)}
    counters = {
        name: float(stored[name].read().reshape(-1)[0])
        for name in _COUNTERS
        if name in stored and stored[name].nbytes and len(stored[name].shape) < 2
    }
    rest = {name: tensor for name, tensor in stored.items() if name not in ignored and name not in _COUNTERS}
    groups = {
        part: group
        for part, prefix in MOMENTS.items()
        if (group := {name: rest.pop(name) for name in [*rest] if name.startswith(prefix)})
    }
    weights = weights_from(file, name_map, rest, model, format=format, path=path, ignored=ignored)
    moments: dict[str, Weight] = {}
    for part, tensors in groups.items():
        moments |= import_names(file, name_map, tensors, model, prefix=MOMENTS[part], suffix=f".{part}")
    if run is not None:
        require_one_run(file, "global_step", counters.get("global_step"), run["engine"]["optimizer_steps"])
    elif moments:
        run = _run_of(file, counters, rule_keeping([*groups]))
        notes["position in the data"] = "not in the file: a resumed run reads from the first sample"
    else:
        notes |= dict.fromkeys(counters, "where training stood, without the state of the optimizer")
    moments = {} if run is None else require_moments(file, moments, run, model)
    return replace(weights, moments=moments, run=run, ignored={**weights.ignored, **notes})


def _run_of(file: Path, counters: Mapping[str, float], optimizer: RuleName) -> dict[str, Any]:
    """Return the state of the run, as far as MindSpore's own counters hold it."""
    wrong = [
        f"{name}={value:g}"
        for name, value in counters.items()
        if not 0 <= value < 2**53 or (name in ("global_step", "step_num") and value % 1)
    ]
    if wrong:
        raise CheckpointError(f"{file}: {', '.join(wrong)}, where no run stands; copy it again")
    updates = int(counters.get("global_step", counters.get("step_num", 0)))
    value = counters.get("scale_sense", counters.get("loss_scale"))
    scale = NO_SCALE if value is None else {"mode": "dynamic", "value": value, "finite_steps": 0, "overflows": 0}
    return new_run(optimizer, step=int(counters.get("step_num", updates)), updates=updates, scale=scale)
