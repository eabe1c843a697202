"""Translation of arguments of ModelArts jobs and of MindFormers r0.3 into those of run_gpt2.py.

Sources: run_mindformer.py of MindFormers r0.3 and r0.8, and ModelZoo's --data_url and --train_url. Of the ModelArts
guide: "Developing Code for Training" and "Environment Variables of a Training Container".
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from common.cluster.environment import in_modelarts
from common.command_line import Flags
from common.errors import ConfigError
from common.paths import ROOT

if TYPE_CHECKING:
    from common.systems.config import ConfigFile

SCHEMES = ("obs", "s3", "file")
TOP_LEVEL = ("backend", "engine", "device", "seed", "precision")
"""Keys outside of sections, with a flag of the same name; output_dir has rules of its own."""
_OWN = {"help": False, **{each.name: each.type != "bool" for each in fields(Flags)}}
"""Flags of run_gpt2.py, and whether they take a value."""
_KEYS = {
    "dataset": "data.train",
    "dataset_dir": "data.train",
    "train_dataset_dir": "data.train",
    "data_url": "data.train",
    "eval_dataset_dir": "data.validation",
    "mode": "context.mode",
    "device_id": "context.device_id",
    "device_target": "context.device_target",
    "epochs": "train.max_epochs",
    "batch_size": "train.micro_batch_size",
    "predict_batch_size": "predict.batch_size",
    "num_samples": "train.num_samples",
}
_IN_EVAL = {"dataset": "data.validation", "dataset_dir": "data.validation", "num_samples": "validation.max_samples"}
_OUTPUT = ("train_url", "output_dir", "output_url", "obs_path", "remote_save_url")
_CHECKPOINT = ("load_checkpoint", "checkpoint_url")
_NOTED = {
    "dataset_id": "the platform's name of the data; the data come from --dataset",
    "local_rank": "the environment says it",
}


def is_url(value: object) -> bool:
    return isinstance(value, str) and value.partition("://")[0] in SCHEMES and "://" in value


@dataclass(kw_only=True)
class ModelArtsJob:
    """Translated arguments of a job. argv: for run_gpt2.py's parser; values may be URLs.

    output_url: where output_dir is copied at the end. one_process: --use_parallel=False, which
    matters if the platform did not start one process per card.
    """

    run_mode: str = "train"
    argv: list[str] = field(default_factory=list)
    output_url: str | None = None
    one_process: bool = False
    remarks: list[str] = field(default_factory=list)


def translate(argv: Sequence[str], environ: Mapping[str, str]) -> ModelArtsJob:
    """Turn ``--section.key=value``, ``--section.key value`` and known flags into ``section.key=value``.

    All other arguments stay. Inside ModelArts an unknown flag is dropped with a warning, because the platform adds
    some. Elsewhere the parser rejects it. Raises ConfigError for a flag without its value or with an impossible one.
    """
    inside = in_modelarts(environ)
    job = ModelArtsJob(run_mode=_value_of("run_mode", argv) or "train")
    rest = deque(argv)
    while rest:
        argument = rest.popleft()
        match = re.fullmatch(r"--([A-Za-z_][\w.-]*)(?:=(.*))?", argument, re.DOTALL)
        if argument.startswith("output_dir="):
            _output(job, "output_dir", argument.partition("=")[2])
            continue
        if match is None:
            job.argv.append(argument)
            continue
        name, given = match[1].replace("-", "_"), match[2]
        if name == "config":
            job.argv.append(f"--config={_config(_needed(argument, given, rest), inside)}")
        elif name in _OWN:
            job.argv.append(argument)
            if given is None and _OWN[name] and rest:
                job.argv.append(rest.popleft())
        elif name == "options":
            job.argv += _options(given, rest)
        elif "." in name or name in TOP_LEVEL:
            job.argv.append(f"{name}={_needed(argument, given, rest)}")
        elif name in _FLAGS:
            _translate_flag(job, name, _needed(argument, given, rest))
        elif inside:
            value = "" if given is None else f"={given}"
            # the next word is its value, unless it is a flag or an override
            if given is None and rest and not re.match(r"--|\w+(\.\w+)*=", rest[0]):
                value = f" {rest.popleft()}"
            job.remarks.append(
                f"--{match[1]}{value} is not an argument of this program; ignored, as it may be the platform's"
            )
        else:
            job.argv.append(argument)
    return job


def mindformers_argv(argv: Sequence[str]) -> tuple[list[str], ConfigFile | None]:
    """Add the defaults of r0.3. Returns the file of --config too, if it was read.

    The mode is the YAML's, else train, which begins with new weights whatever that names. An Ascend means MindSpore.
    """
    file = None
    if {"--help", "-h"}.isdisjoint(argv) and (name := _value_of("config", argv)):
        from common.run_config import read_config  # not above: --help loads no library

        with suppress(ConfigError):  # reported when it is read again
            file = read_config(_config(name, in_modelarts(os.environ)))
    given = _value_of("run_mode", argv)
    mode = given or (file and file.tree.get("run_mode")) or "train"
    chosen = [] if given is not None else [f"--run_mode={mode}"]
    chosen += ["checkpoint.init_from=null"] if mode == "train" else []
    mindspore = ["backend=mindspore"] if _means_mindspore(argv, file) else []
    return [*chosen, *mindspore, *argv], file


def _means_mindspore(argv: Sequence[str], file: ConfigFile | None) -> bool:
    """Tell whether the arguments or the YAML ask for an Ascend, and neither names a backend.

    A YAML that names torch wins, with a warning.
    """
    if any(re.match("(--)?backend(=|$)", word) for word in argv):
        return False
    asked = [word.rpartition("=")[2] for word in argv if re.match(r"(--)?(context\.)?device_target=", word)]
    asked += [_value_of(name, argv) or "" for name in ("device_target", "context.device_target")]
    try:
        opened = None if file is None else replace(file, fill=None).open()  # without a checkpoint
    except ConfigError:  # opened again later, with all overrides
        opened = None
    if opened is None:
        return "Ascend" in asked
    config, context = opened.config, opened.ours.tree.get("context") or {}
    if "Ascend" not in (asked if any(asked) else [context.get("device_target")]):
        return False
    if "backend" not in config.model_fields_set:
        return True
    if config.backend == "torch":
        from common.log import LOG

        LOG.warning(
            f"device_target=Ascend, but {_value_of('config', argv)} says backend: torch, which is"
            " used; for MindSpore give backend=mindspore"
        )
    return False


def describe_flags() -> str:
    """Return for ``--help`` the arguments that ``translate`` accepts, and what each means here."""

    def flags(names: Sequence[str]) -> str:
        return " ".join(f"--{name}" for name in names)

    rows = {
        **{flags([name for name in _KEYS if _KEYS[name] == key]): key for key in dict.fromkeys(_KEYS.values())},
        "--dataset --dataset_dir": "in eval data.validation",
        flags(TOP_LEVEL): "the key of the same name",
        flags(_OUTPUT): "output_dir, or the URL to which it is copied at the end",
        flags(_CHECKPOINT): "checkpoint.resume (train), checkpoint.init_from (finetune), else checkpoint.load",
        "--predict_data": "predict.prompt, or predict.prompt_file where it is a file",
        "--use_parallel": "False: one process, if no launcher has started ranks",
        "--profile": "True: profile.start=1 profile.stop=10; False: no trace",
        "--sink_mode": "False: train.sink_size=1",
        "--enable_modelarts": "found in the environment; accepted and ignored",
        "--num_samples": "train.num_samples, the windows of an epoch; in eval validation.max_samples",
        "--options": "section.key=value overrides after it",
        flags(tuple(_NOTED)): "logged, without effect",
    }
    lines = "".join(f"  {flags}\n      {meaning}\n" for flags, meaning in rows.items())
    return f"MindFormers' and ModelArts' arguments, and what each means (--run_mode: the YAML's or train):\n{lines}\n"


_SWITCHES = ("use_parallel", "profile", "sink_mode", "enable_modelarts")
_FLAGS = {*_KEYS, *_OUTPUT, *_CHECKPOINT, *_NOTED, *_SWITCHES, "predict_data"}


def _translate_flag(job: ModelArtsJob, name: str, value: str) -> None:
    """Map a flag of r0.3 or of the platform to a key; some map to one of several, by the run mode."""
    switched = {"true": True, "1": True, "false": False, "0": False}.get(value.lower())
    if name == "epochs":  # a file's steps or tokens would contradict it
        job.argv[:0] = ["train.max_steps=null", "train.max_tokens=null"]
    if name in _KEYS:
        keys = _KEYS | (_IN_EVAL if job.run_mode == "eval" else {})
        job.argv.append(f"{keys[name]}={value}")
    elif name in _OUTPUT:
        _output(job, name, value)
    elif name in _CHECKPOINT:
        key = {"train": "resume", "finetune": "init_from"}.get(job.run_mode, "load")
        job.argv.append(f"checkpoint.{key}={value}")
    elif name == "predict_data":
        is_file = is_url(value) or Path(value).is_file()
        job.argv.append(f"predict.{'prompt_file' if is_file else 'prompt'}={value}")
    elif name in _NOTED:
        job.remarks.append(f"--{name}={value} is logged and has no effect: {_NOTED[name]}")
    elif switched is None:  # r0.3 took every True of --options for False
        raise ConfigError(f"--{name}={value}: expected True or False")
    elif name == "profile":  # steps of r0.3's defaults
        off = ["profile.start=null", "profile.stop=null", "profile.memory=false"]
        job.argv += ["profile.start=1", "profile.stop=10"] if switched else off
    elif name == "sink_mode" and not switched:
        job.argv.append("train.sink_size=1")
    elif name == "use_parallel":
        job.one_process = not switched


def _output(job: ModelArtsJob, name: str, value: str) -> None:
    """Handle an output: a URL is where the output is copied, a folder is output_dir itself."""
    if not value:
        raise ConfigError(f"{name}: expected a folder or a URL, found an empty value")
    if not is_url(value):
        job.argv.append(f"output_dir={value}")
    elif job.output_url not in (None, value):
        raise ConfigError(
            f"--{name}={value}, but the output is already to be copied to {job.output_url}; give one of them"
        )
    else:
        job.output_url = value


# ---- values ----


def _config(value: str, inside: bool) -> str:
    """Look for a config in the code folder too: ModelArts starts the program in a folder of its choice."""
    if is_url(value):
        raise ConfigError(
            f"--config={value}: expected a file of this host, next to the files of its base: list; put it into the"
            " code folder and give its path there, such as --config=configs/gpt2/run_gpt2.yaml"
        )
    return str(ROOT / value) if inside and not Path(value).exists() and (ROOT / value).is_file() else value


def _options(given: str | None, rest: deque[str]) -> list[str]:
    values = [given] if given else []
    while rest and not rest[0].startswith("--"):
        values.append(rest.popleft())
    if not values or not all("=" in value for value in values):
        raise ConfigError(f"--options {' '.join(values)}: expected section.key=value overrides after it")
    return values


def _needed(argument: str, given: str | None, rest: deque[str]) -> str:
    if given is not None:
        return given
    if not rest or rest[0].startswith("--"):
        raise ConfigError(f"{argument}: expected a value after it")
    return rest.popleft()


def _value_of(name: str, argv: Sequence[str]) -> str | None:
    for at, word in reversed([*enumerate(argv)]):  # the last one counts, as for the parser
        if word == f"--{name}" and at + 1 < len(argv):
            return argv[at + 1]
        if word.startswith(f"--{name}="):
            return word.partition("=")[2]
    return None
