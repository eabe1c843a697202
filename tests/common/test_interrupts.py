"""Ctrl-C is exit code 130 without a traceback, whatever a program does at that moment."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from common.interrupts import ending_at_interrupts
from tests.run_scripts import run_words

ROOT = Path(__file__).resolve().parents[2]
# Ctrl-C at the very moment when a module is looked for.
INTERRUPTED_AT = """
import os, runpy, signal, sys

class Interrupt:
    def __init__(self, where):
        self.where = where

    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            if self.where == "import":
                os.kill(os.getpid(), signal.SIGINT)
            else:  # as in the callbacks of Python's own import: what is raised there is dropped
                Dropped()

class Dropped:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt({where!r}))
sys.argv = {words!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
TOOLS = sorted(path.name for path in (ROOT / "tools").glob("*.py") if path.name != "__init__.py")


def interrupted_at(
    module: str, *words: str, where: str = "import"
) -> subprocess.CompletedProcess[str]:
    program = INTERRUPTED_AT.format(module=module, words=list(words), where=where)
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    "module",
    ["argparse", "common.processes.heartbeat", "common.modelarts.arguments", "pydantic", "yaml"],
)
def test_the_front_door(module: str) -> None:
    done = interrupted_at(
        module, "run_gpt2.py", "--config", "configs/gpt2/run_gpt2_tiny.yaml", "--run_mode", "plan"
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted\n")


@pytest.mark.parametrize("module", ["common.processes.heartbeat", "common.planner.room"])
def test_an_interrupt_in_a_destructor_is_not_lost(
    module: str, tmp_path: Path, corpus_prefix: Path
) -> None:
    """Python drops what a destructor raises, and the run would go on to its end."""
    settings = run_words(tmp_path / "run", corpus_prefix, train__max_steps=100000)
    words = [
        "run_gpt2.py",
        "--config",
        "configs/gpt2/run_gpt2_tiny.yaml",
        "--run_mode",
        "train",
        *settings,
    ]
    done = interrupted_at(module, *words, where="destructor")
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n")


def test_other_errors_in_a_destructor_are_still_shown() -> None:
    program = """
from common.interrupts import *
class Failing:
    def __del__(self):
        raise ValueError("shown")
def main():
    Failing()
    return 0
end_at_interrupts()
run_script(main)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "ValueError: shown" in done.stderr


@pytest.mark.parametrize("tool", TOOLS)
def test_every_tool(tool: str) -> None:
    """While it imports the first of its own modules, or failing that json."""
    text = (ROOT / "tools" / tool).read_text()
    behind = text.partition("end_at_interrupts()\n")[2]
    module = next(
        line.split()[1]
        for line in behind.splitlines()
        if line.startswith(("from common.", "import common."))
    )
    done = interrupted_at(module, f"tools/{tool}", "--help")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted\n")


def test_every_tool_ends_by_the_one_way() -> None:
    for tool in TOOLS:
        assert "    run_script(main)\n" in (ROOT / "tools" / tool).read_text(), tool


def test_a_script_that_is_interrupted_in_its_work_says_so() -> None:
    program = (
        "from common.interrupts import *\nimport"
        " signal\nend_at_interrupts()\nrun_script(lambda: signal.raise_signal(signal.SIGINT))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n")


def test_the_handler_of_before_comes_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with ending_at_interrupts():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
