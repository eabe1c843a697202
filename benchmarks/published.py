"""Hold the plan against what other systems and this one measured and published.

    python benchmarks/published.py [--plot docs/figures/plan_accuracy.png]

Every row of published.csv is planned with the same model, layout and batch, on the table's figures
of its accelerator and the row's network. Prints the errors by family and source. --plot draws
planned against published times.

Columns: v are virtual stages of a rank. graph tells whether the operations between products are
fused. more are further keys. link and network are GB/s of a device, server its devices, where the
machine differs from the table's. Memory by nvidia-smi has the context, libraries and cache in it,
so it is compared with the plan and the reserve that a plan leaves. basis is published; assumed,
where a part of the layout, batch or device was not published, or the time was derived; measured
here; or left out of the statistics. half was drawn once, by a hash of what names the row: what is
learned of a row later does not move it.
"""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from common.accelerators import GIB, GIGA, Accelerator, require_accelerator
from common.flags import make_parser
from common.planner.fitting import resolve_on
from common.planner.plan import make_plan, table, time_of
from common.planner.room import usable_memory
from common.program import command
from common.resolve.derive import written_ranks
from common.run_config import load_config

ROWS = Path(__file__).with_suffix(".csv")
TYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
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
    """A published figure beside the planned one: seconds of a step, or bytes of the fullest
    rank.
    """

    row: dict[str, str]
    family: str
    measured: float
    planned: float
    is_memory: bool

    @property
    def ratio(self) -> float:
        return self.planned / self.measured

    @property
    def error(self) -> float:
        return abs(self.ratio - 1)

    @property
    def counts(self) -> bool:
        return self.row["basis"] != "left out"

    @property
    def is_test(self) -> bool:
        """Whether the row belongs to the half to which no factor was fitted."""
        return self.row["half"] == "test"


def read_rows() -> list[dict[str, str]]:
    with ROWS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def overrides(row: dict[str, str]) -> list[str]:
    """Return the words that make the run of a row, behind the preset of its column config."""
    words = [f"{key}={TYPES.get(row[name], row[name])}" for name, key in KEYS.items() if row[name]]
    if row["v"]:
        words.append("parallel.pipeline_schedule=interleaved_1f1b")
    compiled = str(row["graph"] == "compiled").lower()
    return [*words, f"train.compile={compiled}", *row["more"].split()]


def device_of(row: dict[str, str]) -> Accelerator:
    device = require_accelerator(row["accelerator"])
    given = {name: float(row[name]) * GIGA for name in ("link", "network") if row[name]}
    if row["server"]:
        return replace(device, **given, server_devices=int(row["server"]))
    return replace(device, **given)


def plan_row(row: dict[str, str]) -> Figure:
    device = device_of(row)
    path = ROOT / "configs/gpt2" / f"run_gpt2_{row['config'] or '175b'}.yaml"
    written = load_config(path, overrides(row))
    config = resolve_on(written, device, world_size=written_ranks(written))
    plan = make_plan(config)
    value, (unit, _, how) = float(row["published"]), row["unit"].partition(" by ")
    is_memory = unit in ("GB", "GiB")
    if is_memory:
        measured, planned = value * (GIB if unit == "GiB" else 1e9), float(plan.peak)
        if how == "nvidia-smi":
            planned += device.memory - usable_memory(device.memory)
    else:
        planned = time_of(plan, config, device).total
        measured = _seconds(row, value, unit, config.topology.world_size)
    return Figure(
        row=row, family=device.family, measured=measured, planned=planned, is_memory=is_memory
    )


def _seconds(row: dict[str, str], value: float, unit: str, devices: int) -> float:
    """Return the seconds of a step."""
    windows, length = int(row["global"]), int(row["seq"])
    match unit:
        case "s/step":
            return value
        case "samples/s":
            return windows / value
        case "tokens/s":
            return windows * length / value
        case "tokens/s/device":
            return windows * length / value / devices
    assert unit == "TFLOP/s/device", unit
    layers, hidden, vocabulary = (int(row[name]) for name in ("layers", "hidden", "vocab"))
    # arXiv 2104.04473, formula 3, which counts recomputation; Megatron-Core's table does not
    passes = 4 if row["recompute"] == "full" else 3
    head = vocabulary / (4 * passes * layers * hidden)
    per_token = 24 * passes * layers * hidden**2 * (1 + length / (6 * hidden) + head)
    return windows * length * per_token / devices / value / 1e12


def errors(figures: Sequence[Figure]) -> tuple[float, float, float]:
    """Return the median error, and the parts of the rows within 15 and 25 %."""
    found = [each.error for each in figures]
    return median(found), *(sum(e <= most for e in found) / len(found) for most in (0.15, 0.25))


def _row(name: str, figures: Sequence[Figure]) -> tuple[str, ...]:
    ratios = [each.ratio for each in figures]
    middle, *near = errors(figures)
    shares = (f"{share:.0%}" for share in near)
    spread = (f"{value:.2f}" for value in (median(ratios), min(ratios), max(ratios)))
    return name, str(len(figures)), f"{middle:.1%}", *shares, *spread


def report(figures: Iterable[Figure]) -> list[str]:
    """Return a table of errors: the two halves, families, and systems on each family."""
    figures = [each for each in figures if each.counts]
    times = [each for each in figures if not each.is_memory]
    groups: dict[str, list[Figure]] = {"all times": times}
    for each in times:
        groups.setdefault("the half not fitted" if each.is_test else "the half fitted", []).append(
            each
        )
    for each in sorted(times, key=lambda each: each.family):
        groups.setdefault(each.family, []).append(each)
    for each in times:
        groups.setdefault(f"{each.row['source']}, {each.family}", []).append(each)
    for each in figures:
        if each.is_memory:
            groups.setdefault(f"memory: {each.row['source']}", []).append(each)
    head = (
        "rows",
        "n",
        "median error",
        "within 15 %",
        "25 %",
        "planned / measured",
        "least",
        "most",
    )
    return table(head, [_row(name, some) for name, some in groups.items()])


def draw(figures: Iterable[Figure], path: Path) -> None:
    """Draw planned against published times of a step, with a colour for each family."""
    from matplotlib.figure import Figure as Picture

    picture = Picture(figsize=(6.4, 6.0), layout="constrained")
    axes = picture.subplots()
    times = [each for each in figures if each.counts and not each.is_memory]
    ends = [0.05, 500.0]
    axes.plot(ends, ends, color="#666", linewidth=1)
    axes.fill_between(
        ends, [0.75 * end for end in ends], [1.25 * end for end in ends], color="#ddd", linewidth=0
    )
    for family, colour in {
        "A100": "#2f6db3",
        "H100": "#c8452f",
        "V100": "#2f8f4e",
        "Ascend": "#c98a1b",
    }.items():
        some = [each for each in times if each.family == family]
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
    return 0


if __name__ == "__main__":
    sys.exit(main())
