"""Front door of every run.

    python run_gpt2.py --config configs/gpt2/run_gpt2.yaml --run_mode train [section.key=value ...]

Exit code 0: success; 2: bad input or configuration; 1: failure at run time; 128+n: stopped by signal n.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from common.interrupts import end_at_interrupts, ending_at_interrupts, raise_interrupts

if __name__ == "__main__":
    end_at_interrupts()

import argparse
import importlib
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from common.cluster.environment import Process
    from common.config.schema import RunConfig
    from common.modelarts.arguments import ModelArtsJob

MODES = {
    "train": ("train, or go on with a run that was stopped", "data.train=data/own_text_document output_dir=output/own"),
    "finetune": ("train from the weights of a checkpoint", "checkpoint.init_from=output/quickstart output_dir=output/tuned"),
    "eval": ("loss and perplexity of a checkpoint", "output_dir=output/quickstart"),
    "predict": ("continue a prompt", "output_dir=output/quickstart predict.prompt='To be' predict.strategy=sampling predict.top_k=40"),
    "export": ("write the weights of a checkpoint as one file", "output_dir=output/quickstart"),
    "plan": ("show ranks, batch and memory, and start nothing", "parallel.data_parallel=4"),
}
"""What each run mode does, and an example of the words behind it."""
RUN_MODES = tuple(MODES)


def parse_arguments(words: list[str] | None = None, *, program: str = "run_gpt2.py", more: str = "") -> argparse.Namespace:
    """The command line. program, more: the name under which it was started, and what its help says besides. Raises ConfigError."""
    width = max(map(len, MODES)) + 2
    modes = "".join(f"  {mode:<{width}}{what}\n  {'':<{width}}  --run_mode {mode} {example}\n" for mode, (what, example) in MODES.items())
    parser = argparse.ArgumentParser(
        prog=program,
        description="Train, evaluate, generate with and export GPT-2 from one YAML.",
        epilog=f"run modes, each with an example to put behind --config configs/gpt2/run_gpt2_tiny.yaml:\n{modes}\n{more}"
        "Any key of the configuration can follow as section.key=value, for example train.max_steps=100; --explain train lists those of a\n"
        "section. ModelArts jobs and MindFormers' arguments: docs/modelarts.md.\n\n"
        "exit codes: 0 success, 1 failed at run time, 2 input or configuration at fault, 130 Ctrl-C, 143 SIGTERM (both after saving)",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="the run's YAML, for example configs/gpt2/run_gpt2.yaml")
    parser.add_argument("--run_mode", required=True, choices=RUN_MODES, help="what to do: see below")
    parser.add_argument(
        "--explain",
        action=_Explain,
        metavar="KEY",
        help="type, default, allowed values and meaning of a key such as optimizer.learning_rate, or of a section; other systems' names"
        " are understood; starts nothing",
    )
    parser.add_argument("--all_ranks", action="store_true", help="plan lists every rank, of more than 64 too")
    parser.add_argument("--accelerator", metavar="NAME", help='plan estimates the time of a step on it, such as "Ascend 910A" or H100')
    parser.add_argument("--devices", type=int, metavar="N", help="plan suggests layouts for so many of --accelerator")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="values that win over the file's")
    arguments, unknown = parser.parse_known_intermixed_args(words)
    if unknown:
        parser.error(_unrecognized(unknown, sys.argv[1:] if words is None else words))
    for name in ("all_ranks", "accelerator", "devices"):
        if getattr(arguments, name) and arguments.run_mode != "plan":
            parser.error(f"--{name} is for --run_mode plan, not {arguments.run_mode}; leave it out")
    if arguments.devices is not None and arguments.accelerator is None:
        parser.error("--devices needs to know of what kind they are; add --accelerator NAME")
    return arguments


class _Explain(argparse.Action):
    """Prints a key of the schema and ends, as --help does."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        from common.config.explain import explain_key

        sys.stdout.write(explain_key(values))
        parser.exit()


def _unrecognized(unknown: Sequence[str], words: Sequence[str]) -> str:
    """Names the words that are no argument, and for each the key that it may mean, with the value that was given."""
    from common.config.hints import key_for_flag

    lines = [f"unrecognized arguments: {' '.join(unknown)}; keys of the configuration are written section.key=value"]
    for word in unknown:
        name, equals, value = word.lstrip("-").partition("=")
        if not equals:
            behind = words[words.index(word) + 1 :][:1] if word in words else []
            value = behind[0] if behind and not behind[0].startswith("-") and "=" not in behind[0] else "..."
        if found := key_for_flag(name, value):
            lines.append(f"{word}: did you mean {found}?")
    return "\n".join(lines)


def main(words: list[str] | None = None, *, program: str = "run_gpt2.py", more: str = "") -> int:
    environ = dict(os.environ)  # the launcher's variables, some of which the next line removes
    # What is imported here loads no library, so that --help answers at once.
    from common.processes.heartbeat import start_heartbeat

    start_heartbeat()
    from common.errors import GPT2Error
    from common.modelarts.arguments import translate

    try:
        job = translate(sys.argv[1:] if words is None else words, environ)
        return run(parse_arguments(list(job.words), program=program, more=more), job, environ)
    except GPT2Error as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:  # a disk that is full or gone, in the middle of a run
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130


