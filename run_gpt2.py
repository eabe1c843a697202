"""Front door of every run.

    python run_gpt2.py --config configs/gpt2/run_gpt2.yaml --run_mode train [section.key=value ...]

Exit code 0: success; 2: bad input or configuration; 1: failure at run time; 128+n: stopped by signal n.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.cluster.environment import Process
    from common.config.schema import RunConfig
    from common.modelarts.arguments import Job

sys.path.insert(0, str(Path(__file__).resolve().parent))

RUN_MODES = ("train", "finetune", "eval", "predict", "export", "plan")


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="run_gpt2.py",
        description="Train, evaluate, generate with and export GPT-2 from one YAML.",
        epilog="Any key of the configuration can follow as section.key=value, for example train.max_steps=100."
        " All keys: configs/schema.json, or any run folder's config.yaml. ModelArts jobs and MindFormers' arguments: docs/modelarts.md.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="the run's YAML, for example configs/gpt2/run_gpt2.yaml")
    parser.add_argument(
        "--run_mode", required=True, choices=RUN_MODES, help="what to do; plan shows ranks, batch and memory and starts nothing"
    )
    parser.add_argument("--all_ranks", action="store_true", help="plan lists every rank, of more than 64 too")
    parser.add_argument("--accelerator", metavar="NAME", help='plan estimates the time of a step on it, such as "Ascend 910A" or H100')
    parser.add_argument("--devices", type=int, metavar="N", help="plan suggests layouts for so many of --accelerator")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="values that win over the file's")
    arguments = parser.parse_intermixed_args(words)
    for name in ("all_ranks", "accelerator", "devices"):
        if getattr(arguments, name) and arguments.run_mode != "plan":
            parser.error(f"--{name} is for --run_mode plan, not {arguments.run_mode}; leave it out")
    if arguments.devices is not None and arguments.accelerator is None:
        parser.error("--devices needs to know of what kind they are; add --accelerator NAME")
    return arguments


def main(words: list[str] | None = None) -> int:
    environ = dict(os.environ)  # the launcher's variables, some of which the next line removes
    # What is imported here loads no library, so that --help answers at once.
    from common.launcher.heartbeat import start_heartbeat

    start_heartbeat()
    from common.errors import GPT2Error
    from common.modelarts.arguments import translate

    try:
        job = translate(sys.argv[1:] if words is None else words, environ)
        return run(parse_arguments(list(job.words)), job, environ)
    except GPT2Error as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:  # a disk that is full or gone, in the middle of a run
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130


def run(arguments: argparse.Namespace, job: Job, environ: Mapping[str, str]) -> int:
    """Find out who this process is, bring its input here, read the config, run the mode, bring the output back."""
    from common.cluster.environment import ALONE, find_process, is_scheduler
    from common.cluster.rank_environment import rank_command
    from common.config.load import load_config
    from common.config.resolve import ONE_DEVICE_MODES, resolve_mode
    from common.modelarts import files, job as platform
    from common.training.log import LOG, start_log

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
            importlib.import_module("mindformers_gpt2.world").serve_as_scheduler()
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
    from common.cluster.environment import announced_world_size
    from common.config.load import load_config
    from common.config.resolve import resolve_config
    from common.device import require_accelerator
    from common.parallel.topology import Topology

    config = load_config(arguments.config, arguments.overrides)
    written = Topology.from_config(config.parallel)
    device = require_accelerator(arguments.accelerator) if arguments.accelerator else None
    config = resolve_config(config, world_size=announced_world_size(environ) or written.world_size)
    if arguments.devices is not None and device is not None:
        from common.parallel.suggest import describe_suggestions, suggest

        text = describe_suggestions(suggest(config, arguments.devices, device), arguments.devices, device)
    elif environ.get("RANK_TABLE_FILE"):
        from common.cluster import read_table
        from common.cluster.plan import describe_cluster, places_of_plan

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
        from common.parallel.planner import describe_plan, make_plan

        text = describe_plan(make_plan(config), config, all_ranks=arguments.all_ranks, device=device)
    sys.stdout.write(text)


def start_backend(run_mode: str, config: RunConfig, process: Process) -> None:
    """Import the backend of a resolved config, and run the mode in it; an export of weights needs none."""
    from common.config.engine import check_here
    from common.config.resolve import ONE_DEVICE_MODES, export_format
    from common.errors import ConfigError
    from common.parallel.topology import Topology
    from common.training.log import LOG
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
    if config.backend == "mindspore":
        receive_interrupts()
    try:
        importlib.import_module(config.backend)
    except ImportError as error:
        raise ConfigError(f"backend={config.backend}: it cannot be imported ({error}); pip install '.[{config.backend}]'") from None
    if run_mode == "finetune" and config.checkpoint.init_from is None:
        raise ConfigError("--run_mode finetune starts from weights: give checkpoint.init_from=FOLDER (a checkpoint or a run folder)")
    name = {"train": "train", "finetune": "train", "eval": "evaluate", "predict": "predict", "export": "export"}[run_mode]
    getattr(importlib.import_module(f"{package}.{name}"), name)(config, process)


if __name__ == "__main__":
    from common.training.stop import end_process

    end_process(main())
