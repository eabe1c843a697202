"""Be the first on an accelerator: ten minutes of checks, a table for you and a JSON for us.

    python tools/first_contact.py --device cuda
        with what the project needs installed: pip install -r requirements.txt
    python tools/first_contact.py --device cuda --resume
        the checks for which the budget was too short
    python tools/first_contact.py --wheels wheels
        on a machine with a network: fetch what GPU images lack, for one without
    python tools/first_contact.py --device cuda --wheels wheels
        install it below --out, beside the torch of the image

Each check has processes and a time limit of its own, and is saved at once. It is passed, failed,
slower than expected, or left out. benchmarks/first_contact/checks.yaml lists the checks, with the
ranges that are expected. --out holds first_contact.json, table.md and the logs.

Exit codes: 0 no check has failed, 1 some have, 2 bad arguments or no such device, 130 and 143
stopped by Ctrl-C and SIGTERM. Both files are written then, too.
"""

if __name__ == "__main__":
    import as_script  # noqa: F401

import contextlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from common.errors import ConfigError, DeviceError, RunError
from common.flags import flag
from common.paths import ROOT
from common.program import command

CHECKS = ROOT / "benchmarks" / "first_contact" / "checks.yaml"
PROBES = "benchmarks/first_contact/probes.py"
ROWS, RESULT, TABLE, LOG = "rows.jsonl", "first_contact.json", "table.md", "log"
PASSED, FAILED, SLOW, LEFT_OUT = "passed", "failed", "slower than expected", "left out"
NO_TIME = "the budget ended; --resume continues"
LIMIT = 200.0
"""Seconds that a check may take."""
PYTHON = "3.12"
CARRIED = ("pydantic", "isal", "tensorboardX", "uvicorn", "starlette", "torchao", "filelock")
"""Packages that GPU images lack, of requirements.txt and for the server and float8."""
WORDS = {
    "train": "run_gpt2.py --run_mode train backend={backend} device={device}",
    "plan": "run_gpt2.py --run_mode plan backend={backend}",
    "probes": PROBES,
    "pages": "docs/config_reference.md docs/layouts.md docs/compilation.md docs/clusters.md",
}


@dataclass(kw_only=True)
class Request:
    device: Literal["cpu", "cuda", "npu"] | None = flag("kind of device to check")
    backend: Literal["torch", "mindspore"] = flag("framework", default="torch")
    out: Path = flag("DIR: folder of results and logs", default=Path("output/first_contact"))
    budget: float = flag("S: seconds in all", default=540.0)
    only: tuple[str, ...] = flag("NAME: check to run, also again", action="append", default=())
    resume: bool = flag("keep the checks that --out holds")
    wheels: Path | None = flag("DIR: folder to fetch wheels into, or with --device to install from")
    machine: str = flag("NAME: processor to fetch for", default="x86_64")


@dataclass(kw_only=True)
class Check:
    """A check of checks.yaml, whose head explains the fields. ``compare`` is turned into ``run`` and ``figures``."""

    asks: str
    on: Sequence[str] = ("cpu", "cuda", "npu")
    backend: str | None = None
    needs: Mapping[str, float] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    run: Sequence[str] = ()
    compare: Mapping[str, Any] = field(default_factory=dict)
    figures: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.compare:
            return
        of: dict[str, Any] = {"config": "tiny", "steps": 20, "options": "", "a": "", "b": "", "both": ""}
        of |= self.compare
        shared = f"backend={{backend}} device={{device}} {of['both']}"
        sides = [f"--set_{side} {word}" for side in "ab" for word in f"{shared} {of[side]}".split()]
        config, norms = f"{{out}}/{of['config']}.yaml", 10 * of["tolerance"]
        words = f"--steps {of['steps']} --tolerance {norms:g} --output {{here}}/runs"
        self.run = [" ".join(("tools/compare_runs.py", config, config, words, of["options"], *sides))]
        found = ": largest difference ([0-9.e+-]+)"
        loss = {"find": f"loss{found}", "expect": [0, of["tolerance"]]}
        self.figures = {"loss": loss, "gradient norm": {"find": f"norm{found}"}, **self.figures}


