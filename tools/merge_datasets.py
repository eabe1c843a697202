"""Join .bin/.idx pairs into one: the shards of a corpus, or any pairs of one tokenizer.

    python tools/merge_datasets.py --input data/my.shard-*_text_document.idx \\
            --output-prefix data/my_text_document

Shards of tools/preprocess_data.py are put in order, all must be there, and the result has the bytes
that one process would have written. Other pairs follow one another as they are named; a folder
stands for its pairs by name. Started again after a kill, a merge continues.

Exit codes: 0 done, 1 the run failed, 2 the input or an option is at fault, 130 and 143 stopped by
Ctrl-C and SIGTERM.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.interrupts import end_at_interrupts, outside_imports, run_script

if __name__ == "__main__":
    end_at_interrupts()

from common.dataset.indexed import IndexedDataset, strip_extension
from common.dataset.merge import merge_datasets
from common.errors import GPT2Error, StopRequested, report
from common.log import progress_bar


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        type=Path,
        metavar="PAIR",
        help="pairs, by prefix, .bin or .idx; or folders of pairs",
    )
    parser.add_argument(
        "--output-prefix",
        required=True,
        type=Path,
        metavar="PREFIX",
        help="path of the new pair without its extension",
    )
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, outside_imports(_stop))
    display = _Display()
    try:
        # with an .idx also its .bin is named by a pattern such as my.shard-*
        inputs = dict.fromkeys(
            path if path.is_dir() else strip_extension(path) for path in arguments.input
        )
        merge_datasets(list(inputs), arguments.output_prefix, display)
    except GPT2Error as error:
        display.close()
        return report(error)
    except KeyboardInterrupt:
        display.close()
        print("stopped by Ctrl-C; the same command continues", file=sys.stderr)
        return 130
    display.close()
    data = IndexedDataset(arguments.output_prefix)
    print(
        f"wrote {data.prefix}.bin/.idx: {data.document_count} documents, {data.token_count} tokens"
        f" of {len(inputs)} inputs",
        file=sys.stderr,
    )
    return 0


class _Display:
    """A bar of bytes where a person watches."""

    def __init__(self) -> None:
        self._bar: Any = None

    def __call__(self, done: int, total: int) -> None:
        if not sys.stderr.isatty():
            return
        if self._bar is None:
            self._bar = progress_bar(total=total, unit="B")
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _stop(number: int, frame: FrameType | None) -> None:
    raise StopRequested(number, "; the same command continues")


if __name__ == "__main__":
    run_script(main)