def run(arguments: argparse.Namespace, job: ModelArtsJob, environ: Mapping[str, str]) -> int:
    """Find out who this process is, bring its input here, read the config, run the mode, bring the output back."""
    from common.cluster.environment import ALONE, find_process, is_scheduler
    from common.cluster.rank_environment import rank_command
    from common.config.load import load_config
    from common.log import LOG, start_log
    from common.modelarts import files, job as platform
    from common.resolve.derive import ONE_DEVICE_MODES, resolve_mode

    raise_interrupts()
    if arguments.run_mode == "plan":
        plan(arguments, environ)
        return 0
    unranked = platform.must_start_ranks(environ)
    starts_ranks = unranked and not job.one_process
    process = ALONE if unranked else find_process(environ)
    start_log(rank=process.rank)
    for remark in (*job.remarks, *process.remarks) if process.rank == 0 else ():
        LOG.warning(remark)
    os.environ.update(platform.platform_variables(process, environ))
    config = load_config(arguments.config, arguments.overrides)
    if is_scheduler(environ):  # msrun starts it with the same command as the ranks
        if config.backend == "mindspore" and arguments.run_mode not in ONE_DEVICE_MODES:
            importlib.import_module("mindformers_gpt2.parallel.world").serve_as_scheduler()
        return 0
    output_url = files.output_url(config, job.output_url)
    ranks = () if output_url is None else platform.ranks_to_copy(process, environ, one_process=job.one_process)
    overrides = [*arguments.overrides, *files.bring_files(config, arguments.overrides, output_url, ranks, environ)]
    config = load_config(arguments.config, overrides)
    with files.output_copied(output_url, Path(config.output_dir), ranks, environ):
        world_size = platform.world_size_of_job(environ) if starts_ranks else process.world_size
        config = resolve_mode(config, arguments.run_mode, world_size=world_size)
        if starts_ranks:
            code = platform.start_ranks(rank_command(Path(arguments.config), arguments.run_mode, overrides), config, environ)
            if code:
                sys.exit(code)  # an exception, so that a failed copy of the output does not replace it
        else:
            start_backend(arguments.run_mode, config, process)
    return 0


def plan(arguments: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """Print what the run would be: of the processes that a launcher announces, else of those that the layout needs."""
    from common.accelerators import require_accelerator
    from common.cluster.environment import announced_world_size
    from common.config.load import load_config
    from common.parallel.topology import Topology
    from common.resolve.derive import resolve_config

    config = load_config(arguments.config, arguments.overrides)
    written = Topology.from_config(config.parallel)
    device = require_accelerator(arguments.accelerator) if arguments.accelerator else None
    config = resolve_config(config, world_size=announced_world_size(environ) or written.world_size)
    if arguments.devices is not None and device is not None:
        from common.planner.suggest import describe_suggestions, suggest

        text = describe_suggestions(suggest(config, arguments.devices, device), arguments.devices, device)
    elif environ.get("RANK_TABLE_FILE"):
        from common.cluster.rank_table_files import read_table
        from common.planner.cluster import describe_cluster, places_of_plan

        path = Path(environ["RANK_TABLE_FILE"]).absolute()
        table = read_table(path)
        text = describe_cluster(
            config,
            places_of_plan(table),
            config_path=Path(arguments.config).absolute(),
            overrides=arguments.overrides,
            table=(path, table),
            all_ranks=arguments.all_ranks,
            environ=environ,
            device=device,
        )
    else:
        from common.planner.plan import describe_plan, make_plan
        from common.planner.room import fits_machine

        found = make_plan(config)
        text = describe_plan(found, config, all_ranks=arguments.all_ranks, device=device)
        if device is None and (here := fits_machine(config, found.peak)):
            text += f"\n{here}\n"
    sys.stdout.write(text)


def start_backend(run_mode: str, config: RunConfig, process: Process) -> None:
    """Import the backend of a resolved config, and run the mode in it; an export of weights needs none."""
    from common.errors import ConfigError, RunError
    from common.inputs import check_inputs
    from common.log import LOG
    from common.parallel.topology import Topology
    from common.planner.room import out_of_memory
    from common.resolve.derive import ONE_DEVICE_MODES, export_format
    from common.resolve.engine_checks import check_here
    from common.training.stop import receive_interrupts

    os.environ.setdefault("GLOG_v", "3")  # MindSpore's warnings about devices that this machine does not have
    # an installed torch_npu breaks `import torch` where CANN is not set up; the device that needs it loads it
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    package = {"torch": "torch_gpt2", "mindspore": "mindformers_gpt2"}[config.backend]
    if process.rank > 0 and run_mode in ONE_DEVICE_MODES and Topology.from_config(config.parallel).world_size == 1:
        LOG.warning(f"--run_mode {run_mode} takes one device in this version, that of rank 0; rank {process.rank} has nothing to do")
        return
    if run_mode == "export" and export_format(config) == "safetensors":
        from common.training.export import export

        export(config)
        return
    check_here(config)
    if process.rank == 0:
        check_inputs(run_mode, config)
    if config.backend == "mindspore":
        receive_interrupts()
    name = {"train": "train", "finetune": "train", "eval": "evaluate", "predict": "predict", "export": "export"}[run_mode]
    with ending_at_interrupts():
        try:
            importlib.import_module(config.backend)
        except ImportError as error:
            raise ConfigError(f"backend={config.backend}: it cannot be imported ({error}); pip install '.[{config.backend}]'") from None
        entry = getattr(importlib.import_module(f"{package}.{name}"), name)
    try:
        entry(config, process)
    except (MemoryError, RuntimeError, ValueError, OSError) as error:
        rank = process.rank % Topology.from_config(config.parallel).world_size
        message = out_of_memory(error, config, rank=rank, training=name == "train")
        if message is None:
            raise
        raise RunError(message) from None


if __name__ == "__main__":
    from common.training.stop import end_process

    end_process(main())
