"""Translate the configuration of another system into a YAML of this project.

Behind each key stands the one that it comes from, and at the end what has no effect here.

    python tools/convert_config.py FILE.yaml [--output OURS.yaml]
        MindFormers' or PaddleFleetX's, by its content
    python tools/convert_config.py --from megatron FLAGS.txt [--output OURS.yaml]
        a file of command-line flags
    python tools/convert_config.py --from oneflow [--output OURS.yaml] \\
            -- --num-layers 24 --hidden-size 1024 ...

Exit code 0: written; 2: bad arguments, or a configuration that this project cannot follow.
"""

if __name__ == "__main__":
    import as_script  # noqa: F401

from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError
from common.files import atomic_write
from common.flags import flag, parse
from common.program import command


@dataclass(kw_only=True)
class Request:
    file: Path | None = flag(
        "FILE: the other system's YAML or JSON, or a file of command-line flags (.txt, .sh)", positional=True, nargs="?"
    )
    overrides: tuple[str, ...] = flag(
        "keys of this project to set in the result", positional=True, nargs="*", metavar="section.key=value"
    )
    system: str | None = flag(
        "system that the configuration comes from (default: told by the content of FILE)",
        "--from",
        choices=(
            *("mindformers", "fleetx", "megatron", "oneflow"),
            *("gpt2_chinese", "gpt2_chinese_generate", "gpt2_chinese_eval"),
        ),
    )
    output: Path | None = flag("FILE: YAML to write (default: print it)")


@command()
def main(words: list[str]) -> None:
    own, flags = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    request = parse(Request, own, __doc__)
    from common.systems.config import COMMAND_LINES, open_config, open_flags
    from common.systems.flags import read_command

    file, system = request.file, request.system
    if system in COMMAND_LINES:
        if bool(flags) == (file is not None):
            raise ConfigError(f"--from {system}: give a file of flags, or the flags behind --")
        flags = flags if file is None else read_command(file)[2]
        text = open_flags(system, flags, request.overrides, str(file or "command line")).yaml
    else:
        if file is None or flags:
            raise ConfigError(
                "give the YAML file to convert; flags behind -- are for --from " + " and ".join(COMMAND_LINES)
            )
        opened = open_config(file, request.overrides)
        if opened.system is None:
            raise ConfigError(f"{file}: is in the words of this project already; --from says whose flags a file holds")
        if system is not None and system not in opened.system.lower():
            raise ConfigError(
                f"{file}: is in {opened.system}'s words, not in those of --from {system}; leave --from out"
            )
        text = opened.yaml
    if request.output is None:
        print(text, end="")
    else:
        with atomic_write(request.output, "w") as out:
            out.write(text)
