"""Front door of every run.

    python run_gpt2.py --config configs/gpt2/run_gpt2.yaml --run_mode train [section.key=value ...]

Exit code 0: success; 2: bad input or configuration; 1: failure at run time; 128+n: stopped by signal n.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

RUN_MODES = ("train", "finetune", "eval", "predict", "export", "plan")


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="run_gpt2.py",
        description="Train, evaluate, generate with and export GPT-2 from one YAML.",
        epilog="Any key of the configuration can follow as section.key=value, for example train.max_steps=100."
        " All keys: configs/schema.json, or any run folder's config.yaml.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="the run's YAML, for example configs/gpt2/run_gpt2.yaml")
    parser.add_argument(
        "--run_mode", required=True, choices=RUN_MODES, help="what to do; plan shows ranks, batch and memory and starts nothing"
    )
    parser.add_argument("--all_ranks", action="store_true", help="plan lists every rank, of more than 64 too")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="values that win over the file's")
    arguments = parser.parse_intermixed_args(words)
    if arguments.all_ranks and arguments.run_mode != "plan":
        parser.error(f"--all_ranks is for --run_mode plan, not {arguments.run_mode}; leave it out")
    return arguments


def main(words: list[str] | None = None) -> int:
    arguments = parse_arguments(words)
    # The parser above answers --help without loading what follows.
    from common.errors import GPT2Error
    from common.training.log import start_log

    start_log()
    try:
        run(arguments)
    except GPT2Error as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:  # a disk that is full or gone, in the middle of a run
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    return 0


def run(arguments: argparse.Namespace) -> None:
    """Read the config, pick the backend, run the mode."""
    from common.config.load import load_config
    from common.config.resolve import resolve_config
    from common.errors import ConfigError
    from common.training.stop import receive_interrupts

    config = load_config(arguments.config, arguments.overrides)
    if arguments.run_mode == "plan":
        from common.parallel.planner import describe_plan, make_plan
        from common.parallel.topology import Topology

        written = Topology.from_config(config.parallel)
        config = resolve_config(config, world_size=_world_size(otherwise=written.world_size))
        sys.stdout.write(describe_plan(make_plan(config), config, all_ranks=arguments.all_ranks))
        return
    config = resolve_config(config, world_size=_world_size())
    os.environ.setdefault("GLOG_v", "3")  # MindSpore's warnings about devices that this machine does not have
    package = {"torch": "torch_gpt2", "mindspore": "mindformers_gpt2"}[config.backend]
    if arguments.run_mode == "export" and config.backend != "mindspore":
        raise ConfigError("--run_mode export is for backend mindspore in this version (it writes MindIR); add backend=mindspore")
    if config.backend == "mindspore":
        receive_interrupts()
    try:
        importlib.import_module(config.backend)
    except ImportError as error:
        raise ConfigError(f"backend={config.backend}: it cannot be imported ({error}); pip install '.[{config.backend}]'") from None
    if arguments.run_mode == "finetune" and config.checkpoint.init_from is None:
        raise ConfigError("--run_mode finetune starts from weights: give checkpoint.init_from=FOLDER (a checkpoint or a run folder)")
    name = {"train": "train", "finetune": "train", "eval": "evaluate", "predict": "predict", "export": "export"}[arguments.run_mode]
    getattr(importlib.import_module(f"{package}.{name}"), name)(config)


def _world_size(*, otherwise: int = 1) -> int:
    """Processes of this run, as launchers announce them; ``otherwise`` where none does."""
    from common.errors import ConfigError

    for name in ("WORLD_SIZE", "RANK_SIZE"):
        value = os.environ.get(name)
        if value:
            if not value.isdigit() or int(value) < 1:
                raise ConfigError(f"environment: {name}={value}: expected the number of processes")
            return int(value)
    return otherwise


if __name__ == "__main__":
    sys.exit(main())
