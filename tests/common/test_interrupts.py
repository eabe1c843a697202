"""Ctrl-C is exit code 130 without a traceback, whatever a program does at that moment."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from common.interrupts import ending_at_interrupts
from common.tokenizer.bpe_files import END_OF_TEXT

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
MOMENTS = """
import os, signal, sys
from pathlib import Path

sys.path.insert(0, {root!r})
import awkward  # its import alone takes a second
from common.program import command
from common.tokenizer import load_tokenizer

calls = 0
folder = Path({folder!r})


def start():
    load_tokenizer(None, folder / "vocab.json", folder / "merges.txt", "auto")
    return 0


def child(moment):
    "Fork; send Ctrl-C at a call, by number or name. Returns exit code and number of calls."
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        with os.fdopen(read) as answer:
            count = int(answer.read() or 0)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), count

    def count(frame, event, argument):
        global calls
        calls += 1
        if moment in (calls, frame.f_code.co_qualname):
            os.kill(os.getpid(), signal.SIGINT)

    def main():
        sys.setprofile(count)
        start()
        sys.setprofile(None)
        os.write(write, str(calls).encode())
        return 0

    sys.exit(command()(lambda _: main())())


code, total = child(0)
assert code == 0
moments = ["NumpyVersion.__init__", *range(1, total, total // 4)]
print([child(moment)[0] for moment in moments])
"""
PRELUDE = '''"""

if __name__ == "__main__":
    import as_script  # noqa: F401

'''
TOOLS = sorted(path.name for path in (ROOT / "tools").glob("*.py") if path.name != "as_script.py")


def interrupted_at(module: str, *words: str) -> subprocess.CompletedProcess[str]:
    program = INTERRUPTED_AT.format(module=module, words=list(words))
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("module", ["argparse", "common.modelarts.arguments", "pydantic"])
def test_the_front_door(module: str) -> None:
    words = "run_gpt2.py --config configs/gpt2/run_gpt2_13b.yaml --run_mode plan --devices 32"
    done = interrupted_at(module, *words.split(), "--accelerator", "Ascend 910A")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped by Ctrl-C\n")


def test_every_tool_ends_at_an_interrupt_from_its_first_import_on() -> None:
    """It starts right behind its description, so that start() can end it."""
    for tool in TOOLS:
        head, prelude, rest = (ROOT / "tools" / tool).read_text().partition(PRELUDE)
        assert prelude and rest and head.count('"""') == 1, tool
    done = interrupted_at("common.doctor", "tools/doctor.py", "--help")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped by Ctrl-C\n")


def test_the_handler_of_before_comes_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with ending_at_interrupts():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_any_moment_of_loading_a_tokenizer(tmp_path: Path) -> None:
    """Libraries in Rust import numpy in their first call, and panic if that fails."""
    pytest.importorskip("gigatoken", reason="gigatoken is not installed: pip install '.[fast]'")
    letters = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256))]
    letters += [chr(256 + number) for number in range(256 - len(letters))]
    names = [*letters, "th", END_OF_TEXT]
    ids = {name: number for number, name in enumerate(names)}
    (tmp_path / "vocab.json").write_text(json.dumps(ids))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nt h\n")
    program = MOMENTS.format(root=str(ROOT), folder=str(tmp_path))
    # Python 3.12 warns of os.fork beside the threads of a library
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    codes = json.loads(done.stdout)
    assert codes == [130] * len(codes) and len(codes) >= 5, done.stderr
    assert done.stderr == "stopped by Ctrl-C\n" * len(codes)
