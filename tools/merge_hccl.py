"""Merge the rank tables of several machines into one, for a copy on each of them.

    python tools/merge_hccl.py hccl_8p_01234567_10.0.0.1.json hccl_8p_01234567_10.0.0.2.json
        hccl_2s_16p.json

Ranks are numbered in the order of the files. Exit code 0: written; 2: bad tables or arguments; 1:
the file could not be written.
"""

if __name__ == "__main__":
    import as_script  # noqa: F401

from dataclasses import dataclass
from pathlib import Path

from common.cluster.rank_table_files import merge_tables, write_table
from common.files import refuse_to_overwrite
from common.flags import flag
from common.program import command


@dataclass(kw_only=True)
class Request:
    files: tuple[Path, ...] = flag(
        "FILE: rank table of one machine (version 0, 1.0 or 1.2)", required=True, positional=True, nargs="+"
    )


@command(Request)
def main(request: Request) -> None:
    table = merge_tables(request.files)
    path = Path.cwd() / f"hccl_{len(table.server_list)}s_{table.world_size}p.json"
    refuse_to_overwrite(request.files, [path], "name the tables of single machines only")
    write_table(table, path)
    print("Completed: hccl file was save in :", path)
