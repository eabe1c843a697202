"""Measure speed beside other programs, and print one table at the end.

    python benchmarks/run.py [--device cuda] [--parts training,loader] [--data data/quickstart]
    python benchmarks/run.py --plan
        show the parts and their options; start nothing

Takes half an hour on two cores; the machine should do nothing else. Needs nothing but the project
with its extras `peers` and `study`; preprocessing needs --data, which
tools/fetch_quickstart_data.py makes.
The part `decoding` runs only where it is named: all ways to decode on one thread of a CPU.

--device cuda trains 124M to 1558M in bfloat16, eager and compiled, and compares the speeds with the
prediction of a roofline. --output_dir has the report of the training steps and the table; with an
earlier one, the training steps resume there. Exit code 2: bad arguments; 1: a part has failed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import data, decoding, training
from benchmarks.measure import Row, table
from common.errors import ConfigError, GPT2Error
from common.flags import flag
from common.paths import require_package
from common.program import command

CORPUS = ("corpus.txt", "vocab.json", "merges.txt")


@dataclass(kw_only=True)
class Request:
    device: Literal["cpu", "cuda"] = flag("kind of device", default="cpu")
    parts: str | None = flag("A,B,...: parts to run (default: all but decoding)")
    plan: bool = flag("show the parts; start nothing")
    repeats: int = flag("N: pairs of turns, and runs of each training step", default=3)
    only: tuple[str, ...] = flag(
        "AXIS=LABEL: training steps to keep, such as model=124m_b64; may be given several times"
    )
    small: bool = flag("the training steps of the study's small variant")
    data: Path = flag(
        "folder with corpus.txt, vocab.json and merges.txt (default: data/quickstart)",
        default=ROOT / "data" / "quickstart",
    )
    config: Path = flag(
        "FILE: model whose weights are converted (default: 345M)",
        default=ROOT / "configs" / "gpt2" / "run_gpt2_345m.yaml",
    )
    folder: Path = flag(
        "folder on the disk that conversion is measured on (default: the temporary one)",
        default=Path(tempfile.gettempdir()),
    )
    output_dir: Path = flag(
        "DIR: folder of results (default: output/benchmark/DATE_TIME)",
        default=ROOT / "output" / "benchmark" / f"{datetime.now():%Y%m%d_%H%M%S}",
    )

    def __post_init__(self) -> None:
        for name in ("data", "folder", "output_dir"):  # children run in another folder
            setattr(self, name, getattr(self, name).resolve())
        if unknown := [part for part in self.chosen if part not in PARTS]:
            raise ConfigError(f"--parts {','.join(unknown)}: expected some of {', '.join(PARTS)}")

    @property
    def chosen(self) -> list[str]:
        return self.parts.split(",") if self.parts else [each for each in PARTS if each != ALONE]


ALONE = "decoding"
"""Part that runs only where it is named; it takes five minutes more."""
PARTS: dict[str, Callable[[Request], Iterator[Row]]] = {
    "training": lambda each: training.rows(each.device, each.output_dir, each.repeats, each.only, each.small),
    "generation": lambda each: decoding.generation_rows(each.device, each.repeats),
    "preprocessing": lambda each: data.preprocessing_rows([each.data / name for name in CORPUS], each.repeats),
    "loader": lambda each: data.loader_rows(each.repeats),
    "conversion": lambda each: data.conversion_rows(each.config, each.folder, each.repeats),
    ALONE: lambda each: decoding.decoding_rows(each.repeats),
}


@command(Request, stopped="")
def main(request: Request) -> int:
    if request.device == "cuda" and not request.plan:
        require_package("torch", extra="torch", purpose="which --device cuda trains with")
        import torch

        if not torch.cuda.is_available():
            advice = "run it on a machine with an NVIDIA GPU, or leave --device out"
            raise ConfigError(f"--device cuda: torch {torch.__version__} finds no GPU; {advice}")
    chosen = request.chosen
    missing = [name for name in CORPUS if not (request.data / name).is_file()]
    if missing and "preprocessing" in chosen:
        chosen.remove("preprocessing")
        print(
            f"left out: preprocessing: {request.data} has no {', '.join(missing)}; make it by"
            " tools/fetch_quickstart_data.py"
        )
    if request.plan:
        print(*chosen, sep="\n")
        return 0
    request.output_dir.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    failed = []
    for part in chosen:
        print(f"\n{part}", flush=True)
        try:
            for row in PARTS[part](request):
                rows.append(row)
                print(*row, sep="; ", flush=True)
        except (GPT2Error, subprocess.CalledProcessError) as error:
            failed.append(f"{part}: {error}")
    text = table(rows)
    (request.output_dir / "table.md").write_text(text + "\n", encoding="utf-8")
    print(f"\n{request.output_dir}\n{text}")
    if failed:
        print("failed: " + "; ".join(failed), file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
