"""Search of layouts for N devices: those that fit, sorted by step time, and why others do not.

Model and global batch stay unchanged. The search varies the layout, ZeRO, sequence parallelism and
recomputation. With train.micro_batch_size=auto each layout has the largest micro batch that fits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from common.accelerators import GIB, Accelerator, Hardware
from common.config.resolved import as_run
from common.config.schema import RunConfig
from common.errors import ConfigError
from common.parallel.batch import MAX_RANKS, divisors
from common.parallel.pipeline import schedule_error
from common.parallel.run import Run
from common.parallel.topology import Topology
from common.planner.fitting import RECOMPUTATIONS, Fitting, time_within
from common.planner.plan import Plan, make_plan, memory_limit, table

_SHOWN = 10
EQUAL = 1e-9
"""Part of a time by which sums of equal parts may differ."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A layout that fits."""

    config: Run
    seconds: float

    @cached_property
    def plan(self) -> Plan:
        return make_plan(self.config)


@dataclass(frozen=True, kw_only=True)
class Suggestions:
    fitting: tuple[Layout, ...]
    """Layouts that fit, best first; the fastest for each data x tensor x pipeline."""
    refused: dict[str, list[Topology]]
    """Reason -> layouts that it excludes."""
    recompute_layers: int | None = None
    """train.recompute_layers of the run, which layouts that recompute keep."""
    micro_batch_is_auto: bool = False
    """Whether each layout has a micro batch of its own."""