Row = dict[str, Any]
"""Result of a check: name, asks, state, reason, seconds, its commands in checks.yaml, and figures
with value and expected range of each.
"""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Device, framework and folder of a run. device: name, count and bytes of memory."""

    kind: str
    backend: str
    out: Path
    device: Mapping[str, Any]
    words: Mapping[str, Any]

    def fill(self, text: str, here: Path = Path()) -> str:
        """Return a text of checks.yaml with the words for its placeholders."""
        name = shlex.quote(self.device["name"])
        words = {**WORDS, **self.words, "backend": self.backend, "device": self.kind, "name": name}
        for word, value in {**words, "out": self.out, "here": here}.items():
            text = text.replace(f"{{{word}}}", str(value))
        return text

    def lack(self, check: Check) -> str:
        """Return why a check is left out here; empty where it is not."""
        from common.accelerators import GIB, find_accelerator

        if self.kind not in check.on:
            return f"for {' and '.join(check.on)}"
        if check.backend not in (None, self.backend):
            return f"for --backend {check.backend}"
        known = find_accelerator(self.device["name"])
        has = {"GiB": self.device["memory"] / GIB, "devices": self.device["count"]}
        has |= {"known peak rates": int(known is not None)}
        has |= {"float8 FLOP/s": known.float8_flops if known else 0}
        for need, least in check.needs.items():
            found = has.get(need, int(importlib.util.find_spec(need) is not None))
            if found < least:
                return f"needs {least:g} {need}" if least > 1 else f"there is no {need}"
        return ""


def run_check(name: str, check: Check, place: Place, left: float) -> Row:
    """Run the commands of a check for at most ``left`` seconds, and judge its figures. Returns that part of its row."""
    from gpt2_study.children import LAUNCHER_LOG, Launch, run_launches
    from gpt2_study.results import State

    here, log, text, reason = place.out / name, "", "", ""
    shutil.rmtree(here, ignore_errors=True)
    here.mkdir()
    start = time.monotonic()
    for words in check.run:
        filled = place.fill(words, here)
        launch = Launch(command=(sys.executable, *shlex.split(filled)), environment=check.env)
        limit = min(LIMIT, left) - (time.monotonic() - start)
        outcome = run_launches([launch], here, limit)
        said = (here / LAUNCHER_LOG).read_text(errors="replace")
        text, log = text + said, f"{log}$ python {filled}\n{said}"
        if outcome.state is not State.FINISHED:
            reason = NO_TIME if outcome.state is State.TIMED_OUT and left < LIMIT else outcome.reason
            break
    (here / LOG).write_text(log)
    for folder in list(here.rglob("checkpoints")):
        shutil.rmtree(folder)
    figures, wrong, slow = judge_figures(check.figures, text, here)
    state = FAILED if reason or wrong else SLOW if slow else PASSED
    return {
        "state": LEFT_OUT if reason == NO_TIME else state,
        "reason": reason or "; ".join(wrong + slow),
        "seconds": round(time.monotonic() - start, 1),
        "figures": figures,
        "commands": list(check.run),
    }


def judge_figures(
    rules: Mapping[str, Mapping[str, Any]], text: str, here: Path
) -> tuple[dict[str, Any], list[str], list[str]]:
    """Return the figures, and what is wrong and what is slow of them."""
    figures: dict[str, Any] = {}
    wrong: list[str] = []
    slow: list[str] = []
    for name, rule in rules.items():
        value = _find(name, rule, text, here, figures)
        expected = rule.get("expect", rule.get("speed"))
        figures[name] = {"value": value, "expected": expected}
        if value is None:
            wrong.append(f"{name} was not found")
        elif not _is_within(value, expected):
            said = f"{name} {shown(value)}, expected {shown(expected)}"
            (slow if "speed" in rule else wrong).append(said)
    return figures, wrong, slow


def _find(name: str, rule: Mapping[str, Any], text: str, here: Path, figures: Mapping[str, Any]) -> Any:
    """Return a number, or a text where it is none; None where it is not there."""
    if "ratio" in rule:
        above, below = (figures[part]["value"] for part in rule["ratio"])
        return above / below if above is not None and below else None
    if "in" in rule:
        path = here / "runs" / rule["in"]
        text = path.read_text(errors="replace") if path.is_file() else ""
    found = re.findall(rule.get("find", f"^{re.escape(name)}: (.*)"), text, flags=re.M)
    if rule.get("count"):
        return len(found)
    with contextlib.suppress(ValueError):
        return float(found[-1].replace(",", "")) if found else None
    return found[-1]


def _is_within(value: Any, expected: Any) -> bool:
    if not isinstance(expected, list):
        return expected in (None, value)
    low, high = expected
    return isinstance(value, int | float) and low <= value and (high is None or value <= high)


def shown(value: Any) -> str:
    """Return a value or a range in words."""
    if isinstance(value, list):
        return f"{value[0]:g} or more" if value[1] is None else f"{value[0]:g} to {value[1]:g}"
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of a Markdown table, one for each figure."""
    yield "| check | state | s | figure | found | expected |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for row in rows:
        state = ": ".join(filter(None, (row["state"], row["reason"]))).replace("|", "\\|")
        cells = [f"{row['name']}: {row['asks']}", state, f"{row['seconds']:g}"]
        for name, figure in (row["figures"] or {"": {}}).items():
            found = [name, shown(figure.get("value")), shown(figure.get("expected"))]
            yield f"| {' | '.join(cells + found)} |"
            cells = ["", "", ""]


