"""Hold the plan against what other systems and this one measured and published.

    python benchmarks/published.py [--plot docs/figures/plan_accuracy.png] [--halvings 20]

Every row of published.csv is planned with the same model, layout and batch, on the table's figures
of its accelerator and the row's network. Prints the errors by family and source. --plot draws
planned against published times. --halvings fits the factors anew to as many random halves of the
rows, and of the sources, and prints the errors on the other halves.

Columns: v are virtual stages of a rank. graph tells whether the operations between products are
fused. more are further keys. link and network are GB/s of a device, server its devices, where the
machine differs from the table's. Memory by nvidia-smi has the context, libraries and cache in it,
so it is compared with the plan, the reserve that a plan leaves, and what ``widened`` says. Of stage
0 it is compared with the plan's first stage. basis is published; assumed, where a part of the
layout, batch or device was not published, or the time was derived; measured here; or left out of
the statistics. half was drawn by a hash of each row as it was first entered; rows that were
corrected later keep it, and rows entered after the fit are test rows.
"""

from __future__ import annotations

import csv
import math
import random
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from common.accelerators import GIB, GIGA, Accelerator, require_accelerator
from common.flags import make_parser
from common.parallel.run import Run
from common.planner import timing
from common.planner.fitting import resolve_on, usable_memory
from common.planner.memory import Memory, has_low_gradients
from common.planner.plan import Plan, make_plan, table, time_of
from common.program import command
from common.resolve.derive import written_ranks
from common.run_config import load_config

ROWS = Path(__file__).with_suffix(".csv")
KEYS = {
    "layers": "model.num_layers",
    "hidden": "model.hidden_size",
    "heads": "model.num_heads",
    "seq": "model.seq_length",
    "vocab": "model.vocab_size",
    "tp": "parallel.model_parallel",
    "pp": "parallel.pipeline_stage",
    "dp": "parallel.data_parallel",
    "v": "parallel.virtual_stages",
    "micro": "train.micro_batch_size",
    "global": "train.global_batch_size",
    "recompute": "train.recompute",
    "parameters": "precision.parameters",
    "compute": "precision.compute",
    "norm": "precision.layer_norm",
    "softmax": "precision.softmax",
}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A published figure and its plan."""

    row: dict[str, str]
    config: Run
    device: Accelerator
    plan: Plan

    @property
    def is_memory(self) -> bool:
        return self.row["unit"][:2] in ("GB", "Gi")

    @property
    def measured(self) -> float:
        """Seconds of a step, or bytes of the fullest rank."""
        row, value, unit = self.row, float(self.row["published"]), self.row["unit"].partition(" by ")[0]
        if self.is_memory:
            return value * (GIB if unit == "GiB" else 1e9)
        windows, length, devices = int(row["global"]), int(row["seq"]), self.config.topology.world_size
        times = {"s/step": value, "samples/s": windows / value, "tokens/s": windows * length / value}
        times["tokens/s/device"] = times["tokens/s"] / devices
        if unit in times:
            return times[unit]
        assert unit == "TFLOP/s/device", unit
        layers, hidden, vocabulary = (int(row[name]) for name in ("layers", "hidden", "vocab"))
        # arXiv 2104.04473, formula 3, which counts recomputation; Megatron-Core's table does not
        passes = 4 if row["recompute"] == "full" else 3
        head = vocabulary / (4 * passes * layers * hidden)
        per_token = 24 * passes * layers * hidden**2 * (1 + length / (6 * hidden) + head)
        return windows * length * per_token / devices / value / 1e12

    @property
    def planned(self) -> float:
        """The same by the plan, with the factors of ``timing`` as they are now."""
        if not self.is_memory:
            return time_of(self.plan, self.device).total
        how, stages, whole = self.row["unit"].partition(" by ")[2], self.plan.stages, self.device.memory
        stage = max(stages, key=lambda each: each.peak)
        stage = stages[0] if how.endswith("of stage 0") else stage
        if not how.startswith("nvidia-smi"):
            return stage.peak
        return stage.peak + whole - usable_memory(whole) + widened(self.config, stage)

    @property
    def ratio(self) -> float:
        return self.planned / self.measured

    @property
    def error(self) -> float:
        return abs(self.ratio - 1)

    @property
    def counts(self) -> bool:
        return self.row["basis"] != "left out"


def widened(config: Run, stage: Memory) -> int:
    """Return the bytes that nvidia-smi shows beyond the peak of a step of DeepSpeed's ZeRO.

    Its update makes one float32 tensor of a rank's gradients (stage_1_and_2.py, ``step``). We take
    it that torch keeps the smaller pieces that activations left, and gets new memory for it.
    """
    part = -(-stage.parameters // config.parallel.shards)
    return 4 * part * has_low_gradients(config)


def read_rows() -> list[dict[str, str]]:
    with ROWS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def plan_row(row: dict[str, str]) -> Figure:
    given: dict[str, Any] = {name: float(row[name]) * GIGA for name in ("link", "network") if row[name]}
    given |= {"server_devices": int(row["server"])} if row["server"] else {}
    device = replace(require_accelerator(row["accelerator"]), **given)
    words = [f"{key}={row[name]}" for name, key in KEYS.items() if row[name]]
    words += ["parallel.pipeline_schedule=interleaved_1f1b"] if row["v"] else []
    words += [f"train.compile={str(row['graph'] == 'compiled').lower()}", *row["more"].split()]
    written = load_config(ROOT / "configs/gpt2" / f"run_gpt2_{row['config'] or '175b'}.yaml", words)
    config = resolve_on(written, device, world_size=written_ranks(written))
    return Figure(row=row, config=config, device=device, plan=make_plan(config))


def errors(figures: Sequence[Figure]) -> tuple[float, float, float]:
    """Return the median error, and the parts of the rows within 15 and 25 %."""
    found = [each.error for each in figures]
    near, fair = (sum(e <= most for e in found) / len(found) for most in (0.15, 0.25))
    return median(found), near, fair


def set_factors(factors: Sequence[float]) -> None:
    """Set the five fitted factors of the plan's time."""
    timing.PRODUCTS, timing.ATTENTION, timing.ATTENTION_OF_HOPPER, eager, timing.NETWORK = factors
    timing.ELEMENTS["eager"] = eager