def suggest(
    config: Run, devices: int, device: Accelerator, *, is_auto: bool = False
) -> Suggestions:
    """Try every layout for this many devices.

    is_auto: whether the plan chooses the micro batch of each. Raises ConfigError for a number
    outside 1 to MAX_RANKS.
    """
    if not 1 <= devices <= MAX_RANKS:
        raise ConfigError(
            f"--devices {devices}: expected how many there are, at least 1 and at most {MAX_RANKS}"
        )
    fitting: list[Layout] = []
    refused: dict[str, list[Topology]] = {}
    for tensor, pipeline in product(divisors(devices), repeat=2):
        if devices % (tensor * pipeline):
            continue
        topology = Topology(data=devices // (tensor * pipeline), tensor=tensor, pipeline=pipeline)
        found = _best(config, topology, device, is_auto=is_auto)
        if isinstance(found, Layout):
            fitting.append(found)
        else:
            refused.setdefault(found, []).append(topology)
    return Suggestions(
        fitting=tuple(sorted(fitting, key=lambda layout: layout.seconds)),
        refused=refused,
        recompute_layers=config.train.recompute_layers,
        micro_batch_is_auto=is_auto,
    )


def _best(config: Run, topology: Topology, device: Accelerator, *, is_auto: bool) -> Layout | str:
    """Return the fastest way to make this layout fit, or why there is none.

    Among equally fast ways it is the one that changes least.
    """
    if topology.tensor > device.server_devices:
        return f"tensor parallel would leave a server of {device.server_devices} devices"
    limit = memory_limit(config, device)
    assert limit is not None
    best: Layout | None = None
    reasons: list[str] = []
    is_run = False
    settled: set[tuple[int, bool]] = set()
    for zero, recompute, sequence in _ways(config, topology):
        if (zero, sequence) in settled:
            continue
        layout, train = _keys(config, topology, zero, recompute, sequence)
        if is_auto:
            train["micro_batch_size"] = "auto"
        candidate = _resolved(config, topology, device, limit, layout, train)
        if isinstance(candidate, str):
            reasons.append(candidate)
            continue
        is_run = True
        outcome = time_within(candidate, device, limit)
        if outcome is None:
            continue
        settled.add((zero, sequence))  # more recomputation changes nothing or is slower
        if outcome < (best.seconds * (1 - EQUAL) if best else math.inf):
            best = Layout(config=candidate, seconds=outcome)
    if best is not None:
        return best
    if not is_run:
        return reasons[0]
    return f"more than the {limit / GIB:.1f} GiB of a device, whatever ZeRO and recomputation do"


def _ways(config: Run, topology: Topology) -> Iterator[tuple[int, str, bool]]:
    """Yield ZeRO stages, recomputation and sequence parallelism worth trying, as far as the engines
    support them.
    """
    piped_by_deepspeed = config.engine == "deepspeed" and topology.pipeline > 1
    most = 1 if config.backend == "mindspore" or piped_by_deepspeed else 3
    zeros: Iterable[int] = range(most + 1) if topology.data > 1 else (0,)
    sequences = (False, True) if topology.tensor > 1 and config.backend == "torch" else (False,)
    return product(zeros, RECOMPUTATIONS, sequences)


def _keys(
    config: Run, topology: Topology, zero: int, recompute: str, sequence: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the keys of parallel and train that make this layout."""
    same = topology.pipeline == config.parallel.pipeline_stage
    parallel: dict[str, Any] = {
        "data_parallel": topology.data,
        "model_parallel": topology.tensor,
        "pipeline_stage": topology.pipeline,
        "zero_stage": zero,
        "shard_size": None,
        "sequence_parallel": sequence,
        "stage_layers": config.parallel.stage_layers if same else None,
    }
    train: dict[str, Any] = {"accumulation_steps": None, "recompute": recompute}
    if recompute == "none":
        train["recompute_layers"] = None
    if topology.tensor == 1:
        train["recompute_slice_activation"] = False
    return parallel, train


def _resolved(
    config: Run,
    topology: Topology,
    device: Accelerator,
    limit: float,
    parallel: dict[str, Any],
    train: dict[str, Any],
) -> Run | str:
    """Return the run with this layout and the largest micro batch that fits, or the reason against
    it.
    """
    hardware = Hardware(kind="auto", name=device.name, memory=device.memory)
    other = as_run(RunConfig, config, parallel=parallel, train=train, device="auto")
    question = Fitting(other, topology.world_size, hardware, limit)
    try:
        found = _with_possible_schedule(question.resolve())
    except ConfigError as refusal:
        return str(refusal).partition(";")[0]
    if isinstance(found, str) or train.get("micro_batch_size") != "auto":
        return found
    return _with_possible_schedule(question.largest())


def _with_possible_schedule(config: Run) -> Run | str:
    """Return the run, or the reason why its pipeline schedule cannot have its micro batches."""
    error = schedule_error(
        config.parallel.pipeline_schedule, config.topology, config.batch.accumulation
    )
    return config if error is None else error


def describe_suggestions(found: Suggestions, devices: int, device: Accelerator) -> str:
    """Return a table of the best layouts, the overrides for the best one, and reasons against
    others.
    """
    lines = [
        f"Layouts for {devices} x {device.name} ({device.memory // GIB} GiB), best first by the"
        " time of a step (calculated, not measured):"
    ]
    if found.fitting:
        head = (
            "data",
            "tensor",
            "pipeline",
            "ZeRO",
            "sequence",
            "recompute",
            "micro batches",
            "GiB",
            "s a step",
            "tokens/s",
        )
        lines += table(head, map(_row, found.fitting[:_SHOWN]))
        if len(found.fitting) > _SHOWN:
            lines.append(f"and {len(found.fitting) - _SHOWN} slower ones")
        words = [*_words(found.fitting[0].config, micro_batch=found.micro_batch_is_auto)]
        if found.recompute_layers is not None and words[-1] == "train.recompute=none":
            words.append("train.recompute_layers=null")
        lines += ["", f"The first: {' '.join(words)}"]
    else:
        lines.append(
            "none fits; use more devices, a smaller micro batch, or precision.parameters below"
            " float32"
        )
    if found.refused:
        lines += ["", "Not possible:"]
        for reason, layouts in sorted(found.refused.items(), key=lambda item: -len(item[1])):
            named = ", ".join(
                f"{layout.data} x {layout.tensor} x {layout.pipeline}" for layout in layouts
            )
            lines.append(f"  {named}: {reason}")
        lines.append("  (data x tensor x pipeline)")
    return "\n".join(lines) + "\n"


def _row(layout: Layout) -> tuple[str, ...]:
    parallel, train, plan = layout.config.parallel, layout.config.train, layout.plan
    axes = (
        str(plan.topology.data),
        str(plan.topology.tensor),
        str(plan.topology.pipeline),
        str(parallel.zero_stage),
    )
    speed = f"{plan.tokens_per_step / layout.seconds:,.0f}"
    ways = (
        "yes" if parallel.sequence_parallel else "no",
        train.recompute,
        str(plan.batch.accumulation),
    )
    return *axes, *ways, f"{plan.peak / GIB:.1f}", f"{layout.seconds:.3g}", speed


def _words(config: Run, *, micro_batch: bool) -> Iterator[str]:
    """Yield the overrides to append to the command.

    micro_batch: include the micro batch size.
    """
    names = ("data_parallel", "model_parallel", "pipeline_stage", "zero_stage", "sequence_parallel")
    values = {name: getattr(config.parallel, name) for name in names}
    for name, value in (values | {"micro_batch_num": config.batch.accumulation}).items():
        yield f"parallel.{name}={str(value).lower() if isinstance(value, bool) else value}"
    if micro_batch:
        yield f"train.micro_batch_size={config.train.micro_batch_size}"
    yield f"train.recompute={config.train.recompute}"
