"""Start of a run by another system's command line, whose flags become a configuration."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence


def main_with_flags(main: Callable[..., int], flags: Sequence[str], program: str) -> int:
    """Call ``main`` of run_gpt2.py with the flags as its configuration; returns its exit code.

    Words section.key=value among the flags are overrides; --run_mode (train where it is left out),
    --show_config and --help are its own. The file of the flags is deleted at the end, unless the
    ranks read it later (DETACH).
    """
    from common.config.hints import schema_keys  # not above: --help loads no library
    from common.launcher.request import is_asked
    from common.systems.flags import write_flag_file

    mode, flags = _run_mode(flags)
    own = [word for word in flags if word in ("--show_config", "--help", "-h")]
    overrides = [
        word
        for word in flags
        if word.partition("=")[1] and word.partition("=")[0].partition(".")[0] in schema_keys()
    ]
    theirs = [word for word in flags if word not in own and word not in overrides]
    with tempfile.NamedTemporaryFile(
        "w", prefix=f"{program}-", suffix=".flags", encoding="utf-8", delete=not is_asked("DETACH")
    ) as file:
        write_flag_file(file, program, theirs)
        file.flush()
        return main(["--config", file.name, "--run_mode", mode, *own, *overrides], program=program)


def _run_mode(flags: Sequence[str]) -> tuple[str, list[str]]:
    """Return the run mode that the flags give, and the other flags."""
    words, mode = list(flags), "train"
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == "--run_mode" and (equals or at + 1 < len(words)):
            mode = value if equals else words[at + 1]
            del words[at : at + (1 if equals else 2)]
            break
    return mode, words