def loss(figures: Sequence[Figure]) -> float:
    """Return the loss of the fit: Huber's of the logarithm of planned by measured.

    A source of n rows weighs as much as the root of n rows.
    """
    counts = Counter(each.row["source"] for each in figures)
    total = 0.0
    for each in figures:
        error = abs(math.log(each.ratio))
        huber = error**2 / 2 if error < 0.1 else 0.1 * (error - 0.05)
        total += huber / math.sqrt(counts[each.row["source"]])
    return total


def fit(figures: Sequence[Figure], start: Sequence[float]) -> list[float]:
    """Return the five factors with the least loss, to two digits, and set them. One on which no row
    depends keeps its start.
    """
    from scipy.optimize import minimize

    def of(factors: Sequence[float]) -> float:
        set_factors(factors)
        return loss(figures) if min(factors) > 0 else math.inf

    options = {"xatol": 0.002, "fatol": 1e-4}
    best = minimize(of, start, method="Nelder-Mead", options=options)
    factors = [round(float(value), 2) for value in best.x]
    for at, first in enumerate(start):
        if of([*best.x[:at], first, *best.x[at + 1 :]]) == best.fun:
            factors[at] = first  # no row depends on it
    set_factors(factors)
    return factors


def halvings(figures: Sequence[Figure], count: int) -> list[str]:
    """Return the errors on halves to which nothing was fitted, halved at random ``count`` times, by
    rows and by sources.
    """
    rows = []
    for name in ("row", "source"):
        found = []
        for seed in range(count):
            draw = random.Random(seed)  # noqa: S311
            drawn: dict[object, bool] = {}
            halves: dict[bool, list[Figure]] = {True: [], False: []}
            for number, each in enumerate(figures):
                key = number if name == "row" else each.row["source"]
                halves[drawn.setdefault(key, draw.random() < 0.5)].append(each)
            factors = fit(halves[False], [0.6, 0.5, 0.4, 0.5, 0.5])
            found.append((*errors(halves[True]), *factors))
        columns = [sorted(column) for column in zip(*found, strict=True)]
        rows.append((name, *(f"{median(c):.3f} ({c[0]:.3f} to {c[-1]:.3f})" for c in columns)))
    head = ("halves by", "median error", "within 15 %", "25 %", "products", "attention", "Hopper")
    return table((*head, "eager", "network"), rows)


