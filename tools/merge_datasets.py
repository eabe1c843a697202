"""Join .bin/.idx pairs into one: the shards of a corpus, or any pairs of one tokenizer.

    python tools/merge_datasets.py --input data/my.shard-*_text_document.idx \\
            --output-prefix data/my_text_document

Shards of tools/preprocess_data.py are put in order, all must be there, and the result has the bytes
that one process would have written. Other pairs follow one another as they are named; a folder
stands for its pairs by name.

Exit codes: 0 done, 1 the run failed, 2 the input or an option is at fault, 130 and 143 stopped by
Ctrl-C and SIGTERM.
"""

if __name__ == "__main__":
    import as_script  # noqa: F401

import sys
from dataclasses import dataclass
from pathlib import Path

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


@command(Request, stopped="; no output is left in part", dashes=True)
def main(request: Request) -> None:
    # with an .idx also its .bin is named by a pattern such as my.shard-*
    inputs = dict.fromkeys(path if path.is_dir() else strip_extension(path) for path in request.input)
    with progress_bar(total=0, unit="B") as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        merge_datasets(list(inputs), request.output_prefix, show)
    data = IndexedDataset(request.output_prefix)
    print(
        f"wrote {data.prefix}.bin/.idx: {data.document_count} documents, {data.token_count} tokens"
        f" of {len(inputs)} inputs",
        file=sys.stderr,
    )
