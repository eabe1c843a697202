"""The words of a ModelArts job, and of MindFormers r0.3's run_mindformer.py, in the words of run_gpt2.py.

Sources: run_mindformer.py of MindFormers r0.3 and r0.8; "Developing Code for Training" and "Environment Variables of a Training
Container" of the ModelArts guide; ModelZoo's --data_url and --train_url.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common.cluster.environment import in_modelarts
from common.errors import ConfigError
from common.modelarts.stores import is_url

ROOT = Path(__file__).resolve().parents[2]
TOP_LEVEL = ("backend", "engine", "device", "seed", "precision")
"""Keys of the configuration that lie in no section and have a flag of the same name; output_dir has rules of its own."""
_OWN = {
    "config": 1,
    "run_mode": 1,
    "explain": 1,
    "all_ranks": 0,
    "accelerator": 1,
    "devices": 1,
    "help": 0,
}  # run_gpt2.py's flags, and how many values they take
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
}
_OUTPUT = ("train_url", "output_dir", "output_url", "obs_path", "remote_save_url")
_CHECKPOINT = ("load_checkpoint", "checkpoint_url")
_YES_OR_NO = ("use_parallel", "profile", "sink_mode", "enable_modelarts")
_NOTED = {
    "dataset_id": "the platform's name of the data; the data come from --dataset",
    "local_rank": "the environment says it",
}
# what a word of the old command line contradicts in a file of ours, unless the command line names that too
_INSTEAD = {"epochs": ("train.max_steps=null", "train.max_tokens=null")}


@dataclass(frozen=True, kw_only=True)
class ModelArtsJob:
    """words: for run_gpt2.py's parser; values may be URLs. output_url: where output_dir is copied when the run ends.

    one_process: --use_parallel=False, which matters where nobody started one process per card.
    """

    words: tuple[str, ...]
    output_url: str | None = None
    one_process: bool = False
    remarks: tuple[str, ...] = ()


@dataclass
class _Translation:
    run_mode: str
    first: list[str] = field(default_factory=list)  # lose against what follows
    words: list[str] = field(default_factory=list)
    output_url: str | None = None
    one_process: bool = False
    remarks: list[str] = field(default_factory=list)


def translate(words: Sequence[str], environ: Mapping[str, str]) -> ModelArtsJob:
    """``--section.key=value``, ``--section.key value`` and the flags above become ``section.key=value``; other words stay as they are.

    Inside ModelArts a flag that nobody knows is dropped with a remark, as the platform adds some; elsewhere it stays, and is refused
    by the parser. Raises ConfigError for a flag without its value, or with one that cannot be meant.
    """
    inside = in_modelarts(environ)
    result = _Translation(run_mode=_value_of("run_mode", words) or "train")
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if word.startswith("output_dir="):
            _output(result, "output_dir", word.partition("=")[2])
            continue
        match = re.fullmatch(r"--([A-Za-z_][\w.-]*)(=.*)?", word, re.DOTALL)
        if match is None:
            result.words.append(word)
            continue
        name, given = match[1].replace("-", "_"), match[2]
        if name in _OWN:
            result.words.append(word if name != "config" else f"--config={_config(_needed(word, given, words, at), inside)}")
            if given is None and _OWN[name]:
                result.words += words[at : at + 1] if name != "config" else []
                at += 1
        elif name == "options":
            values = [given[1:]] if given else []
            while at < len(words) and not words[at].startswith("--"):
                values.append(words[at])
                at += 1
            if not values or not all("=" in value for value in values):
                raise ConfigError(f"--options {' '.join(values)}: expected section.key=value words behind it")
            result.words += values
        elif _is_known(name):
            value = _needed(word, given, words, at)
            at += given is None
            _known(result, name, value)
        elif inside:
            value = given
            if given is None and at < len(words) and not words[at].startswith("--") and not re.match(r"\w+(\.\w+)*=", words[at]):
                value = f" {words[at]}"
                at += 1
            result.remarks.append(f"--{match[1]}{value or ''} is no argument of this program; ignored, as it may be the platform's")
        else:
            result.words.append(word)
    first = (*result.first, *result.words)
    return ModelArtsJob(words=first, output_url=result.output_url, one_process=result.one_process, remarks=tuple(result.remarks))


def mindformers_words(words: Sequence[str]) -> list[str]:
    """What r0.3 did without being told: the mode is train, train begins with new weights whatever checkpoint the YAML names, and an
    Ascend is MindSpore's."""
    mode = _value_of("run_mode", words)
    chosen = [] if mode is not None else ["--run_mode=train"]
    chosen += ["checkpoint.init_from=null"] if mode in (None, "train") else []
    return [*chosen, *(["backend=mindspore"] if _means_mindspore(words) else []), *words]