def report(figures: Iterable[Figure]) -> list[str]:
    """Return a table of errors: the two halves, families, and systems on each family."""
    figures = [each for each in figures if each.counts]
    times = [each for each in figures if not each.is_memory]
    named = [("all times", each) for each in times]
    named += [("the half not fitted" if each.row["half"] == "test" else "the half fitted", each) for each in times]
    named += [(each.device.family, each) for each in sorted(times, key=lambda each: each.device.family)]
    named += [(f"{each.row['source']}, {each.device.family}", each) for each in times]
    named += [(f"memory: {each.row['source']}", each) for each in figures if each.is_memory]
    groups: dict[str, list[Figure]] = {}
    for name, each in named:
        groups.setdefault(name, []).append(each)
    head = ("rows", "n", "median error", "within 15 %", "25 %", "plan / measured", "least", "most")
    rows = []
    for name, some in groups.items():
        ratios = [each.ratio for each in some]
        middle, *near = errors(some)
        spread = [f"{value:.2f}" for value in (median(ratios), min(ratios), max(ratios))]
        rows.append((name, str(len(some)), f"{middle:.1%}", *(f"{share:.0%}" for share in near), *spread))
    return table(head, rows)


def draw(figures: Iterable[Figure], path: Path) -> None:
    """Draw planned against published times of a step, with a colour for each family."""
    from matplotlib.figure import Figure as Picture

    picture = Picture(figsize=(6.4, 6.0), layout="constrained")
    axes = picture.subplots()
    times = [each for each in figures if each.counts and not each.is_memory]
    ends = [0.05, 500.0]
    axes.plot(ends, ends, color="#666", linewidth=1)
    axes.fill_between(ends, [0.75 * end for end in ends], [1.25 * end for end in ends], color="#ddd", linewidth=0)
    for family, colour in {"A100": "#2f6db3", "H100": "#c8452f", "V100": "#2f8f4e", "Ascend": "#c98a1b"}.items():
        some = [each for each in times if each.device.family == family]
        middle = errors(some)[0]
        axes.scatter(
            [each.measured for each in some],
            [each.planned for each in some],
            s=16,
            color=colour,
            alpha=0.7,
            linewidths=0,
            label=f"{family}: {len(some)} rows, median error {middle:.0%}",
        )
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set(xlabel="published seconds a step", ylabel="planned seconds a step")
    axes.legend(loc="upper left", title="grey: within 25 %")
    picture.savefig(path, dpi=120)


@command()
def main(words: list[str]) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="picture to draw")
    parser.add_argument("--rows", action="store_true", help="list the rows too, the worst first")
    parser.add_argument("--halvings", type=int, metavar="N", help="fit to N random halves")
    arguments = parser.parse_args(words)
    figures = [plan_row(row) for row in read_rows()]
    if arguments.rows:
        for each in sorted(figures, key=lambda each: -abs(math.log(each.ratio))):
            row = each.row
            named = (row["source"], row["model"], row["accelerator"], row["basis"], row["note"])
            print(f"{each.ratio:.2f} {each.measured:.4g} {each.planned:.4g}", *named, sep=" | ")
    print("\n".join(report(figures)))
    if arguments.plot:
        draw(figures, arguments.plot)
    if arguments.halvings:
        times = [each for each in figures if each.counts and not each.is_memory]
        print("\n".join(halvings(times, arguments.halvings)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
