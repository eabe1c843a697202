"""Search of layouts for N devices: those that fit, sorted by step time, and why others do not.

Model and global batch stay unchanged. The search varies the layout, ZeRO, sequence parallelism and
recomputation, and doubles the micro batch while that is faster. With train.micro_batch_size=auto
each layout has the largest micro batch that fits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

from common.accelerators import GIB, Accelerator
from common.config.resolved import as_run
from common.config.schema import RunConfig
from common.errors import ConfigError
from common.parallel.batch import MAX_RANKS, divisors
from common.parallel.pipeline import schedule_error
from common.parallel.run import Run
from common.parallel.topology import Topology
from common.planner.fitting import RECOMPUTATIONS, Fitting, limit_name
from common.planner.plan import Likeness, Plan, make_plan, speed_and_mfu, table, three_digits, time_of
from common.planner.timing import RANGES

_SHOWN = 10
EQUAL = 1e-9
"""Part of a time by which sums of equal parts may differ."""


class Layout(NamedTuple):
    """A layout that fits, and the time of its step."""

    config: Run
    seconds: float


Suggestions = tuple[list[Layout], dict[str, list[Topology]]]
"""Layouts that fit, best first, the fastest for each data x tensor x pipeline; and reasons that exclude others."""


def suggest(config: Run, devices: int, device: Accelerator, *, is_auto: bool = False) -> Suggestions:
    """Try every layout for this many devices.

    is_auto: whether the plan chooses the micro batch of each. Raises ConfigError for a number outside 1 to MAX_RANKS.
    """
    if not 1 <= devices <= MAX_RANKS:
        raise ConfigError(f"--devices {devices}: expected how many there are, at least 1 and at most {MAX_RANKS}")
    fitting: list[Layout] = []
    refused: dict[str, list[Topology]] = {}
    for tensor, pipeline in product(divisors(devices), repeat=2):
        if devices % (tensor * pipeline):
            continue
        topology = Topology(data=devices // (tensor * pipeline), tensor=tensor, pipeline=pipeline)
        found = _best(config, topology, device, is_auto=is_auto)
        if isinstance(found, Layout):
            fitting.append(found if is_auto else with_larger_batches(found, device))
        else:
            refused.setdefault(found, []).append(topology)
    return sorted(fitting, key=lambda layout: layout.seconds), refused


def _best(config: Run, topology: Topology, device: Accelerator, *, is_auto: bool) -> Layout | str:
    """Return the fastest way to make this layout fit, or why there is none.

    It varies ZeRO stages, recomputation and sequence parallelism, as far as the engine supports
    them. Among equally fast ways it is the one that changes least.
    """
    if topology.tensor > device.server_devices:
        return f"tensor parallel would leave a server of {device.server_devices} devices"
    best: Layout | None = None
    refused = too_large = ""
    settled: set[tuple[int, bool]] = set()
    stages = 2 if config.backend == "mindspore" else 4
    zeros: Iterable[int] = range(stages) if topology.data > 1 else (0,)
    sequences = (False, True) if topology.tensor > 1 and config.backend == "torch" else (False,)
    same = topology.pipeline == config.parallel.pipeline_stage
    for zero, recompute, sequence in product(zeros, RECOMPUTATIONS, sequences):
        if (zero, sequence) in settled:
            continue
        parallel = {
            "data_parallel": topology.data,
            "model_parallel": topology.tensor,
            "pipeline_stage": topology.pipeline,
            "zero_stage": zero,
            "shard_size": None,
            "sequence_parallel": sequence,
            "stage_layers": config.parallel.stage_layers if same else None,
        }
        train: dict[str, Any] = {"accumulation_steps": None, "recompute": recompute}
        train |= {"recompute_layers": None} if recompute == "none" else {}
        train |= {"recompute_slice_activation": False} if topology.tensor == 1 else {}
        train |= {"micro_batch_size": "auto"} if is_auto else {}
        other = as_run(RunConfig, config, parallel=parallel, train=train, device="auto")
        question = Fitting.on(device, other, topology.world_size)
        try:
            candidate = _possible(question.resolve())
            if is_auto:
                candidate = _possible(question.largest())
        except ConfigError as refusal:
            refused = refused or str(refusal).partition(";")[0]
            continue
        limit = f"{(question.limit or 0) / GIB:.1f} GiB of {limit_name(config, device)}"
        too_large = f"more than the {limit}, whatever ZeRO and recomputation do"
        seconds = question.seconds(candidate, device)
        if seconds < math.inf:
            settled.add((zero, sequence))  # more recomputation changes nothing or is slower
        if seconds < (best.seconds * (1 - EQUAL) if best else math.inf):
            best = Layout(config=candidate, seconds=seconds)
    return best or too_large or refused


def _possible(config: Run) -> Run:
    """Return the run. Raises ConfigError if its schedule cannot have its micro batches."""
    schedule = config.parallel.pipeline_schedule
    if error := schedule_error(schedule, config.topology, config.train.accumulation_steps):
        raise ConfigError(error)
    return config


def with_larger_batches(layout: Layout, device: Accelerator) -> Layout:
    """Return the layout with its micro batch doubled as long as it fits and a step gets faster."""
    run = layout.config
    train = {"micro_batch_size": 2 * run.train.micro_batch_size, "accumulation_steps": None}
    question = Fitting.on(device, run, run.topology.world_size)
    try:
        found = _possible(question.resolve(**train))
    except ConfigError:
        return layout
    seconds = question.seconds(found, device)
    if seconds >= layout.seconds * (1 - EQUAL):
        return layout
    return with_larger_batches(Layout(config=found, seconds=seconds), device)


def describe_suggestions(
    config: Run,
    found: Suggestions,
    devices: int,
    device: Accelerator,
    like: Likeness | None = None,
    *,
    all_layouts: bool = False,
) -> str:
    """Return a table of the best layouts, the overrides for the first one, and reasons against others.

    config: the run whose layout is sought. Layouts within TIE of the best are equal for all that the plan knows, and
    sorted by their free memory.
    """
    fitting, refused = found
    source = f"scaled by {like.folder}" if like else "calculated, not measured"
    given = limit_name(config, device)
    limit = "" if given == device.name else f", {given}"
    lines = [
        f"Layouts for {devices} x {device.name} ({device.memory // GIB} GiB{limit}), by the time of a step ({source}):"
    ]
    if fitting:
        most = fitting[0].seconds * (1 + TIE)
        ties = [layout for layout in fitting if layout.seconds <= most]
        others = fitting[len(ties) :]
        ties.sort(key=lambda layout: make_plan(layout.config).peak)
        shown = [*ties, *others][: None if all_layouts else max(_SHOWN, len(ties))]
        lines += _table(shown, device, like)
        if len(ties) > 1:
            lines.append(
                f"The first {len(ties)} are within {TIE:.0%} of the best, which is a tie; they are"
                " sorted by free memory"
            )
        if more := len(fitting) - len(shown):
            lines.append(f"and {more} slower ones (--all lists them)")
        if not like:
            low, high, count = RANGES[device.family]
            lines.append(
                f"Eight of ten of {count} published steps on {device.family} took {low:.2f} to"
                f" {high:.2f} times as long as planned"
            )
        lines += ["", f"The first: {' '.join(_words(ties[0].config, config))}"]
    else:
        wishes = {
            "use more devices": True,
            "a smaller train.micro_batch_size": config.train.micro_batch_size > 1,
            "precision.parameters below float32": config.precision.parameters == "float32",
        }
        lines.append(f"none fits; {' or '.join(wish for wish, helps in wishes.items() if helps)}")
    if refused:
        lines += ["", "Not possible:", *_refusals(refused, all_layouts)]
    return "\n".join(lines) + "\n"


TIE = 0.03
"""Part of a time within which the plan cannot tell which layout is faster."""


def describe_next(plan: Plan, device: Accelerator, like: Likeness | None) -> str:
    """Return the three fastest other layouts of as many devices, and whether they are faster."""
    own = time_of(plan, device).total
    fitting, _ = suggest(plan.run, plan.run.topology.world_size, device)
    others = [layout for layout in fitting if _names(layout.config) != _names(plan.run)][:3]
    if not others:
        return ""
    gain = own / others[0].seconds - 1
    said = (
        f"the best other layouts are faster by up to {gain:.0%}"
        if gain > TIE
        else f"no other layout is more than {TIE:.0%} faster"
    )
    return "\n".join([f"\n{said}:", *_table(others, device, like)]) + "\n"


def _refusals(refused: dict[str, list[Topology]], all_layouts: bool) -> Iterator[str]:
    """Yield a line for each kind of reason, with the bounds of the layouts that it excludes.

    Reasons of a kind differ in numbers, which are joined.
    """
    kinds: dict[tuple[str, ...], list[str]] = {}
    for reason in refused:
        kinds.setdefault(tuple(_NUMBER.split(reason)), []).append(reason)
    counted = [
        (kind, reasons, [layout for reason in reasons for layout in refused[reason]]) for kind, reasons in kinds.items()
    ]
    for kind, reasons, layouts in sorted(counted, key=lambda found: -len(found[2])):
        numbers = [dict.fromkeys(each) for each in zip(*map(_NUMBER.findall, reasons), strict=True)]
        joined = ["/".join(each) if len(each) < 5 else "..." for each in numbers]
        said = "".join(f"{text}{number}" for text, number in zip(kind, [*joined, ""], strict=True))
        bounds = ", ".join(
            f"{axis} {min(sizes)}" + (f"-{max(sizes)}" if max(sizes) > min(sizes) else "")
            for axis in ("data", "tensor", "pipeline")
            if (sizes := [getattr(layout, axis) for layout in layouts])
        )
        count = "1 layout" if len(layouts) == 1 else f"{len(layouts)} layouts"
        yield f"  {bounds} ({count}): {said}"
        if all_layouts:
            names = (f"{each.data} x {each.tensor} x {each.pipeline}" for each in layouts)
            yield f"    data x tensor x pipeline: {', '.join(names)}"


_NUMBER = re.compile(r"\d+")
_HEAD = (
    *("data", "tensor", "pipeline", "ZeRO", "sequence", "recompute", "micro batch"),
    *("GiB", "s a step", "tokens/s", "MFU"),
)


def _names(run: Run) -> tuple[str, ...]:
    """Return the columns that name a layout, before its figures."""
    topology = run.topology
    return (
        *map(str, (topology.data, topology.tensor, topology.pipeline, run.parallel.zero_stage)),
        "yes" if run.parallel.sequence_parallel else "no",
        run.train.recompute,
        str(run.train.micro_batch_size),
    )


def _table(layouts: Sequence[Layout], device: Accelerator, like: Likeness | None) -> list[str]:
    rows = []
    for run, planned in layouts:
        seconds = planned * (like.factor if like else 1.0)
        speed, used = speed_and_mfu(run, device, seconds)
        peak = f"{make_plan(run).peak / GIB:.1f}"
        rows.append((*_names(run), peak, three_digits(seconds), f"{speed:,.0f}", f"{used:.1%}"))
    return table(_HEAD, rows)


def _words(config: Run, run: Run) -> Iterator[str]:
    """Yield the overrides to append to the command of the run."""
    parallel, train, steps = config.parallel, config.train, config.train.accumulation_steps
    names = ("data_parallel", "model_parallel", "pipeline_stage", "zero_stage", "sequence_parallel")
    values = {f"parallel.{name}": getattr(parallel, name) for name in names}
    values |= {"parallel.micro_batch_num": steps, "train.accumulation_steps": steps}  # a file may have either name
    values |= {f"train.{name}": getattr(train, name) for name in ("micro_batch_size", "recompute")}
    optional = {"parallel": ("stage_layers", "shard_size"), "train": ("recompute_layers", "recompute_slice_activation")}
    for section, keys in optional.items():
        own, other = (dict(getattr(each, section)) for each in (run, config))
        values |= {f"{section}.{key}": other[key] for key in keys if own[key] != other[key]}
    for name, value in values.items():
        said = "null" if value is None else value
        yield f"{name}={str(said).lower() if isinstance(said, bool) else said}"
