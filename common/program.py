"""Programs of the project: how they start, report errors, obey signals and end.

``gpt2 --help`` lists them. Most imports are inside the functions: Ctrl-C in them must not show a traceback.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NoReturn

from common.interrupts import end_at_interrupts, exiting_at_sigterm, raise_interrupts
from common.paths import ROOT, TOOLS as TOOLS_FOLDER

TOOLS = {
    "convert": ("convert_weight", "convert weights between formats"),
    "preprocess": ("preprocess_data", "tokenize text corpora"),
    "doctor": ("doctor", "check this machine before a run"),
    "study": ("study", "measure and compare a matrix of runs"),
}
"""Commands of gpt2 beside the run modes: the file in tools/, and its purpose."""


def gpt2() -> NoReturn:
    """Run ``gpt2 COMMAND ARGUMENTS``."""
    end_at_interrupts()
    from common.command_line import MODES
    from common.errors import ConfigError, report

    name, *words = sys.argv[1:] or ["--help"]
    purposes = {mode: text for mode, (text, _) in MODES.items()}
    purposes |= {tool: text for tool, (_, text) in TOOLS.items()}
    if name in ("--help", "-h"):
        lines = "".join(f"  {one:<12}{text}\n" for one, text in purposes.items())
        sys.stdout.write(f"usage: gpt2 COMMAND ARGUMENTS | gpt2 COMMAND --help\n\n{lines}")
        sys.exit(0)
    if name not in purposes:
        sys.exit(report(ConfigError(f"gpt2 {name}: expected one of {', '.join(purposes)}")))
    sys.argv = [f"gpt2 {name}", *words]
    sys.path.insert(0, str(ROOT))
    if name in TOOLS:
        start(f"{TOOLS_FOLDER}/{TOOLS[name][0]}.py")
    start("run_gpt2.py", ["--run_mode", name, *words], program=sys.argv[0])


def start(file: str, *words: Any, **options: Any) -> NoReturn:
    """Load a script of the project, call its ``main``, and end the process with its exit code.

    file: absolute, or relative to the folder of the project. While it is loaded, Ctrl-C ends the process at once.
    """
    end_at_interrupts()
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # closed, as by >&-
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 - the lowest free number, its own
    from common.errors import report
    from common.interrupts import end_process

    path = (ROOT / file).resolve()
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    code = module.main(*words, **options)
    try:
        sys.stdout.flush()
    except OSError as error:
        if code == 0 and not isinstance(error, BrokenPipeError):  # its reader has seen enough
            code = report(error)
        with suppress(OSError):  # the interpreter's own flush would change the exit code
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except ValueError:  # closed since
        pass
    end_process(code)


def command(
    request: type | None = None, *, stopped: str | None = None, **settings: Any
) -> Callable[[Callable[[Any], int | None]], Callable[..., int]]:
    """Make the ``main`` of a script: it takes the words of a command line, and returns the exit code.

    The decorated function gets the request that the words make, or the words if request is None. It returns None for 0.
    Its errors are printed, and become an exit code. stopped: for a program that cleans up after SIGTERM too; continues
    the sentence "stopped by SIGTERM". settings: those of ``flags.parse``.
    """

    def decorate(work: Callable[[Any], int | None]) -> Callable[..., int]:
        def main(words: list[str] | None = None) -> int:
            from common.errors import GPT2Error, StopRequested, report
            from common.flags import parse

            given: Any = sys.argv[1:] if words is None else words
            about = sys.modules[work.__module__].__doc__
            try:
                if request is not None:
                    given = parse(request, given, about, **settings)
                raise_interrupts()
                with nullcontext() if stopped is None else exiting_at_sigterm():
                    return work(given) or 0
            except BrokenPipeError as error:
                try:
                    sys.stdout.flush()
                except BrokenPipeError:  # its reader has seen enough of the output
                    return 0
                return report(error)
            except (GPT2Error, OSError) as error:
                return report(error)
            except (KeyboardInterrupt, SystemExit) as stop:
                if isinstance(stop, KeyboardInterrupt):
                    return report(StopRequested(signal.SIGINT, stopped or ""))
                if stopped is None or stop.code != 128 + signal.SIGTERM:
                    raise
                return report(StopRequested(signal.SIGTERM, stopped))

        return main

    return decorate
