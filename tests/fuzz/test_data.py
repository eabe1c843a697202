"""Corpora and .bin/.idx pairs, held against readers that use no code of the project."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from common.dataset.indexed import IndexedDataset, IndexedWriter
from common.dataset.options import PreprocessOptions
from common.dataset.preprocess import preprocess
from common.dataset.samples import GPTDataset
from tests.common.dataset.conftest import sequences_of
from tests.fuzz.faults import FAULTS, NUMBERS, TREE_FAULTS, VALUES, Fault, changed_tree, spoil, to_json
from tests.reference import MERGES, write_vocabulary


def read_pair(prefix: Path) -> tuple[list[list[int]], list[int]]:
    """Read sequences and document bounds with only the struct module."""
    index = prefix.with_suffix(".idx").read_bytes()
    magic, version, code, count, bounds = struct.unpack_from("<9sQBQQ", index)
    assert magic == b"MMIDIDX\0\0" and version == 1
    letter = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}[code]
    sizes = struct.unpack_from(f"<{count}i", index, 34)
    pointers = struct.unpack_from(f"<{count}q", index, 34 + 4 * count)
    documents = struct.unpack_from(f"<{bounds}q", index, 34 + 12 * count)
    tokens = prefix.with_suffix(".bin").read_bytes()
    places = zip(sizes, pointers, strict=True)
    return [list(struct.unpack_from(f"<{n}{letter}", tokens, at)) for n, at in places], [*documents]


def bare(text: str) -> str:
    return "".join(text.replace("<|endoftext|>", "").replace("\ufeff", "").split())


def read_corpus(data: bytes, name: str) -> str | None:
    """Return the text of a corpus, None where its name says another form than its content."""
    text = data.decode("utf-8")
    start = text.lstrip("\ufeff \t\r\n")[:1]
    try:
        if name == "corpus.txt":
            return None if start in ("{", "[") else text
        if start != ("[" if name == "corpus.json" else "{"):
            return None
        lines = [text] if name == "corpus.json" else [s for s in text.split("\n") if s.strip()]
        items = [json.loads(line) for line in lines]
        items = items[0] if name == "corpus.json" else items
        text = "".join(item if isinstance(item, str) else item["text"] for item in items)
        # half a character has no UTF-8, and becomes the sign for that
        return re.sub("[\ud800-\udfff]", "\ufffd", text)
    except (ValueError, RecursionError, TypeError, KeyError):
        return None


TEXTS = (
    "hello there, the first document.", "the second\ndocument: caf\u00e9 \u4e2d\u6587 \U0001f600",
    "a third one 123", "x", "hell hello he" * 5,
)  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of whole files."""
    folder = tmp_path_factory.mktemp("whole")
    generator = np.random.default_rng(0)
    with IndexedWriter(folder / "pair", np.uint16) as writer:
        for length in (30, 1, 55, 20, 17):
            writer.append(generator.integers(0, 60_000, size=length), np.array([length]))
    write_vocabulary(folder / "vocabulary", MERGES)
    corpora = {
        "txt": "\n\n".join(TEXTS),
        "jsonl": "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in TEXTS),
        "json": json.dumps([{"text": text} for text in TEXTS], indent=1),
    }
    for suffix, text in corpora.items():
        (folder / f"corpus.{suffix}").write_text(text, encoding="utf-8")
    return folder


