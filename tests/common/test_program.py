"""Every program starts, fails and stops in one way, and gpt2 names them all. Ctrl-C is exit code
130 without a traceback, whatever a program does at that moment.
"""

import os
import shutil
import signal
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import pytest

from common import program
from common.command_line import RUN_MODES
from common.errors import ConfigError, StorageError
from common.flags import flag, parse
from common.interrupts import end_at_once, handling, raise_interrupts
from common.program import TOOLS, command, gpt2
from common.tokenizer import bpe_backends

ROOT = Path(__file__).resolve().parents[2]


def test_gpt2_is_installed_and_starts_every_program(monkeypatch, capsys) -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["gpt2"].partition(":")
    assert getattr(import_module(module), name) is gpt2
    started: list[tuple[Any, ...]] = []
    monkeypatch.setattr(program, "end_at_interrupts", lambda: None)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def start(*given: Any, **options: Any) -> None:
        started.append((*given, *options.items()))
        raise SystemExit

    monkeypatch.setattr(program, "start", start)
    for name in (*RUN_MODES, *TOOLS):
        monkeypatch.setattr(sys, "argv", ["/bin/gpt2", name, "a.b=1"])
        with pytest.raises(SystemExit):
            gpt2()
        if name in TOOLS:
            assert sys.argv == [f"gpt2 {name}", "a.b=1"]
    runs = [("run_gpt2.py", ["--run_mode", mode, "a.b=1"], ("program", f"gpt2 {mode}")) for mode in RUN_MODES]
    assert started == [*runs, *((f"{ROOT}/tools/{file}.py",) for file, _ in TOOLS.values())]
    assert all((ROOT / given[0]).is_file() for given in started)
    for words, code in ((["fly"], 2), (["--help"], 0)):
        monkeypatch.setattr(sys, "argv", ["gpt2", *words])
        with pytest.raises(SystemExit) as stop:
            gpt2()
        assert stop.value.code == code
    out, error = capsys.readouterr()
    assert error.startswith("error: gpt2 fly: expected one of train, ") and error.count("\n") == 1
    assert [line.split()[0] for line in out.splitlines()[2:]] == [*RUN_MODES, *TOOLS]


def test_a_wheel_puts_no_tools_beside_other_packages(tmp_path: Path) -> None:
    """Built and unpacked without a network; its gpt2 still finds every program."""
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    for name in filter(None, listed.split("\0")):
        if name.endswith((".py", ".toml", ".txt", ".yaml", ".html", ".j2", ".typed", "README.md")):
            (tmp_path / "src" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / "src" / name)
    words = ["-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q", "."]
    built = run(*words, "--wheel-dir", str(tmp_path), folder=tmp_path / "src")
    assert built.returncode == 0, built.stderr[-2000:]
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as content:
        content.extractall(tmp_path / "site")
    tops = {path.name for path in (tmp_path / "site").iterdir() if "dist-info" not in path.name}
    ours = {"common", "gpt2_study", "torch_gpt2", "mindformers_gpt2", "gpt2_toolkit", "run_gpt2.py"}
    assert tops == ours
    assert list((tmp_path / "site").rglob("gpt2_study/templates/*.j2"))
    there = "from common.launcher.launch import TOOL; assert TOOL.is_file(), TOOL"
    done = run("-c", there, folder=tmp_path, PYTHONPATH=f"{tmp_path}/site")
    assert done.returncode == 0, done.stderr
    for name in TOOLS:
        program = "from common.program import gpt2; gpt2()"
        done = run("-c", program, name, "--help", folder=tmp_path, PYTHONPATH=f"{tmp_path}/site")
        assert done.returncode == 0 and done.stdout.startswith(f"usage: gpt2 {name}"), done.stderr


def run(*words: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env={**os.environ, **environment},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def test_gpt2_and_the_script_do_the_same_from_any_folder(tmp_path: Path) -> None:
    preset = str(ROOT / "configs/gpt2/run_gpt2_tiny.yaml")
    words = ["--config", preset, "train.global_batch_size=16"]
    start = "from common.program import gpt2; gpt2()"
    one = run("-c", start, "plan", *words, folder=tmp_path, PYTHONPATH=str(ROOT))
    other = run(str(ROOT / "run_gpt2.py"), "--run_mode", "plan", *words, folder=tmp_path)
    assert one.stdout == other.stdout and "global batch 16 =" in one.stdout
    assert (one.returncode, one.stderr) == (other.returncode, other.stderr) == (0, "")


def test_output_that_is_lost_is_an_error_and_a_reader_that_leaves_is_not() -> None:
    words = f"{sys.executable} tools/config_schema.py"
    preset = "configs/gpt2/run_gpt2_tiny.yaml"
    launch = f"{sys.executable} tools/launch.py distribute none {preset} '[0,1]' train"
    for line, code, message in (
        (f"{words} > /dev/full", 1, "error: [Errno 28] No space left on device\n"),
        (f"DRY_RUN=1 {launch} > /dev/full", 1, "error: [Errno 28] No space left on device\n"),
        (f"{words} | head -1 > /dev/null; exit ${{PIPESTATUS[0]}}", 0, ""),
    ):
        done = subprocess.run(["bash", "-c", line], cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (code, message)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (None, 0, ""),
        (ConfigError("x: wrong"), 2, "error: x: wrong\n"),
        (StorageError("full"), 1, "error: full\n"),
        (FileNotFoundError(2, "No such file", "a"), 1, "error: [Errno 2] No such file: 'a'\n"),
        (BrokenPipeError(32, "Broken pipe"), 1, "error: [Errno 32] Broken pipe\n"),  # a socket
        (KeyboardInterrupt(), 130, "stopped by Ctrl-C; nothing is left\n"),
        (signal.SIGTERM, 143, "stopped by SIGTERM; nothing is left\n"),
    ],
)
def test_an_error_becomes_a_message_and_a_code(error: Any, code: int, message: str, capsys) -> None:
    cleaned = []

    @command(stopped="; nothing is left")
    def main(words: list[str]) -> None:
        try:
            if isinstance(error, BaseException):
                raise error
            if error is not None:
                signal.raise_signal(error)
        finally:
            cleaned.append(words)

    assert main(["word"]) == code
    assert capsys.readouterr().err == message and cleaned == [["word"]]


