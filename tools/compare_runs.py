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
gradients are compared. All rows are written to layers.tsv, and drawn in layers.png.

Exit code 0: the runs are the same within the tolerance; 1: they differ; 2: bad arguments or runs.
A run that fails on the way: 1 or 2, with its error.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.interrupts import end_at_interrupts, run_script

if __name__ == "__main__":
    end_at_interrupts()

from common import whole_numbers
from common.errors import ConfigError, GPT2Error, report
from common.interrupts import exiting_at_sigterm
from common.study import layer_report
from common.study.live_runs import RecordedSides, Side, Workplace, run_config
from common.study.sentences import describe_departure
from common.study.step_records import compare_records
from common.study.two_runs import Comparison, RecordedRun, compare_runs, read_run


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="compare_runs.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "one", type=Path, metavar="RUN", help="run folder or configuration that is the reference"
    )
    parser.add_argument(
        "other", type=Path, metavar="OTHER", help="run folder or configuration to compare with it"
    )
    parser.add_argument(
        "--tolerance",
        type=_tolerance,
        metavar="X",
        help="relative difference allowed (default: 1e-6, and 1e-4 between two frameworks)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="folder of the runs that are started, and of the results of --layers (default: a"
        " temporary one, and output/comparison with --layers)",
    )
    parser.add_argument(
        "--time_limit",
        type=whole_numbers.argument(1),
        default=3600,
        metavar="S",
        help="seconds that each run that is started may take (default: 3600)",
    )
    sides = parser.add_argument_group("runs to start")
    sides.add_argument(
        "--steps",
        type=whole_numbers.argument(1),
        default=10,
        metavar="N",
        help="steps of a configuration (default: 10)",
    )
    for side, name in (("a", "RUN"), ("b", "OTHER")):
        sides.add_argument(
            f"--ranks_{side}",
            type=whole_numbers.argument(1),
            metavar="N",
            help=f"ranks of {name} (default: those of the run folder; 1 for a configuration)",
        )
        sides.add_argument(
            f"--set_{side}",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help=f"override for {name}; may be repeated",
        )
        sides.add_argument(
            f"--program_{side}",
            type=Path,
            metavar="FILE",
            help=f"script that runs {name} in the place of run_gpt2.py, such as that of another"
            " version",
        )
    layers = parser.add_argument_group("layers")
    layers.add_argument(
        "--layers", action="store_true", help="name the first layer and tensor that differ"
    )
    layers.add_argument(
        "--step",
        type=whole_numbers.argument(1),
        metavar="S",
        help="step to compare layer by layer (default: the first that differs)",
    )
    layers.add_argument(
        "--layer_tolerance",
        type=_tolerance,
        metavar="X",
        help="difference allowed, relative to the norm of a tensor (default: 1e-5, 1e-4 between two"
        " frameworks, 1e-2 in float16, 5e-2 in bfloat16)",
    )
    layers.add_argument(
        "--samples",
        type=whole_numbers.argument(1),
        default=8,
        metavar="N",
        help="samples of the batch whose activations are compared, spread over it (default: 8)",
    )
    layers.add_argument(
        "--own_weights",
        action="store_true",
        help="let each run begin from its own checkpoint, not both from that of RUN",
    )
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    arguments = parse_arguments(words)
    try:
        with ExitStack() as stack, exiting_at_sigterm():
            return compare(arguments, stack)
    except GPT2Error as error:
        return report(error)
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1


def compare(arguments: argparse.Namespace, stack: ExitStack) -> int:
    """Compare two runs, and their layers if asked. Returns the exit code.

    Raises GPT2Error and OSError.
    """
    sides = _sides(arguments)
    if arguments.step and not arguments.layers:
        raise ConfigError("--step is the step of --layers; give --layers too")
    # before earlier results are removed, and before the other side is trained
    given = {side.name: read_run(side.given) for side in sides if not side.is_config}
    place = _workplace(arguments, sides, stack)
    one, other = (
        given.get(side.name) or read_run(run_config(side, arguments.steps, place)) for side in sides
    )
    runs = (one, other)
    found = compare_runs(*runs, arguments.tolerance)
    print("\n".join(describe(found)), flush=True)
    code = 0 if found.departure is None else 1
    if not arguments.layers:
        return code
    step = arguments.step or _first_step(found)
    if step is None:
        print("no step differs, so there is no layer to look for; --step S compares any step")
        return code
    _require_step(step, runs)
    recorded = RecordedSides(
        sides=sides,
        runs=runs,
        step=step,
        samples=arguments.samples,
        own_weights=arguments.own_weights,
    )
    layers = compare_records(*recorded.record(place), arguments.layer_tolerance)
    place.clear("record_a", "record_b")
    layer_report.write_table(layers, place.folder / layer_report.TABLE)
    layer_report.draw(
        layers, place.folder / layer_report.PICTURE, (f"A {sides[0].given}", f"B {sides[1].given}")
    )
    print("\n".join(layer_report.describe(layers)))
    print(f"all rows: {place.folder / layer_report.TABLE}")
    print(f"picture: {place.folder / layer_report.PICTURE}")
    return code if layers.first is None else 1


def _sides(arguments: argparse.Namespace) -> tuple[Side, Side]:
    """Return both sides. Raises ConfigError for what is neither a folder nor a configuration."""
    sides = tuple(
        Side(
            name=name,
            given=given,
            ranks=getattr(arguments, f"ranks_{name}"),
            words=tuple(getattr(arguments, f"set_{name}")),
            program=getattr(arguments, f"program_{name}"),
        )
        for name, given in (("a", arguments.one), ("b", arguments.other))
    )
    for side in sides:
        if side.given.is_file() and not side.is_config:
            raise ConfigError(
                f"{side.given}: is a file; give the folder of a run (output_dir), or a"
                " configuration whose name ends with .yaml"
            )
        if side.program is not None and not side.program.is_file():
            raise ConfigError(f"--program_{side.name} {side.program}: no such file")
        starts = side.is_config or arguments.layers
        given = (("ranks", side.ranks), ("set", side.words), ("program", side.program))
        for option, value in given:
            if value and not starts:
                raise ConfigError(
                    f"--{option}_{side.name}: {side.given} is a run folder, which is not run again"
                    " without --layers; leave it out"
                )
    return sides[0], sides[1]


def _workplace(arguments: argparse.Namespace, sides: Sequence[Side], stack: ExitStack) -> Workplace:
    """Return the folder of the runs to start, empty. Raises ConfigError."""
    folder = arguments.output
    if folder is None:
        folder = (
            Path("output/comparison")
            if arguments.layers
            else Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="compare_runs_")))
        )
    place = Workplace(folder=folder, limit=float(arguments.time_limit))
    for side in sides:
        if side.given.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(
                f"--output {folder}: holds {side.given}, and its earlier results are removed;"
                " choose another folder"
            )
    if arguments.layers or any(side.is_config for side in sides):
        place.prepare()
    return place


def _first_step(found: Comparison) -> int | None:
    """Return the first step with other samples, loss or norm."""
    steps = [found.samples, found.departure.step if found.departure else None]
    return min((step for step in steps if step), default=None)


def _require_step(step: int, runs: Sequence[RecordedRun]) -> None:
    for run in runs:
        last = run.keys.get("train.max_steps")
        if isinstance(last, int) and step > last:
            raise ConfigError(f"--step {step}: {run.folder} has the steps 1 to {last}")


def describe(found: Comparison) -> Iterator[str]:
    """Yield the lines of the result."""
    for key, (one, other) in found.keys.items():
        yield f"{key}: {one} -> {other}"
    yield (
        f"compared: {len(found.steps)} steps, {found.steps[0]} to {found.steps[-1]}; tolerance"
        f" {found.tolerance:g}"
    )
    yield f"samples: {'the same' if found.samples is None else f'others from step {found.samples}'}"
    for kind, (size, step) in found.largest.items():
        yield f"{kind}: largest difference {size:.2g}, at step {step}"
    yield (
        "the same"
        if found.departure is None
        else f"different: {describe_departure(found.departure).en}"
    )


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to below 1, found {text!r}")
    return value


if __name__ == "__main__":
    run_script(main)
