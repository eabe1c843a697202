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

from common.accelerators import GIB, Accelerator
from common.config.resolved import as_run
from common.errors import ConfigError
from common.parallel.batch import MAX_RANKS, divisors
from common.parallel.loss_rows import with_loss_rows
from common.parallel.pipeline import schedule_error
from common.parallel.resolved_run import ResolvedRun
from common.parallel.topology import Topology
from common.planner.fitting import RECOMPUTATIONS, largest_by_plan, time_within
from common.planner.plan import Plan, make_plan, memory_limit, table
from common.resolve.derive import resolve_config, with_micro_batch

_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A layout that fits."""

    config: ResolvedRun
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


def suggest(config: ResolvedRun, devices: int, device: Accelerator) -> Suggestions:
    """Try every layout for this many devices. Raises ConfigError for a number outside 1 to
    MAX_RANKS.
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
        found = _best(config, topology, device)
        if isinstance(found, Layout):
            fitting.append(found)
        else:
            refused.setdefault(found, []).append(topology)
    return Suggestions(
        fitting=tuple(sorted(fitting, key=lambda layout: layout.seconds)),
        refused=refused,
        recompute_layers=config.train.recompute_layers,
        micro_batch_is_auto=config.train.micro_batch_is_auto,
    )


def _best(config: ResolvedRun, topology: Topology, device: Accelerator) -> Layout | str:
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
        candidate = _with_layout(
            config, topology, zero=zero, recompute=recompute, sequence=sequence
        )
        if isinstance(candidate, ResolvedRun) and candidate.train.micro_batch_is_auto:
            candidate = _with_largest(candidate, device, limit)
        if isinstance(candidate, str):
            reasons.append(candidate)
            continue
        candidate = with_loss_rows(candidate, device.memory)
        is_run = True
        outcome = time_within(candidate, device, limit)
        if outcome is None:
            continue
        settled.add((zero, sequence))  # more recomputation changes nothing or is slower
        if outcome < (best.seconds if best else math.inf):
            best = Layout(config=candidate, seconds=outcome)
    if best is not None:
        return best
    if not is_run:
        return reasons[0]
    return f"more than the {limit / GIB:.1f} GiB of a device, whatever ZeRO and recomputation do"


def _ways(config: ResolvedRun, topology: Topology) -> Iterator[tuple[int, str, bool]]:
    """Yield ZeRO stages, recomputation and sequence parallelism worth trying, as far as the engines
    support them.
    """
    piped_by_deepspeed = config.engine == "deepspeed" and topology.pipeline > 1
    most = 1 if config.backend == "mindspore" or piped_by_deepspeed else 3
    zeros: Iterable[int] = range(most + 1) if topology.data > 1 else (0,)
    sequences = (False, True) if topology.tensor > 1 and config.backend == "torch" else (False,)
    return product(zeros, RECOMPUTATIONS, sequences)


def _with_layout(
    config: ResolvedRun, topology: Topology, *, zero: int, recompute: str, sequence: bool
) -> ResolvedRun | str:
    """Return the run with this layout, or the reason against it."""
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
    train["recompute_is_auto"] = False
    if recompute == "none":
        train["recompute_layers"] = None
    if config.train.micro_batch_is_auto:
        train["micro_batch_size"] = "auto"
    if topology.tensor == 1:
        train["recompute_slice_activation"] = False
    written = as_run(ResolvedRun, config, parallel=parallel, train=train, device="auto")
    try:
        tried = resolve_config(written, world_size=topology.world_size)
    except ConfigError as refusal:
        return str(refusal).partition(";")[0]
    return _with_possible_schedule(tried)


def _with_largest(config: ResolvedRun, device: Accelerator, limit: float) -> ResolvedRun | str:
    """Return the run with the largest micro batch that fits, or the reason against its pipeline."""
    size = largest_by_plan(config, limit, device_memory=device.memory)
    return _with_possible_schedule(with_micro_batch(config, size))


def _with_possible_schedule(config: ResolvedRun) -> ResolvedRun | str:
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


def _words(config: ResolvedRun, *, micro_batch: bool) -> Iterator[str]:
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