def run_all(arguments: Request, kind: str) -> int:
    """Run the checks, save each, and write both files. Returns the exit code."""
    start, out = time.monotonic(), arguments.out
    if (out / ROWS).exists() and not arguments.resume:
        raise ConfigError(f"--out {out}: holds earlier checks; add --resume, or choose another")
    if arguments.wheels:
        install(arguments.wheels, out / "site")
    names = re.findall(r"^([\w.-]+)", (ROOT / "requirements.txt").read_text(), flags=re.M)
    if missing := [name for name in names if not _is_installed(name)]:
        raise ConfigError(
            f"{', '.join(missing)}: not installed; pip install -r requirements.txt, or without a"
            " network fetch wheels elsewhere by --wheels"
        )
    from common.structured_files import parse_json
    from common.yaml_files import dump_yaml, read_yaml_mapping

    tree = read_yaml_mapping(CHECKS)
    checks = {name: Check(**fields) for name, fields in tree["checks"].items()}
    if unknown := set(arguments.only) - checks.keys():
        raise ConfigError(f"--only {min(unknown)}: expected one of {', '.join(checks)}")
    place = Place(
        kind=kind,
        backend=arguments.backend,
        out=out,
        device=ask_device(kind, arguments.backend),
        words=tree["words"][kind],
    )
    out.mkdir(parents=True, exist_ok=True)
    for name, config in tree["configs"].items():
        config |= {"base": str(ROOT / config["base"])}
        (out / f"{name}.yaml").write_text(place.fill(dump_yaml(config)))
    saved = (out / ROWS).read_text().splitlines() if (out / ROWS).exists() else []
    rows = {row["name"]: row for row in map(parse_json, saved)}
    again = [name for name in checks if name not in rows or rows[name]["reason"] == NO_TIME]
    try:
        for name in arguments.only or again:
            check, left = checks[name], arguments.budget - (time.monotonic() - start)
            row: Row = {"name": name, "asks": check.asks, "state": LEFT_OUT}
            row["reason"] = place.lack(check) or (NO_TIME if left <= 0 else "")
            row |= {"seconds": 0.0, "figures": {}, "commands": []}
            if not row["reason"]:
                print(f"{name}: {check.asks} ...", flush=True)
                row |= run_check(name, check, place, left)
            with (out / ROWS).open("a") as file:
                file.write(json.dumps(row) + "\n")
            rows[name] = row
            print(f"{name}: {': '.join(filter(None, (row['state'], row['reason'])))}", flush=True)
    finally:
        write_result(place, [rows[name] for name in checks if name in rows])
    print(f"{out / RESULT}, {out / TABLE}")
    return int(any(row["state"] == FAILED for row in rows.values()))


