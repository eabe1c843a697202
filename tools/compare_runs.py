"""Compare two runs step by step, and name the first step at which they differ.

    python tools/compare_runs.py output/first output/two
    python tools/compare_runs.py output/first output/twin --tolerance 1e-4
    python tools/compare_runs.py configs/mine.yaml configs/mine.yaml --set_b backend=mindspore
        runs both configurations first
    python tools/compare_runs.py output/first output/two --layers --output output/comparison
        names the first layer and tensor that differ in that step

Samples (hash), losses and gradient norms are compared over the steps that both runs have. Norms are
compared because Adam hides a gradient of the wrong scale from the losses. Keys of the configuration
that differ and may matter are listed.

A configuration (.yaml) is run for --steps steps first. With --layers both runs make the first step
that differs once more, on one set of weights. Tokens, weights, outputs of all layers and all
gradients are compared. All rows are written to layers.tsv.

Exit code 0: the runs are the same within the tolerance; 1: they differ; 2: bad arguments or runs.
A run that fails on the way: 1 or 2, with its error.
"""

if __name__ == "__main__":
    import as_script  # noqa: F401

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError
from common.flags import at_least, flag
from common.program import command
from gpt2_study.compare import step_records
from gpt2_study.compare.live_runs import Side, compare_runs, make_empty, read_run, record_step, remove, run_config
from gpt2_study.compare.step_records import compare_records


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to below 1, found {text!r}")
    return value


_COUNT = at_least(1)
_RANKS = "ranks of {} (default: those of the run folder; 1 for a configuration)"
_SET = "override for {}; may be repeated"
_PROGRAM = "script that runs {} in the place of run_gpt2.py, such as that of another version"
_OPTIONS = ("ranks", "set", "program")
"""Options of each side."""


@dataclass(kw_only=True)
class Request:
    one: Path = flag("RUN: run folder or configuration that is the reference", required=True, positional=True)
    other: Path = flag("OTHER: run folder or configuration to compare with it", required=True, positional=True)
    tolerance: float | None = flag(
        "X: relative difference allowed (default: 1e-6, and 1e-4 between two frameworks)", type=_tolerance
    )
    output: Path | None = flag(
        "DIR: folder of the runs that are started, and of the results of --layers (default: a"
        " temporary one, and output/comparison with --layers)"
    )
    time_limit: int = flag("S: seconds that each run that is started may take", default=3600, type=_COUNT)
    steps: int = flag("N: steps of a configuration", default=10, type=_COUNT, group="runs to start")
    ranks_a: int | None = flag(_RANKS.format("RUN"), type=_COUNT, metavar="N")
    set_a: tuple[str, ...] = flag(_SET.format("RUN"), metavar="KEY=VALUE")
    program_a: Path | None = flag(_PROGRAM.format("RUN"), metavar="FILE")
    ranks_b: int | None = flag(_RANKS.format("OTHER"), type=_COUNT, metavar="N")
    set_b: tuple[str, ...] = flag(_SET.format("OTHER"), metavar="KEY=VALUE")
    program_b: Path | None = flag(_PROGRAM.format("OTHER"), metavar="FILE")
    layers: bool = flag("name the first layer and tensor that differ", group="layers")
    step: int | None = flag("S: step to compare layer by layer (default: the first that differs)", type=_COUNT)
    layer_tolerance: float | None = flag(
        "X: difference allowed, relative to the norm of a tensor (default: 1e-5, 1e-4 between two"
        " frameworks, 1e-2 in float16, 5e-2 in bfloat16)",
        type=_tolerance,
    )
    samples: int = flag(
        "N: samples of the batch whose activations are compared, spread over it", default=8, type=_COUNT
    )
    own_weights: bool = flag("let each run begin from its own checkpoint, not both from that of RUN")


@command(Request, stopped="")
def main(request: Request) -> int:
    with tempfile.TemporaryDirectory(prefix="compare_runs_") as temporary:
        return compare(request, Path(temporary))


def compare(arguments: Request, temporary: Path) -> int:
    """Compare two runs, and their layers if asked. Returns the exit code."""
    folder = arguments.output or (Path("output/comparison") if arguments.layers else temporary)
    sides = _sides(arguments, folder)
    if arguments.step and not arguments.layers:
        raise ConfigError("--step is the step of --layers; give --layers too")
    # before earlier results are removed, and before the other side is trained
    given = {side.name: read_run(side.given) for side in sides if not side.is_config}
    for side in sides:
        if side.given.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(
                f"--output {folder}: holds {side.given}, and its earlier results are removed; choose another folder"
            )
    if arguments.layers or len(given) < len(sides):
        make_empty(folder)
    one, other = (given.get(side.name) or read_run(run_config(side, arguments.steps)) for side in sides)
    lines, differ, step = compare_runs(one, other, arguments.tolerance)
    print("\n".join(lines), flush=True)
    if not arguments.layers:
        return int(differ)
    step = arguments.step or step
    if step is None:
        print("no step differs, so there is no layer to look for; --step S compares any step")
        return int(differ)
    for run in (one, other):
        last = run.keys.get("train.max_steps")
        if isinstance(last, int) and step > last:
            raise ConfigError(f"--step {step}: {run.folder} has the steps 1 to {last}")
    records = record_step(sides, (one, other), step=step, samples=arguments.samples, own_weights=arguments.own_weights)
    layers = compare_records(*records, arguments.layer_tolerance)
    for record in records:
        remove(record)
    step_records.write_table(layers, folder / step_records.TABLE)
    print("\n".join(step_records.describe(layers)))
    print(f"all rows: {folder / step_records.TABLE}")
    return int(differ) if layers.first is None else 1


def _sides(arguments: Request, folder: Path) -> list[Side]:
    """Return both sides. Raises ConfigError for what is neither a folder nor a configuration."""
    sides = []
    for name, given in (("a", arguments.one), ("b", arguments.other)):
        ranks, words, program = options = [getattr(arguments, f"{option}_{name}") for option in _OPTIONS]
        limit = float(arguments.time_limit)
        side = Side(name=name, given=given, ranks=ranks, words=words, program=program, place=folder, limit=limit)
        if given.is_file() and not side.is_config:
            raise ConfigError(
                f"{given}: is a file; give the folder of a run (output_dir), or a"
                " configuration whose name ends with .yaml"
            )
        if program is not None and not program.is_file():
            raise ConfigError(f"--program_{name} {program}: no such file")
        for option, value in zip(_OPTIONS, options, strict=True):
            if value and not (side.is_config or arguments.layers):
                raise ConfigError(
                    f"--{option}_{name}: {given} is a run folder, which is not run again without --layers; leave it out"
                )
        sides.append(side)
    return sides
