"""Every bit of a checkpoint's manifest.json, flipped one at a time. The campaign goes
through all, in the order of a permutation.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.fuzz.checkpoints import STEPS, Prepared, judge_stand, prepare, read
from tests.fuzz.dice import Dice
from tests.fuzz.engine import Case

__all__ = ["CLASSES", "make", "prepare"]
CLASSES = {"bit": "one bit of manifest.json; the inputs are all bits, each once"}
_STRIDE = 7919
"""A prime that divides no number of bits here, so that the first inputs lie all over the file."""


def count(prepared: Prepared) -> int:
    """Return how many inputs there are."""
    return (
        8
        * (prepared.run / "checkpoints" / f"step_{STEPS[-1]:08d}" / "manifest.json").stat().st_size
    )


def make(dice: Dice, prepared: Prepared, folder: Path) -> Case:
    run = folder / "run"
    shutil.copytree(prepared.run, run)
    path = run / "checkpoints" / f"step_{STEPS[-1]:08d}" / "manifest.json"
    content = bytearray(path.read_bytes())
    assert len(content) % _STRIDE
    bit = (dice.number * _STRIDE) % (8 * len(content))
    before = content[bit // 8]
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    line = (
        bytes(content[: bit // 8]).rpartition(b"\n")[2]
        + bytes(content[bit // 8 :]).partition(b"\n")[0]
    )
    about = (
        f"bit {bit}, {bytes([before])!r} became {bytes([content[bit // 8]])!r}:"
        f" {line.decode('utf-8', 'replace').strip()[:60]}"
    )
    return Case(
        kind="bit",
        run=lambda: read(run),
        names=(str(run),),
        check=lambda found: judge_stand(found, prepared.stands),
        about=about,
    )
