"""Merge the rank tables of several machines into one, for a copy on each of them.

    python tools/merge_hccl.py hccl_8p_01234567_10.0.0.1.json hccl_8p_01234567_10.0.0.2.json
        hccl_2s_16p.json

Ranks are numbered in the order of the files. Exit code 0: written; 2: bad tables or arguments; 1:
the file could not be written.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.interrupts import end_at_interrupts, run_script

if __name__ == "__main__":
    end_at_interrupts()

from common.cluster.rank_table_files import merge_tables, write_table
from common.errors import GPT2Error, report
from common.files import refuse_to_overwrite


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="rank table of one machine (version 0, 1.0 or 1.2)",
    )
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    arguments = parse_arguments(words)
    try:
        table = merge_tables(arguments.files)
        path = Path.cwd() / f"hccl_{len(table.servers)}s_{table.world_size}p.json"
        refuse_to_overwrite(arguments.files, [path], "name the tables of single machines only")
        write_table(table, path)
    except GPT2Error as error:
        return report(error)
    print("Completed: hccl file was save in :", path)
    return 0


if __name__ == "__main__":
    run_script(main)
