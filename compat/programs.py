"""Work of the scripts in this folder, each under the name that users of another system know.

A script runs this file, with its own path as the global name ``SCRIPT``.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if "SCRIPT" in globals():
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from common.program import start

    start(__file__, [globals()["SCRIPT"], *sys.argv[1:]])

from common.program import command
from run_gpt2 import main as run


@command()
def main(words: list[str]) -> int:
    """Do what a script of this folder is for. words: its path and its arguments."""
    script, *words = words
    system, *folders = Path(script).resolve().relative_to(Path(__file__).resolve().parent).parts
    name = "/".join(folders)
    if name == "cache/make_vocab.py":
        from tools.make_vocab import main as make_vocab

        return make_vocab(words)
    if system == "gpt2_chinese":
        from common.conversion.gpt2_chinese import run_command

        return run_command(run, name, words)
    if system == "fleetx":
        if name == "tools/train.py":
            return run(["--run_mode", "train", *words], program=name)
        from common.systems.fleetx.scripts import infer, run_script

        if name == "tools/inference.py":
            return infer(run, _read, words, name)
        modes = {"tasks/gpt/generation.py": "predict", "tools/eval.py": "eval"}
        return run_script(run, _read, modes.get(name, "export"), words, name)
    if system == "modelzoo":
        return main_with_flags(run, words, name)
    from common.systems.oneflow.flags import start_nodes_devices
    from tools.launch import main as launch

    return main_with_flags(start_nodes_devices(run, launch, words), words, "oneflow_gpt.training")


def main_with_flags(main: Callable[..., int], flags: Sequence[str], program: str) -> int:
    """Call ``main`` of run_gpt2.py with the flags as its configuration; returns its exit code.

    Words section.key=value among the flags are overrides, and its own options are obeyed; --run_mode is train where it
    is left out. The file of the flags is deleted at the end, unless the ranks read it later (DETACH).
    """
    from common.command_line import Flags
    from common.config.hints import schema_keys  # not above: --help loads no library
    from common.flags import make_parser
    from common.launcher.request import is_asked
    from common.systems.flags import write_flag_file

    parser = make_parser(None, Flags, prog=program, add_help=False)
    given, left = parser.parse_known_args(["--config", "", "--run_mode", "train", *flags])
    options = {name: value for name, value in vars(given).items() if name not in ("config", "run_mode", "override")}
    own = [f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items() if value]
    own += [word for word in left if word in ("--help", "-h")]
    left += ["--config", given.config] if given.config else []  # none of theirs
    overrides = [
        word for word in left if word.partition("=")[1] and word.partition("=")[0].partition(".")[0] in schema_keys()
    ]
    theirs = [word for word in left if word not in own and word not in overrides]
    overrides += given.override
    with tempfile.NamedTemporaryFile(
        "w", prefix=f"{program}-", suffix=".flags", encoding="utf-8", delete=not is_asked("DETACH")
    ) as file:
        write_flag_file(file, program, theirs)
        file.flush()
        return main(["--config", file.name, "--run_mode", given.run_mode, *own, *overrides], program=program)


def _read(path: str) -> Any:
    from common.run_config import read_config  # not above: --help loads no library

    return read_config(path)