def _means_mindspore(words: Sequence[str]) -> bool:
    """Whether the words or the YAML ask for an Ascend, and neither names a backend. A YAML that names torch wins, with a remark."""
    # not above: --help of run_gpt2.py, which imports this file, loads no library
    from common.config.load import build_config, read_config
    from common.log import LOG

    if any(re.match("(--)?backend(=|$)", word) for word in words):
        return False
    asked = [word.rpartition("=")[2] for word in words if re.match(r"(--)?(context\.)?device_target=", word)]
    asked += [_value_of(name, words) or "" for name in ("device_target", "context.device_target")]
    name = _value_of("config", words) or ""
    try:
        tree, sources = read_config(name if Path(name).is_file() else ROOT / name)
        config = build_config(tree, sources)
    except ConfigError:  # it is read again, and the error said, where the other words are known
        return "Ascend" in asked
    if "Ascend" not in (asked if any(asked) else [(tree.get("context") or {}).get("device_target")]):
        return False
    if "backend" not in config.model_fields_set:
        return True
    if config.backend == "torch":
        LOG.warning(f"device_target=Ascend, but {name} says backend: torch, which is taken; for MindSpore give backend=mindspore")
    return False


def describe_flags() -> str:
    """For ``--help``: the arguments that ``translate`` understands, and what each is here."""
    keys = {key: [f"--{name}" for name in _KEYS if _KEYS[name] == key] for key in dict.fromkeys(_KEYS.values())}
    rows = {
        **{" ".join(flags): key for key, flags in keys.items()},
        " ".join(f"--{name}" for name in TOP_LEVEL): "the key of the same name",
        " ".join(f"--{name}" for name in _OUTPUT): "output_dir; of a URL, where it is copied at the end",
        " ".join(f"--{name}" for name in _CHECKPOINT): "checkpoint.resume (train), checkpoint.init_from (finetune), else checkpoint.load",
        "--predict_data": "predict.prompt, or predict.prompt_file where it is a file",
        "--use_parallel": "False: one process, where nobody has started ranks",
        "--profile": "True: profile.start=1 profile.stop=10",
        "--sink_mode": "False: train.sink_size=1",
        "--enable_modelarts": "found out from the environment; taken and ignored",
        "--options": "section.key=value words behind it",
        " ".join(f"--{name}" for name in _NOTED): "noted, without effect",
    }
    lines = "".join(f"  {flags}\n      {meaning}\n" for flags, meaning in rows.items())
    return f"MindFormers' and ModelArts' arguments, and what each is here (--run_mode is train when left out):\n{lines}\n"


def _is_known(name: str) -> bool:
    return "." in name or name in (*TOP_LEVEL, *_KEYS, *_OUTPUT, *_CHECKPOINT, *_YES_OR_NO, *_NOTED, "predict_data")


def _known(result: _Translation, name: str, value: str) -> None:
    if "." in name or name in TOP_LEVEL:
        result.words.append(f"{name}={value}")
    elif name in _KEYS:
        result.first += _INSTEAD.get(name, ())
        result.words.append(f"{_KEYS[name]}={value}")
    elif name in _OUTPUT:
        _output(result, name, value)
    elif name in _CHECKPOINT:
        # r0.3 has one flag for what are three things here
        key = {"train": "resume", "finetune": "init_from"}.get(result.run_mode, "load")
        result.words.append(f"checkpoint.{key}={value}")
    elif name == "predict_data":
        is_file = is_url(value) or Path(value).is_file()
        result.words.append(f"predict.{'prompt_file' if is_file else 'prompt'}={value}")
    elif name in _NOTED:
        result.remarks.append(f"--{name}={value} is noted, and nothing else: {_NOTED[name]}")
    else:
        _yes_or_no(result, name, value)


def _yes_or_no(result: _Translation, name: str, value: str) -> None:
    """r0.3 took every ``True`` of --options for False; here a value is what it says, or refused."""
    if value.lower() not in ("true", "false", "1", "0"):
        raise ConfigError(f"--{name}={value}: expected True or False")
    wanted = value.lower() in ("true", "1")
    if name == "profile" and wanted:
        result.words += ["profile.start=1", "profile.stop=10"]  # r0.3's defaults
    elif name == "sink_mode" and not wanted:
        result.words.append("train.sink_size=1")
    elif name == "use_parallel":
        result.one_process = not wanted


def _output(result: _Translation, name: str, value: str) -> None:
    """A URL is where the output is copied, a folder is output_dir itself."""
    if not value:
        raise ConfigError(f"{name}: expected a folder or a URL, found nothing")
    if not is_url(value):
        result.words.append(f"output_dir={value}")
    elif result.output_url not in (None, value):
        raise ConfigError(f"--{name}={value}, but the output is already to be copied to {result.output_url}; give one of them")
    else:
        result.output_url = value


def _config(value: str, inside: bool) -> str:
    """ModelArts starts the program in a folder of its choice: what is not found from there is looked for in the code folder."""
    if is_url(value):
        raise ConfigError(
            f"--config={value}: expected a file of this host, beside which the files of its base: list lie; put it into the code folder"
            " and give its path there, such as --config=configs/gpt2/run_gpt2.yaml"
        )
    return str(ROOT / value) if inside and not Path(value).exists() and (ROOT / value).is_file() else value


def _needed(word: str, given: str | None, words: Sequence[str], at: int) -> str:
    if given is not None:
        return given[1:]
    if at >= len(words) or words[at].startswith("--"):
        raise ConfigError(f"{word}: expected a value behind it")
    return words[at]


def _value_of(name: str, words: Sequence[str]) -> str | None:
    for at, word in enumerate(words):
        if word == f"--{name}" and at + 1 < len(words):
            return words[at + 1]
        if word.startswith(f"--{name}="):
            return word.partition("=")[2]
    return None
