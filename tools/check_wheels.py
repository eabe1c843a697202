"""Ask pip for a wheel of every dependency, for x86-64 and for aarch64, which Ascend hosts have.

    python tools/check_wheels.py

Checks requirements.txt and the extras `chinese`, `peers`, `serve`, `study`, `parquet` and `hub`
with everything that they need in turn, for the Python that runs this. The extra `fast` may lack
wheels, and that is said. Nothing is installed; pip reads what the package index tells.

Exit codes: 0 all there, or the package index does not answer; 1 a wheel is missing.
"""

if __name__ == "__main__":
    import as_script  # noqa: F401

import re
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor

from common.flags import make_parser
from common.paths import ROOT
from common.program import command

MACHINES = ("x86_64", "aarch64")
PLATFORMS = (*(f"manylinux_2_{minor}" for minor in range(17, 29)), "manylinux2014")
"""glibc 2.28 and older: PyTorch and MindSpore need 2.28 themselves."""
_OFFLINE = re.compile(r"Retrying \(|ConnectionError|Failed to establish|Name or service not known|timed out")


def missing_wheels(machine: str, requirements: list[str]) -> str | None:
    """Return pip's message about what has no wheel; empty where all are there, None without an answer of the index."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
            *("--dry-run", "--ignore-installed", "--only-binary=:all:"),
            *(f"--platform={name}_{machine}" for name in PLATFORMS),
            *(f"--target={folder}", f"--constraint={ROOT}/constraints.txt", *requirements),
        ]
        done = subprocess.run(command, capture_output=True, text=True)  # noqa: S603
    if done.returncode == 0:
        return ""
    if _OFFLINE.search(done.stderr):
        return None
    return "\n".join(line for line in done.stderr.splitlines() if line.startswith("ERROR")) or done.stderr


@command()
def main(words: list[str]) -> int:
    make_parser(__doc__).parse_args(words)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    wanted = {"requirements.txt": [f"--requirement={ROOT}/requirements.txt"]} | {
        f"extra {name}": extras[name] for name in ("chinese", "peers", "serve", "study", "parquet", "hub", "fast")
    }
    asked = [(name, machine) for name in wanted for machine in MACHINES]
    failed = False
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda case: missing_wheels(case[1], wanted[case[0]]), asked))
    if None in answers:
        print("wheels: not checked, the package index does not answer")
        return 0
    for (name, machine), missing in zip(asked, answers, strict=True):
        left_out = "left out there: " if missing and name == "extra fast" else ""
        print(f"wheels of {name} for {machine}: {left_out}{missing or 'all there'}")
        failed |= bool(missing) and not left_out
    return int(failed)
