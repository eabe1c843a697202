"""Work of the scripts in this folder, each under the name that users of another system know.

A script runs this file, with its own path as the global name ``SCRIPT``.
"""

from __future__ import annotations

import sys
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
        return _fleetx(name, words)
    from common.systems.flag_scripts import main_with_flags

    if system == "modelzoo":
        return main_with_flags(run, words, name)
    from common.systems.oneflow.flags import start_nodes_devices
    from tools.launch import main as launch

    return main_with_flags(start_nodes_devices(run, launch, words), words, "oneflow_gpt.training")


def _fleetx(name: str, words: list[str]) -> int:
    """Do what a script of PaddleFleetX is for."""
    if name == "tools/train.py":
        return run(["--run_mode", "train", *words], program=name)
    from common.systems.fleetx.scripts import infer, run_script

    if name == "tools/inference.py":
        return infer(run, _read, words, name)
    modes = {"tasks/gpt/generation.py": "predict", "tools/eval.py": "eval"}
    return run_script(run, _read, modes.get(name, "export"), words, name)


def _read(path: str) -> Any:
    from common.run_config import read_config  # not above: --help loads no library

    return read_config(path)
