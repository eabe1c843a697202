"""Work of the scripts in this folder, each under the name that users of another system know."""

from __future__ import annotations

import sys
from pathlib import Path

from run_gpt2 import main as run


def main(script: str) -> int:
    """Do what a script of this folder is for. Returns its exit code."""
    system, *folders = Path(script).resolve().relative_to(Path(__file__).parent).parts
    name, words = "/".join(folders), sys.argv[1:]
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
    from common.systems.oneflow.launch import start_nodes_devices
    from tools.launch import main as launch

    return main_with_flags(start_nodes_devices(run, launch, words), words, "oneflow_gpt.training")


def _fleetx(name: str, words: list[str]) -> int:
    """Do what a script of PaddleFleetX is for."""
    if name == "tools/train.py":
        return run(["--run_mode", "train", *words], program=name)
    from common.systems.fleetx.scripts import infer, run_script

    if name == "tools/inference.py":
        return infer(run, words, name)
    modes = {"tasks/gpt/generation.py": "predict", "tools/eval.py": "eval"}
    return run_script(run, modes.get(name, "export"), words, name)