@dataclass
class Request:
    files: tuple[Path, ...] = flag("FILE: inputs", positional=True, nargs="*")
    size: int = flag("N: size", default=4)
    kind: Literal["a", "b"] | None = flag("50% of all", group="more")
    two_words: tuple[str, ...] = flag("WORD: may be repeated")
    on: bool = flag("on (default: on)", default=True)
    off: bool = flag("off")

    def __post_init__(self) -> None:
        if self.size == 13:
            raise ConfigError("--size 13: is unlucky")


def test_options_are_what_the_types_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(Request, [], "About.") == Request((), two_words=(), off=False)
    words = ["x", "--size", "5", "y", "--two_words", "1", "--two-words=1", "--kind", "b", "--no-on", "--off", "z"]
    files = (Path("x"), Path("y"), Path("z"))
    assert parse(Request, words, "About.") == Request(files, 5, "b", ("1", "1"), on=False, off=True)
    for words, message in (
        (["--size", "five"], "argument --size: invalid int value: 'five'"),
        (["--kind", "c"], "argument --kind: invalid choice: 'c' (choose from 'a', 'b')"),
        ([f"--siz={0:02000}"], f"unrecognized arguments: --siz={0:0570}... (1130 characters left out) ...{0:0300}"),
    ):
        with pytest.raises(SystemExit, match="2"):
            parse(Request, words, "About.", prog="x")
        assert capsys.readouterr().err == f"error: {message}\nx --help explains the options\n"
    assert command(Request)(print)(["--size", "13"]) == 2
    assert capsys.readouterr().err == "error: --size 13: is unlucky\n"
    with pytest.raises(SystemExit):
        parse(Request, ["--help"], "About.")
    out = " ".join(capsys.readouterr().out.split())
    assert "--size N size (default: 4)" in out and "more: --kind {a,b} 50% of all" in out


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
PRELUDE = '''"""

if __name__ == "__main__":
    import as_script  # noqa: F401

'''


def require_stop(module: str, words: list[str]) -> None:
    done = run("-c", INTERRUPTED_AT.format(module=module, words=words), folder=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped by Ctrl-C\n")


@pytest.mark.parametrize("module", ["argparse", "common.modelarts.arguments", "pydantic"])
def test_the_front_door(module: str) -> None:
    words = ["run_gpt2.py", "--config", "configs/gpt2/run_gpt2_13b.yaml", "--run_mode", "plan"]
    require_stop(module, [*words, "--accelerator", "32xAscend 910A"])


def test_every_tool_ends_at_an_interrupt_from_its_first_import_on() -> None:
    """It starts right behind its description, so that start() can end it."""
    for tool in (ROOT / "tools").glob("*.py"):
        head, prelude, rest = tool.read_text().partition(PRELUDE)
        is_whole = prelude and rest and head.count('"""') == 1
        assert is_whole or tool.name == "as_script.py", tool
    require_stop("common.doctor", ["tools/doctor.py", "--help"])


def test_ctrl_c_is_an_exception_again_where_a_framework_was_imported() -> None:
    """In the program of someone who calls load_model."""
    before = signal.getsignal(signal.SIGINT)
    with handling({signal.SIGINT: end_at_once}):
        assert signal.getsignal(signal.SIGINT) is end_at_once
    assert signal.getsignal(signal.SIGINT) is before


def test_a_handler_of_the_caller_stays() -> None:
    """In a program that calls a main of ours."""
    before = signal.signal(signal.SIGINT, mine := lambda *_: None)
    try:
        raise_interrupts()
        assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_waits_while_a_tokenizer_in_rust_is_loaded(monkeypatch) -> None:
    """Such a library imports numpy in its first call, and panics where that fails."""
    loaded = []

    def load(**_: object) -> None:
        signal.raise_signal(signal.SIGINT)
        loaded.append(True)
        raise ValueError

    monkeypatch.setattr("tokenizers.models.BPE", load)
    with pytest.raises(KeyboardInterrupt):
        bpe_backends.choose_backend(type("_", (), {"ids": {}, "merges": ()}), "auto")
    assert loaded