def ask_device(kind: str, backend: str) -> dict[str, Any]:
    """Return name, number and memory of the devices. Raises DeviceError where there are none."""
    from common.structured_files import parse_json

    command = [sys.executable, PROBES, "device", kind, backend]
    done = subprocess.run(command, capture_output=True, text=True)  # noqa: S603
    if done.returncode:
        raise DeviceError(done.stderr.strip().splitlines()[-1].removeprefix("error: "))
    found: dict[str, Any] = parse_json(done.stdout.splitlines()[-1], strict=False)
    return found


def write_result(place: Place, rows: Sequence[Row]) -> None:
    from common.files import atomic_write
    from gpt2_study.command import machine_here, versions_here

    result = {
        "device": {"kind": place.kind, **place.device},
        "backend": place.backend,
        "machine": machine_here().model_dump(exclude={"host"}),
        "versions": versions_here(),
        "rows": rows,
    }
    texts = {RESULT: json.dumps(result, indent=1), TABLE: "\n".join(table(rows))}
    for name, text in texts.items():
        with atomic_write(place.out / name, "w") as file:
            file.write(text + "\n")


def fetch(folder: Path, machine: str) -> None:
    """Fetch the wheels of CARRIED and of what they need. Raises RunError."""
    from common.doctor.software import wanted_ranges
    from tools.check_wheels import PLATFORMS

    ranges = wanted_ranges()
    wanted = [name + ranges.get(name.replace("-", "_"), "") for name in CARRIED]
    options = [f"--platform={name}_{machine}" for name in PLATFORMS]
    options += ["--only-binary=:all:", f"--python-version={PYTHON}"]
    pip("download", f"--dest={folder}", *options, *wanted)
    sizes = [wheel.stat().st_size for wheel in folder.glob("*.whl")]
    print(f"{folder}: {len(sizes)} wheels, {sum(sizes) / 1e6:.1f} MB, Python {PYTHON}, {machine}")


def install(folder: Path, site: Path) -> None:
    """Install the wheels that are missing below ``site``, for this process and its children.

    Raises RunError.
    """
    sys.path.insert(0, str(site))
    paths = filter(None, (str(site), os.environ.get("PYTHONPATH")))
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    names = [wheel.name.partition("-")[0] for wheel in folder.glob("*.whl")]
    if missing := [name for name in names if not _is_installed(name)]:
        words = ("--no-index", "--no-deps", f"--find-links={folder}", f"--target={site}")
        pip("install", *words, *missing)
        importlib.invalidate_caches()


def pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", "-q", *words]
    done = subprocess.run(command, capture_output=True, text=True)  # noqa: S603
    if done.returncode:
        raise RunError(f"pip {words[0]}: {done.stderr.strip()}")


def _is_installed(name: str) -> bool:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return bool(metadata.version(name))
    return False


@command(Request, stopped="; --resume continues")
def main(request: Request) -> int:
    request.out = request.out.resolve()
    if request.device:
        with contextlib.chdir(ROOT):
            return run_all(request, request.device)
    if not request.wheels:
        raise ConfigError("give --device, or --wheels to fetch wheels for another machine")
    fetch(request.wheels, request.machine)
    return 0
