"""PaddleFleetX's scripts: those on weights, ``tools/inference.py`` for export folders, and the
launcher of all of them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from common.command_line import parse_arguments
from common.errors import CheckpointError, ConfigError
from common.paths import ROOT, TOOLS

if TYPE_CHECKING:  # --help loads no library
    from common.systems.config import ConfigFile

Read: TypeAlias = Callable[[str], "ConfigFile"]
"""Reader of a configuration file: ``read_config``, in a room above this one."""
PROMPT = "Hi, GPT2. Tell me who Jack Ma is."
"""Prompt of FleetX's scripts, for commands without one."""
_KEY = "Inference.model_dir"
"""FleetX's key of the export folder."""
_SCRIPTS = ("tools/train.py", "tools/eval.py", "tools/export.py", "tools/inference.py", "tasks/gpt/generation.py")
"""Scripts in compat/fleetx."""
_RECORD = "export.json"
_PROGRAM: dict[str, Any] = {"model": "from_checkpoint", "optimizer": {"learning_rate": 1.0}}
"""Config of an export without one of its own."""
_OF_THE_MACHINE = ("device", "seed", "predict", "logging")
"""Sections that come from the command's configuration; the others come from the export."""


def run_script(main: Callable[..., int], read: Read, mode: str, argv: Sequence[str], program: str) -> int:
    """Call ``main`` of run_gpt2.py for one of FleetX's scripts. Returns its exit code. Raises
    ConfigError and CheckpointError.

    Engine.save_load.ckpt_dir names the weights in every mode, also in a file for training. Where no
    prompt is given, FleetX's is continued.
    """
    words = ["--run_mode", mode, *argv]
    arguments = parse_arguments(words, program=program)
    file = read(arguments.config)
    tree = file.open(arguments.overrides).ours.tree
    checkpoint = tree.get("checkpoint", {})
    resume = checkpoint.get("resume")
    if resume not in (None, "auto", "latest", "never") and checkpoint.get("load") is None:
        words.append(f"checkpoint.load={resume}")
    if mode == "predict" and not _has_prompt(tree):
        words.append(f"predict.prompt={PROMPT}")
    return main(words, program=program, file=file)


def infer(main: Callable[..., int], read: Read, argv: Sequence[str], program: str) -> int:
    """Call ``main`` of run_gpt2.py with the model, the tokenizer and the settings of an export
    folder. Returns its exit code. Raises ConfigError and CheckpointError.

    Sampling and prompts of the command's own configuration win over the export's.
    """
    arguments = parse_arguments(["--run_mode", "predict", *argv], program=program)
    own = [word for word in arguments.overrides if not word[:1].isupper()]
    show = ["--show_config"] if arguments.show_config else []
    words = ["--run_mode", "predict", "--config", arguments.config, *show, *own]
    return main(words, program=program, file=_with_export(read, arguments.config, arguments.overrides))


def _with_export(read: Read, config: str, overrides: Sequence[str]) -> ConfigFile:
    """Return a configuration of ours for the export that another one names. Raises ConfigError and CheckpointError."""
    from common.checkpoint.snapshot import SETTINGS_FILE

    file = read(config)
    ours = file.open(overrides).ours
    inference = file.tree.get("Inference")
    given = [word.partition("=")[2] for word in overrides if word.startswith(f"{_KEY}=")]
    if not given and isinstance(inference, Mapping) and inference.get("model_dir"):
        given = [str(inference["model_dir"])]
    named = Path(given[-1] if given else "./output")
    files = [place / name for place in (named, named / "weights") for name in (SETTINGS_FILE, _RECORD)]
    folder = next((file.parent.resolve() for file in files if file.is_file()), None)
    if folder is None and not named.is_dir():
        raise ConfigError(f"{_KEY}={named}: no such folder; give that which tools/export.py wrote")
    if folder is None:
        raise CheckpointError(
            f"{_KEY}={named}: no export is here (looked for {SETTINGS_FILE}, {_RECORD} and weights/);"
            " write one with tools/export.py -c CONFIG -o Engine.save_load.output_dir=DIR"
        )
    settings = folder / SETTINGS_FILE
    export = read(str(settings)) if settings.is_file() else replace(file, dialect=None, tree=_PROGRAM, sources={})
    tree, sources = dict(export.tree), dict(export.sources)
    sources |= {key: where for key, where in ours.sources.items() if key[0] in _OF_THE_MACHINE}
    for name in _OF_THE_MACHINE:
        value, own = tree.get(name), ours.tree.get(name)
        if isinstance(value, Mapping) and isinstance(own, Mapping):
            tree[name] = {**value, **own}
        elif own is not None:
            tree[name] = own
    if not _has_prompt(tree):
        tree["predict"] = {**tree.get("predict", {}), "prompt": PROMPT}
    data = tree.get("data")
    if isinstance(data, dict) and isinstance(data.get("tokenizer"), dict):
        data["tokenizer"]["folder"] = str(folder)
    tree |= {"output_dir": str(folder), "checkpoint": {"load": str(folder)}}
    return replace(export, tree=tree, sources=sources)


def _has_prompt(tree: Mapping[str, Any]) -> bool:
    predict = tree.get("predict")
    return isinstance(predict, Mapping) and bool(predict.get("prompt") or predict.get("prompt_file"))


def launch_command(argv: Sequence[str]) -> list[str]:
    """Return the command for ``python -m paddle.distributed.launch OPTIONS SCRIPT ...``: a training
    becomes a launch of a rank a device; another script runs in one process on the first device.

    Ends the process with exit code 2 for words that Paddle's launcher has not.
    """
    parser = argparse.ArgumentParser(
        prog="paddle.distributed.launch",
        description="Start a script of compat/fleetx on the given devices.",
        allow_abbrev=False,
    )
    parser.add_argument("--log_dir", default="log", help="folder of workerlog.N (default: log)")
    parser.add_argument("--devices", "--gpus", "--npus", required=True, metavar="N,N")
    parser.add_argument("--master", metavar="IP:PORT", help="where several hosts meet")
    parser.add_argument("--nnodes", metavar="N", help="how many hosts there are")
    parser.add_argument(
        "--rank", metavar="K", help="which host this is (default: that of --master is 0, the others go by address)"
    )
    parser.add_argument("script", help="tools/train.py or another script of compat/fleetx")
    parser.add_argument("words", nargs=argparse.REMAINDER, help="of the script: -c CONFIG -o KEY=V")
    given = parser.parse_args(argv)
    names = [name for name in _SCRIPTS if f"/{Path(given.script).as_posix()}".endswith(f"/{name}")]
    if not names:
        parser.error(f"{given.script} is not here; expected one of {', '.join(_SCRIPTS)}")
    if names != ["tools/train.py"]:  # in a checkout of FleetX the script of this name needs Paddle
        device = f"context.device_id={given.devices.partition(',')[0]}"
        return [sys.executable, str(ROOT / "compat" / "fleetx" / names[0]), *given.words, device]
    training = parse_arguments(["--run_mode", "train", *given.words], program=given.script)
    if training.show_config:
        return [sys.executable, str(ROOT / "run_gpt2.py"), "--run_mode", "train", *given.words]
    options = {"master": given.master, "nnodes": given.nnodes, "node_rank": given.rank}
    options["accelerator"] = training.accelerator
    words = [word for name, value in options.items() if value for word in (f"--{name}", value)]
    words += ["--log_dir", given.log_dir, "--devices", given.devices, "none", training.config]
    tool = str(TOOLS / "launch.py")
    return [sys.executable, tool, "distribute", *words, training.run_mode, *training.overrides]
