"""Ctrl-C is exit code 130 without a traceback, whatever a program does at that moment."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from common.interrupts import ending_at_interrupts
from common.tokenizer.bpe_files import END_OF_TEXT, byte_alphabet

ROOT = Path(__file__).resolve().parents[2]
# Ctrl-C at the very moment when a module is looked for.
INTERRUPTED_AT = """
import os, runpy, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
sys.argv = {words!r}
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# Ctrl-C when a library in Rust, which imports numpy in its first call, is in the middle of it.
IN_RUST = """
import os, signal, sys
import awkward  # its import alone takes a second
from common.program import command
from common.tokenizer import load_tokenizer

def interrupt(frame, event, argument):
    if frame.f_code.co_qualname == "NumpyVersion.__init__":
        os.kill(os.getpid(), signal.SIGINT)

def main(files):
    sys.setprofile(interrupt)
    load_tokenizer(None, *files, "auto")

sys.exit(command()(main)(sys.argv[1:]))
"""
PRELUDE = '''"""

if __name__ == "__main__":
    import as_script  # noqa: F401

'''
STOPPED = (130, "", "stopped by Ctrl-C\n")
"""Exit code, output and error of a program that was interrupted."""


def result_of(program: str, *words: str) -> tuple[int, str, str]:
    command = [sys.executable, "-c", program, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("module", ["argparse", "common.modelarts.arguments", "pydantic"])
def test_the_front_door(module: str) -> None:
    words = "run_gpt2.py --config configs/gpt2/run_gpt2_13b.yaml --run_mode plan --devices 32"
    given = [*words.split(), "--accelerator", "Ascend 910A"]
    assert result_of(INTERRUPTED_AT.format(module=module, words=given)) == STOPPED


def test_every_tool_ends_at_an_interrupt_from_its_first_import_on() -> None:
    """It starts right behind its description, so that start() can end it."""
    for tool in (ROOT / "tools").glob("*.py"):
        head, prelude, rest = tool.read_text().partition(PRELUDE)
        is_whole = prelude and rest and head.count('"""') == 1
        assert is_whole or tool.name == "as_script.py", tool
    words = ["tools/doctor.py", "--help"]
    assert result_of(INTERRUPTED_AT.format(module="common.doctor", words=words)) == STOPPED


def test_the_handler_of_before_comes_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with ending_at_interrupts():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_inside_a_library_in_rust_that_imports_numpy(tmp_path: Path) -> None:
    """Where the import fails, such a library panics."""
    pytest.importorskip("gigatoken", reason="gigatoken is not installed: pip install '.[fast]'")
    names = [*byte_alphabet(), "th", END_OF_TEXT]
    vocabulary, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    vocabulary.write_text(json.dumps({name: number for number, name in enumerate(names)}))
    merges.write_text("#version: 0.2\nt h\n")
    assert result_of(IN_RUST, str(vocabulary), str(merges)) == STOPPED
