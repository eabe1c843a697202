"""Ceilings of size, and the modules that may use what is easily used in too many places.

tests/budget.txt holds the numbers. ``make budget`` lowers them to those of today.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "budget.txt"
LONGEST = 400
"""Lines of a file of the product. Longer ones have a ceiling of their own."""
RULE = "A ceiling rises only in a commit that says what was taken out or which user asked."
NOT_OURS = ("data", "output", "build")


def modules() -> Iterator[Path]:
    """Yield all Python files of the project, relative to its folder."""
    for path in (*ROOT.glob("*.py"), *ROOT.glob("[!.]*/**/*.py")):
        if path.relative_to(ROOT).parts[0] not in NOT_OURS:
            yield path.relative_to(ROOT)


def folder_of(path: Path) -> str:
    """Return the folder in whose row a file counts: common/X, tests/X, tests/common/X, or X."""
    depth = 2 if path.parts[0] in ("common", "tests") else 1
    depth += path.parts[:2] == ("tests", "common")
    return "/".join(path.parent.parts[:depth]) or "."


def numbers_of_today() -> dict[str, tuple[int, int]]:
    """Return lines and modules of every folder, and of every long file of the product."""
    lines, count, long = Counter[str](), Counter[str](), {}
    for path in modules():
        number = len((ROOT / path).read_bytes().splitlines())
        lines[folder_of(path)] += number
        count[folder_of(path)] += 1
        if number > LONGEST and path.parts[0] != "tests":
            long[path.as_posix()] = (number, 1)
    return {folder: (lines[folder], count[folder]) for folder in lines} | long


def ceilings() -> dict[str, tuple[int, int]]:
    rows = [line.split() for line in TABLE.read_text().splitlines() if line[:1] != "#"]
    return {name: (int(lines), int(count)) for lines, count, name in rows}


def test_nothing_is_above_its_ceiling() -> None:
    table, found = ceilings(), []
    for name, numbers in sorted(numbers_of_today().items()):
        limits = table.get(name, (LONGEST, 1) if name.endswith(".py") else (0, 0))
        for number, limit, what in zip(numbers, limits, ("lines", "modules"), strict=True):
            if number > limit:
                found.append(f"{name}: {number} {what}, {number - limit} above its {limit}")
    assert not found, "\n".join(["", *found, RULE])


USERS = {
    "socket": {
        "common/cluster/environment.py": "name of this host",
        "common/doctor/machine.py": "names and ports that it checks",
        "common/launcher/host_channel.py": "the launcher's connections between hosts",
        "common/parallel/world.py": "whether rank 0 answers, and a barrier",
        "common/processes/addresses.py": "addresses of this host, free ports",
        "common/serving/server.py": "the address of the service",
        "gpt2_study/command.py": "name of this host",
        "tools/hccl_tools.py": "name and address of this host",
    },
    "subprocess.Popen": {
        "benchmarks/first_contact/probes.py": "a server, and clients beside it",
        "benchmarks/measure.py": "systems that take turns",
        "common/launcher/host_list.py": "ssh to each host",
        "common/launcher/launch.py": "DETACH=1",
        "common/processes/process_tree.py": "ranks, cells of a study, their guard, and programs",
    },
    "fcntl": {
        "common/files.py": "locks between processes",
        "common/tensor_files/checksummed.py": "O_DIRECT, switched while writing",
    },
    "threading.Thread": {
        "benchmarks/data.py": "watches memory",
        "common/checkpoint/writer.py": "writes while training continues",
        "common/doctor/machine.py": "a name server that may hang",
        "common/launcher/host_channel.py": "the event loop of the connections",
        "common/launcher/terminal.py": "a terminal that may block",
        "common/processes/heartbeat.py": "signs of life while a step computes",
        "common/processes/process_tree.py": "waits for a child",
        "common/serving/server.py": "the HTTP server",
        "common/interrupts.py": "Ctrl-C beside MindSpore",
        "common/training/trackers.py": "trackers, which may hang",
    },
}
"""Modules that may use each of these, and their reasons. A new one needs a reason here."""


def uses(text: str) -> set[str]:
    """Return which of USERS a module imports, calls or derives from."""
    found: set[str] = set()
    if not re.search("|".join(name.rpartition(".")[2] for name in USERS), text):  # most files
        return found
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Call):
            found.add(ast.unparse(node.func))
        elif isinstance(node, ast.ClassDef):
            found |= {ast.unparse(base) for base in node.bases}
    return found & USERS.keys()


def test_only_these_modules_use_what_needs_a_reason() -> None:
    found: dict[str, set[str]] = {name: set() for name in USERS}
    for path in modules():
        if path.parts[0] != "tests":
            for name in uses((ROOT / path).read_text(encoding="utf-8")):
                found[name].add(path.as_posix())
    assert found == {name: set(paths) for name, paths in USERS.items()}


if __name__ == "__main__":
    now = numbers_of_today()
    lines = []
    for name, limits in sorted((ceilings() if TABLE.exists() else now).items()):
        if name in now:
            number, count = map(min, limits, now[name])
            lines.append(f"{number:6} {count:4} {name}\n")
    TABLE.write_text(f"# lines, modules, folder or long file. {RULE}\n{''.join(lines)}")
