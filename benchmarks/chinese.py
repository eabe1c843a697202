"""Measure preprocessing of Chinese characters beside GPT2-Chinese's loop over BertTokenizer.

    python benchmarks/chinese.py --corpus train.json --vocab-file vocab.txt [--repeats 5]

The loop tokenizes, converts and writes. Both use one core, in turns. The loop is timed without its
imports; ours is the whole command.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.interleaved import median_ratio
from benchmarks.table import report
from common.flags import flag, parse

# One process, one text after the other, ids written as text: the steps of build_files in
# GPT2-Chinese's train.py, with the class of transformers that is asked for.
LOOP = """
import json, sys, time
from importlib import import_module
corpus, vocab, out, module, name = sys.argv[1:]
tokenizer = getattr(import_module(module), name)(vocab)
begin = time.perf_counter()
texts = [text.replace("\\n", " [SEP] ") for text in json.load(open(corpus, encoding="utf-8"))]
start, end = tokenizer.convert_tokens_to_ids(["[MASK]", "[CLS]"])
rows = [tokenizer.convert_tokens_to_ids(tokenizer.tokenize(text)) for text in texts]
with open(out, "w") as file:
    for row in rows:
        for number in (start, *row, end):
            file.write(str(number) + " ")
print(time.perf_counter() - begin)
"""
PEERS = {
    "BertTokenizer of transformers": ("transformers", "BertTokenizer"),
    "its older class in Python": (
        "transformers.models.bert.tokenization_bert_legacy",
        "BertTokenizerLegacy",
    ),
}


def _run(command: list[str]) -> tuple[float, str]:
    """Return wall seconds of a child of one core and one thread, and what it printed."""
    core = min(os.sched_getaffinity(0))
    environment = {**os.environ, "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    start = time.perf_counter()
    done = subprocess.run(
        command,
        check=True,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    return time.perf_counter() - start, done.stdout


@dataclass(kw_only=True)
class Request:
    corpus: Path = flag("text to preprocess", required=True)
    vocab_file: Path = flag("vocabulary of the tokenizer", required=True)
    repeats: int = flag("number of repeats", default=5)


def main() -> None:
    args = parse(Request, None, __doc__, dashes=True)
    size = args.corpus.stat().st_size
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = [str(args.corpus), str(args.vocab_file)]
        tool = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--input", files[0]]
        tool += ["--vocab-file", files[1], "--output-prefix"]
        ours = {
            "pieces": [*tool, str(folder / "pieces"), "--format", "pieces", "--num-pieces", "1"],
            ".bin/.idx": [*tool, str(folder / "pair")],
        }
        seconds: dict[str, list[float]] = {each: [] for each in (*ours, *PEERS)}
        for _ in range(args.repeats):
            for each, (module, kind) in PEERS.items():
                out = str(folder / f"{kind}.txt")
                _, said = _run([sys.executable, "-c", LOOP, *files, out, module, kind])
                seconds[each].append(float(said))
            for each, command in ours.items():
                seconds[each].append(_run(command)[0])
        written = (folder / "pieces_0.txt").read_bytes()
        for each, (_, kind) in PEERS.items():
            same = (folder / f"{kind}.txt").read_bytes() == written
            print(f"{each}: ids {'equal' if same else 'DIFFERENT'}")

    def describe(each: str) -> str:
        return f"{each}: {size / statistics.median(seconds[each]) / 1e6:.1f} MB/s"

    rows = []
    for each in ours:
        for peer in PEERS:
            ratio, least, greatest = median_ratio(seconds[each], seconds[peer])
            spread = f"{ratio:.1f} ({least:.1f} to {greatest:.1f} in {args.repeats})"
            what = f"preprocessing {size / 1e6:.1f} MB of Chinese, one core"
            rows.append((what, describe(each), describe(peer), spread, ""))
    report(rows)


if __name__ == "__main__":
    main()
