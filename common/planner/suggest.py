"""Layouts for N devices of a kind: those that fit, best first by the estimated time of a step, and why the others do not.

Model, micro batch and global batch stay as they are; the layout, ZeRO, sequence parallel and recomputation are tried.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from common.accelerators import GIB, Accelerator
from common.config.resolved import as_run
from common.config.schema import RunConfig
from common.errors import ConfigError
from common.parallel.batch import MAX_RANKS, divisors
from common.parallel.pipeline import schedule_error
from common.parallel.resolved_run import ResolvedRun
from common.parallel.topology import Topology
from common.planner.plan import Plan, make_plan, memory_limit, table, time_of
from common.resolve.derive import resolve_config

_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One that fits."""

    config: ResolvedRun
    plan: Plan
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Suggestions:
    fitting: tuple[Layout, ...]
    """Best first; of each data x tensor x pipeline the fastest."""
    refused: dict[str, list[Topology]]
    """Reason -> layouts."""


def suggest(config: ResolvedRun, devices: int, device: Accelerator) -> Suggestions:
    """Try every layout for so many devices. Raises ConfigError for a number that is not 1 to MAX_RANKS."""
    if not 1 <= devices <= MAX_RANKS:
        raise ConfigError(f"--devices {devices}: expected how many there are, at least 1 and at most {MAX_RANKS}")
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
    return Suggestions(fitting=tuple(sorted(fitting, key=lambda layout: layout.seconds)), refused=refused)


def _best(config: ResolvedRun, topology: Topology, device: Accelerator) -> Layout | str:
    """The fastest way to make this layout fit, or why there is none. Of equally fast ones the one that changes least."""
    if topology.tensor > device.server_devices:
        return f"tensor parallel would leave a server of {device.server_devices} devices"
    limit = memory_limit(config, device)
    assert limit is not None
    best: Layout | None = None
    reasons: list[str] = []
    least: float | None = None
    for zero, recompute, sequence in _ways(config, topology):
        candidate = _with_layout(config, topology, zero=zero, recompute=recompute, sequence=sequence)
        if isinstance(candidate, str):
            reasons.append(candidate)
            continue
        plan = make_plan(candidate)
        least = plan.peak if least is None else min(least, plan.peak)
        if plan.peak > limit:
            continue
        seconds = time_of(plan, candidate, device).total
        if best is None or seconds < best.seconds:
            best = Layout(config=candidate, plan=plan, seconds=seconds)
    if best is not None:
        return best
    if least is None:
        return reasons[0]
    return f"more than the {limit / GIB:.1f} GiB of a device, whatever ZeRO and recomputation do"


def _ways(config: ResolvedRun, topology: Topology) -> Iterator[tuple[int, str, bool]]:
    """ZeRO stage, recomputation and sequence parallel worth trying, what the engines support."""
    zeros: Iterable[int] = range(4) if topology.data > 1 else (0,)
    if config.backend == "mindspore":
        zeros = (0, 1) if topology.data > 1 else (0,)
    elif config.engine == "deepspeed" and topology.pipeline > 1:
        zeros = (1,)
    sequences = (False, True) if topology.tensor > 1 and config.backend == "torch" else (False,)
    return product(zeros, ("none", "selective", "full"), sequences)


def _with_layout(config: ResolvedRun, topology: Topology, *, zero: int, recompute: str, sequence: bool) -> ResolvedRun | str:
    """The run with this layout, or what speaks against it."""
    if config.engine == "deepspeed" and topology.tensor > 1:
        return "engine deepspeed has no tensor parallel in this version"
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
    if topology.tensor == 1:
        train["recompute_slice_activation"] = False
    written = as_run(RunConfig, config, parallel=parallel, train=train, device="auto")
    try:
        tried = resolve_config(written, world_size=topology.world_size)
        error = schedule_error(tried.parallel.pipeline_schedule, tried.topology, tried.batch.accumulation)
    except ConfigError as refusal:
        return str(refusal).partition(";")[0]
    return tried if error is None else error


def describe_suggestions(found: Suggestions, devices: int, device: Accelerator) -> str:
    """A table of the best layouts, the words that choose the best one, and the reasons against the others."""
    lines = [f"Layouts for {devices} x {device.name} ({device.memory // GIB} GiB), best first by the estimated time of a step:"]
    if found.fitting:
        head = ("data", "tensor", "pipeline", "ZeRO", "sequence", "recompute", "micro batches", "GiB", "s a step", "tokens/s")
        lines += table(head, map(_row, found.fitting[:_SHOWN]))
        if len(found.fitting) > _SHOWN:
            lines.append(f"and {len(found.fitting) - _SHOWN} slower ones")
        lines += ["", f"The first: {' '.join(_words(found.fitting[0].config))}"]
    else:
        lines.append("none fits; take more devices, a smaller micro batch, or precision.parameters below float32")
    if found.refused:
        lines += ["", "Not possible:"]
        for reason, layouts in sorted(found.refused.items(), key=lambda item: -len(item[1])):
            named = ", ".join(f"{layout.data} x {layout.tensor} x {layout.pipeline}" for layout in layouts)
            lines.append(f"  {named}: {reason}")
        lines.append("  (data x tensor x pipeline)")
    return "\n".join(lines) + "\n"


def _row(layout: Layout) -> tuple[str, ...]:
    parallel, train, plan = layout.config.parallel, layout.config.train, layout.plan
    axes = (str(plan.topology.data), str(plan.topology.tensor), str(plan.topology.pipeline), str(parallel.zero_stage))
    speed = f"{plan.tokens_per_step / layout.seconds:,.0f}"
    ways = ("yes" if parallel.sequence_parallel else "no", train.recompute, str(plan.batch.accumulation))
    return *axes, *ways, f"{plan.peak / GIB:.1f}", f"{layout.seconds:.3g}", speed


def _words(config: ResolvedRun) -> Iterator[str]:
    """What to write behind the command."""
    names = ("data_parallel", "model_parallel", "pipeline_stage", "zero_stage", "sequence_parallel")
    values = {name: getattr(config.parallel, name) for name in names}
    for name, value in (values | {"micro_batch_num": config.batch.accumulation}).items():
        yield f"parallel.{name}={str(value).lower() if isinstance(value, bool) else value}"
    yield f"train.recompute={config.train.recompute}"
