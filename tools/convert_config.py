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

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.interrupts import end_at_interrupts, run_script

if __name__ == "__main__":
    end_at_interrupts()

from common.errors import ConfigError, GPT2Error, report
from common.files import atomic_write


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    flags = words[words.index("--") + 1 :] if "--" in words else []
    args = _parser().parse_intermixed_args(words[: words.index("--")] if "--" in words else words)
    try:
        text = _convert(args, flags)
        if args.output is None:
            print(text, end="")
        else:
            with atomic_write(args.output, "w") as file:
                file.write(text)
    except GPT2Error as error:
        return report(error)
    return 0


def _convert(args: argparse.Namespace, flags: list[str]) -> str:
    from common.systems.config import COMMAND_LINES, open_config, open_flags
    from common.systems.flags import read_flag_file

    if args.system in COMMAND_LINES:
        if bool(flags) == (args.file is not None):
            raise ConfigError(f"--from {args.system}: give a file of flags, or the flags behind --")
        return open_flags(
            args.system,
            flags or read_flag_file(args.file),
            args.overrides,
            str(args.file or "command line"),
        ).yaml
    if args.file is None or flags:
        raise ConfigError(
            "give the YAML file to convert; flags behind -- are for --from "
            + " and ".join(COMMAND_LINES)
        )
    opened = open_config(args.file, args.overrides)
    if opened.system is None:
        raise ConfigError(
            f"{args.file}: is in the words of this project already; --from says whose flags a file"
            " holds"
        )
    if args.system is not None and args.system not in opened.system.lower():
        raise ConfigError(
            f"{args.file}: is in {opened.system}'s words, not in those of --from {args.system};"
            " leave --from out"
        )
    return opened.yaml


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "file",
        nargs="?",
        type=Path,
        metavar="FILE",
        help="the other system's YAML or JSON, or a file of command-line flags (.txt, .sh)",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="section.key=value",
        help="keys of this project to set in the result",
    )
    parser.add_argument(
        "--from",
        dest="system",
        choices=(
            *("mindformers", "fleetx", "megatron", "oneflow"),
            *("gpt2_chinese", "gpt2_chinese_generate", "gpt2_chinese_eval"),
        ),
        help="system that the configuration comes from (default: told by the content of FILE)",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="YAML to write (default: print it)"
    )
    return parser


if __name__ == "__main__":
    run_script(main)
