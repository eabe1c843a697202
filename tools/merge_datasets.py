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

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from common.program import start

    start(__file__)

from contextlib import closing
from dataclasses import dataclass
from typing import Any

from common.dataset.indexed import IndexedDataset, strip_extension
from common.dataset.merge import merge_datasets
from common.flags import flag
from common.log import progress_bar
from common.program import command


@dataclass(kw_only=True)
class Request:
    input: tuple[Path, ...] = flag(
        "PAIR: pairs, by prefix, .bin or .idx; or folders of pairs", required=True, nargs="+"
    )
    output_prefix: Path = flag("PREFIX: path of the new pair without its extension", required=True)


@command(Request, stopped="; the same command continues", dashes=True)
def main(request: Request) -> None:
    with closing(_Display()) as display:
        # with an .idx also its .bin is named by a pattern such as my.shard-*
        inputs = dict.fromkeys(
            path if path.is_dir() else strip_extension(path) for path in request.input
        )
        merge_datasets(list(inputs), request.output_prefix, display)
    data = IndexedDataset(request.output_prefix)
    print(
        f"wrote {data.prefix}.bin/.idx: {data.document_count} documents, {data.token_count} tokens"
        f" of {len(inputs)} inputs",
        file=sys.stderr,
    )


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