@given(suffix=st.sampled_from(("idx", "idx", "bin")), fault=FAULTS)
@example(suffix="idx", fault=Fault("cut short", 20, 3))
@example(suffix="idx", fault=Fault("cut short", 40, 3))
@example(suffix="bin", fault=Fault("cut short", 100, 1))
@example(suffix="idx", fault=Fault("edge number", 17, 3))
@example(suffix="idx", fault=Fault("flipped bit", 36, 2))
def test_a_pair_with_a_fault(judge, whole, suffix, fault) -> None:
    """Windows of two splits are read before anything is compared."""
    with judge.folder() as folder:
        for path in whole.glob("pair.*"):
            shutil.copy(path, folder)
        spoil(folder / f"pair.{suffix}", fault)
        with judge(str(folder), "split "):
            data = IndexedDataset(folder / "pair")
            for split, shuffle in (("train", True), ("valid", False)):
                weights = (0.6, 0.4, 0)
                samples = GPTDataset(data, split=split, seq_length=4, seed=1, split_weights=weights, shuffle=shuffle)
                some = np.arange(min(samples.samples_per_epoch, 1000))
                assert samples.read(some).shape[1] == 5
            found = [part.tolist() for part in sequences_of(data)]
            assert (found, data.document_index[:].tolist()) == read_pair(folder / "pair")


BROKEN = ("{", "[1,", '"x', '{"text": "a"} {"text": "b"}', '\ufeff{"text": "x"}', "\0", "\r",
          "<|endoftext|>", '{"text": "\\u0000"}', '{"text": "\\ud800"}')  # fmt: skip
ITEMS = st.one_of(
    st.builds(lambda fault: to_json(changed_tree({"text": "hell x", "id": 1}, fault)), TREE_FAULTS),
    st.sampled_from(BROKEN),
    st.sampled_from(VALUES).map(to_json),
)
KEYS = st.sampled_from((("text",),) * 8 + (("id",), ("a/b",), ("",), ("..",), ("text", "text"),
                       ("a\0b",), ("text", "id")))  # fmt: skip
RULES = ("file", "line", "blank_line", "eot")


@given(name=st.sampled_from(("corpus.txt", "corpus.jsonl", "corpus.json")),
       items=st.lists(st.tuples(NUMBERS, ITEMS), max_size=3), fault=st.none() | FAULTS,
       zipped=st.sampled_from((False, False, True)), keys=KEYS, rule=st.sampled_from(RULES),
       block=st.sampled_from((16, 100, 1 << 20)))  # fmt: skip
@example("corpus.json", [], Fault("cut short", 90, 1), False, ("text",), RULES[0], 100)
@example("corpus.txt", [], Fault("cut short", 70, 1), True, ("text",), RULES[0], 16)
@example("corpus.jsonl", [(2, '{"text": "\\ud800"}')], None, False, ("text",), RULES[1], 16)
def test_a_corpus_with_faults(judge, whole, name, items, fault, zipped, keys, rule, block) -> None:
    """items: lines that are other ones."""
    if fault is not None and "GiB" in fault.kind:
        return  # an hour of zeros
    with judge.folder() as folder:
        lines = (whole / name).read_bytes().split(b"\n")
        for place, item in items:
            lines[place % len(lines)] = item.encode("utf-8", "surrogatepass")
        content, path = b"\n".join(lines), folder / (f"{name}.gz" if zipped else name)
        path.write_bytes(gzip.compress(content, mtime=0) if zipped else content)
        spoil(path, fault)
        with judge(str(folder), "--json-keys", "output_prefix"):
            vocabulary = whole / "vocabulary"
            options = PreprocessOptions(
                inputs=(path,), output_prefix=folder / "out", tokenizer_type="GPT2BPETokenizer",
                vocab_file=vocabulary / "encoder.json", merge_file=vocabulary / "vocab.bpe",
                tokenizer_backend="tokenizers", documents=rule, json_keys=keys, block_bytes=block,
            )  # fmt: skip
            prefixes = preprocess(options).prefixes
            if keys != ("text",):
                return
            made, (sequences, _) = options.load_tokenizer(), read_pair(prefixes[0])
            found = "".join(made.decode([token for token in row if token != made.eod_id]) for row in sequences)
            data = path.read_bytes()
            data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
            expected = read_corpus(data, name)
            # None: read as text where the name says JSON, or the other way round, with a warning
            assert expected is None or bare(found) == bare(expected)
