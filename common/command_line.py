"""Command line of run_gpt2.py. It loads no library, so that --help answers at once."""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from typing import Any

from common.flags import flag, make_parser

MODES = {
    "train": ("train, or resume a stopped run", "data.train=data/own_text_document output_dir=output/own"),
    "finetune": (
        "train from the weights of a checkpoint",
        "checkpoint.init_from=output/quickstart output_dir=output/tuned",
    ),
    "eval": ("loss and perplexity of a checkpoint", "output_dir=output/quickstart"),
    "predict": (
        "continue a prompt",
        "output_dir=output/quickstart predict.prompt='To be' predict.strategy=sampling predict.top_k=40",
    ),
    "serve": ("answer OpenAI's /v1/completions over HTTP", "output_dir=output/quickstart serve.port=8000"),
    "export": ("write the weights of a checkpoint as one file", "output_dir=output/quickstart"),
    "plan": ("show ranks, batch and memory, and start nothing", "parallel.data_parallel=4"),
}
"""Purpose of each run mode, and example overrides."""
RUN_MODES = tuple(MODES)
PLAN_FLAGS = ("all", "accelerator", "devices", "like", "link", "network", "server_devices")


class _Explain(argparse.Action):
    """Action that prints a key of the schema and ends, as --help does."""

    def __call__(self, parser: argparse.ArgumentParser, _: Any, value: Any, option: Any = None) -> None:
        from common.config.explain import explain_key

        sys.stdout.write(explain_key(value))
        parser.exit()


@dataclass(kw_only=True)
class Flags:
    config: str = flag(
        "FILE: the run's YAML, for example configs/gpt2/run_gpt2.yaml; MindFormers' and"
        " PaddleFleetX's YAML, GPT2-Chinese's model_config.json and files of Megatron's,"
        " OneFlow's or GPT2-Chinese's flags (.sh, .txt) are read too",
        *("-c", "--config"),
        required=True,
    )
    run_mode: str = flag("what to do: see below", required=True, choices=RUN_MODES)
    explain: str | None = flag(
        "KEY: type, default, allowed values and meaning of a key such as"
        " optimizer.learning_rate, or of a section; other systems' names are understood; the"
        " sections without KEY; starts nothing",
        action=_Explain,
        nargs="?",
    )
    show_config: bool = flag(
        "print the configuration as this project's YAML, with the keys that it was written with, and stop"
    )
    override: tuple[str, ...] = flag(
        "same as section.key=value without -o; may be repeated", "-o", "--override", metavar="section.key=value"
    )
    all: bool = flag("plan lists every rank, stage and layout, and explains its columns")
    accelerator: str | None = flag('NAME: plan estimates the time of a step on it, such as "Ascend 910A" or H100')
    devices: str | None = flag("N: plan suggests layouts for so many of --accelerator; or both in one: 8xH100")
    like: str | None = flag("FOLDER: plan scales its times by what the run in this folder measured")
    link: float | None = flag(
        "GB/S: plan: what a device sends to the others of its server, where it differs from the table's machine"
    )
    network: float | None = flag("GB/S: plan: what a device sends to other servers, its share of their adapters")
    server_devices: int | None = flag("N: plan: devices of a server")


_EPILOG = """\
run modes, each with an example to put behind --config configs/gpt2/run_gpt2_tiny.yaml:
{modes}
{more}\
Any key of the configuration can follow as section.key=value, for example train.max_steps=100;
--explain train lists those of a section. ModelArts jobs and MindFormers' arguments:
docs/modelarts.md.

exit codes: 0 success, 1 failed at run time, 2 input or configuration at fault, 130 Ctrl-C,
143 SIGTERM (both after saving)"""


def parse_arguments(
    argv: list[str] | None = None, *, program: str = "run_gpt2.py", more: str = ""
) -> argparse.Namespace:
    """Parse the command line. Raises ConfigError, or ends the process with exit code 2.

    program, more: the name under which it was started, and an addition to its help.
    """
    modes = "".join(
        f"  {mode:<10}{meaning}\n{'':<12}  --run_mode {mode} {example}\n" for mode, (meaning, example) in MODES.items()
    )
    parser = make_parser(
        "Train, evaluate, generate with and export GPT-2 from one YAML.",
        Flags,
        prog=program,
        epilog=_EPILOG.format(modes=modes, more=more),
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="override values of the file")
    arguments, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        from common.config.hints import unknown_arguments

        parser.error(unknown_arguments(unknown, sys.argv[1:] if argv is None else argv))
    arguments.overrides = [*arguments.override, *arguments.overrides]
    for name in PLAN_FLAGS:
        given = getattr(arguments, name)
        if given not in (None, False) and arguments.run_mode != "plan":
            parser.error(f"--{name} is for --run_mode plan, not {arguments.run_mode}; leave it out")
    _read_devices(parser, arguments)
    return arguments


def _read_devices(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Take --devices and --accelerator apart, where one says both, and check what was given."""
    found: dict[str, set[str]] = {"devices": set(), "accelerator": set()}
    for name in found:
        text = getattr(arguments, name) or ""
        counted = re.fullmatch(r"(\d{1,9}) ?x ?(.+)", text)
        found["devices"] |= {counted[1]} if counted else {text} & {arguments.devices}
        found["accelerator"] |= {counted[2]} if counted else {text} & {arguments.accelerator}
    for name, given in found.items():
        if len(given) > 1:
            parser.error(f"--devices and --accelerator differ: {' and '.join(sorted(given))}")
        setattr(arguments, name, next(iter(given), None))
    if arguments.devices is not None:
        if not re.fullmatch(r"-?\d{1,9}", arguments.devices):
            parser.error(f"--devices {arguments.devices}: expected a number, or 8xH100")
        arguments.devices = int(arguments.devices)
    for name in ("link", "network", "server_devices"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < float("inf"):
            parser.error(f"--{name} {value:g}: expected more than 0")
    needs = ("devices", "link", "network", "server_devices")
    asking = [name for name in needs if getattr(arguments, name)]
    if asking and arguments.accelerator is None and arguments.like is None:
        parser.error(
            f"--{asking[0]} needs to know of what kind the devices are; add --accelerator NAME,"
            ' such as H100 or "Ascend 910A"'
        )
