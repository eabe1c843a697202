"""Data files, each held against an independent reader: pairs, FleetX's files, .meta.json,
MindRecord, vocabularies, prompts, corpora.
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from common.dataset import GPTDataset, IndexedDataset, IndexedWriter
from common.dataset.blocks import DocumentRule
from common.dataset.fleetx import FleetXDataset
from common.dataset.mindrecord import MindRecordSamples
from common.dataset.preprocess import PreprocessOptions, preprocess
from common.dataset.workers import TokenizerChoice
from common.generation.prompts import read_prompts
from common.tokenizer.gpt2_bpe import GPT2BPETokenizer
from tests.fuzz import readers
from tests.fuzz.faults import (
    BYTES,
    FAULTS,
    NUMBERS,
    TREE_FAULTS,
    TREES,
    VALUES,
    Fault,
    changed_bytes,
    changed_json,
    changed_tree,
    spoiled,
    to_json,
)
from tests.reference import MERGES, write_vocabulary

LENGTHS = (30, 1, 55, 20, 17)
WIDTH = 9
TEXTS = (
    "hello there, the first document.", "the second\ndocument: caf\u00e9 \u4e2d\u6587 \U0001f600",
    "a third one 123", "x", "hell hello he" * 5,
)  # fmt: skip


def _choice(folder: Path) -> TokenizerChoice:
    return TokenizerChoice(
        kind="GPT2BPETokenizer", vocab_file=folder / "vocab.json",
        merge_file=folder / "merges.txt", backend="tokenizers",
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of whole files."""
    folder = tmp_path_factory.mktemp("whole")
    generator = np.random.default_rng(0)
    with IndexedWriter(folder / "pair", np.uint16) as writer:
        for length in LENGTHS:
            writer.append(generator.integers(0, 60_000, size=length), np.array([length]))
    tokens = generator.integers(0, 50257, size=sum(LENGTHS)).astype(np.uint16)
    np.save(folder / "fleetx_ids.npy", tokens)
    lens, docs = np.array(LENGTHS, dtype=np.int32), np.array([0, 2, 3, 4, 5], dtype=np.int64)
    np.savez(folder / "fleetx_idx.npz", lens=lens, docs=docs)
    write_vocabulary(folder / "vocabulary", MERGES)
    shutil.move(folder / "vocabulary" / "encoder.json", folder / "vocab.json")
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *MERGES, ""]))
    corpora = {
        ".txt": "\n\n".join(TEXTS),
        ".jsonl": "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in TEXTS),
        ".json": json.dumps([{"text": text} for text in TEXTS], indent=1),
    }
    for suffix, text in corpora.items():
        (folder / f"corpus{suffix}").write_text(text, encoding="utf-8")
    (folder / "prompts.jsonl").write_text(
        '{"prompt": "Once upon"}\n{"text": "hello"}\n{"ids": [464, 3290]}\n\n'
        '{"prompt": null, "text": "x"}\n'
    )
    options = PreprocessOptions(
        inputs=(folder / "corpus.txt",), output_prefix=folder / "made", tokenizer=_choice(folder)
    )
    preprocess(options)
    return folder


@pytest.fixture(scope="module")
def mindrecord(whole: Path, mindspore: Any) -> Path:
    from mindspore.mindrecord import FileWriter

    path = whole / "rows.mindrecord"
    writer = FileWriter(str(path), 1, True)
    writer.add_schema({"input_ids": {"type": "int32", "shape": [-1]}}, "test")
    generator = np.random.default_rng(0)
    numbers = generator.choice([0, 127, 128, 32767, 32768, 2**31 - 1], (20, WIDTH))
    writer.write_raw_data([{"input_ids": row.astype(np.int32)} for row in numbers])
    writer.commit()
    return path


# ---- files that a reader takes or refuses ----


def _use(data: Any) -> Any:
    """Read windows of two splits."""
    for split, shuffle in (("train", True), ("valid", False)):
        samples = GPTDataset(
            data, split=split, seq_length=4, seed=1, split_weights=(0.6, 0.4, 0), shuffle=shuffle
        )
        assert samples.read(np.arange(min(samples.samples_per_epoch, 1000))).shape[1] == 5
    return data


def _pair(folder: Path) -> Any:
    data = _use(IndexedDataset(folder / "pair"))
    return [data[n].tolist() for n in range(len(data))], data.document_index[:].tolist()


def _fleetx(folder: Path) -> Any:
    data = _use(FleetXDataset(folder / "fleetx"))
    return data.tokens.tolist(), [data.tokens_before(n) for n in range(data.document_count + 1)]


META = "made_text_document.meta.json"
KEPT = ("tokenizer", "vocab_size", "tokens", "documents", "eod_id")


def _metadata(folder: Path) -> Any:
    found = IndexedDataset(folder / "made_text_document").metadata()
    return None if found is None else {key: getattr(found, key) for key in KEPT}


def _metadata_again(folder: Path) -> Any:
    path = folder / META
    words = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    for key in KEPT if words else ():
        wanted = str if key == "tokenizer" else int
        assert type(words[key]) is wanted or (key == "eod_id" and words[key] is None)
    return words and {key: words[key] for key in KEPT}


def _vocabulary(folder: Path) -> Any:
    files = folder / "vocab.json", folder / "merges.txt"
    tokenizer = GPT2BPETokenizer.from_files(*files, backend="tokenizers")
    ids = [tokenizer.encode(text).tolist() for text in TEXTS]
    assert all(0 <= token < tokenizer.vocab_size for row in ids for token in row)
    return tokenizer.vocab_size, tokenizer.eod_id, [tokenizer.decode(row) for row in ids]


def _vocabulary_again(folder: Path) -> Any:
    table = json.loads((folder / "vocab.json").read_text(encoding="utf-8-sig"))
    return len(table), table["<|endoftext|>"], [*TEXTS]


def _rows(folder: Path) -> Any:
    samples = MindRecordSamples(
        folder / "rows.mindrecord", split="train", seq_length=WIDTH - 1, seed=0,
        split_weights=(1, 0, 0), shuffle=False,
    )  # fmt: skip
    return samples.read(np.arange(samples.samples_per_epoch)).tolist()


def _changed_merges(content: bytes, fault: Fault) -> bytes:
    """Exchange two lines, repeat, remove or replace one."""
    lines = content.split(b"\n")
    one, other = fault.at % len(lines), fault.number // 4 % len(lines)
    odd = (b"h", b"h e l", b" ", b"\xff\xfe", b"zz zz", b"#version", b"h  e")[fault.number % 7]
    new = [lines[other]], [lines[one], lines[other]], [], [odd]
    lines[one : one + 1] = new[fault.number % 4]
    return b"\n".join(lines)


def _more_prompts(content: bytes, fault: Fault) -> bytes:
    item = changed_tree({"prompt": "x", "text": "y", "ids": [0, 7]}, fault)
    return content + to_json(item).encode("utf-8", "surrogatepass") + b"\n"


def _changed_header(content: bytes, fault: Fault) -> bytes:
    length = int.from_bytes(content[:8], "little")
    text = changed_json(content[8 : 8 + length], fault)
    return (len(text).to_bytes(8, "little") + text).ljust(length + 8, b"\0") + content[8 + length :]


@dataclass(frozen=True)
class Kind:
    """files: glob of those that get a fault. change: what a fault of a tree does to them."""

    files: str
    read: Callable[[Path], Any]
    again: Callable[[Path], Any]
    change: Callable[[bytes, Fault], bytes] | None = None


KINDS = {
    "pair": Kind("pair.*", _pair, lambda folder: readers.read_pair(folder / "pair")),
    "fleetx": Kind("fleetx_*", _fleetx, readers.read_fleetx),
    "metadata": Kind(META, _metadata, _metadata_again, changed_json),
    "vocabulary": Kind(
        "[vm]?[cr]*.*",
        _vocabulary,
        _vocabulary_again,
        lambda content, fault: (changed_json if content[:1] == b"{" else _changed_merges)(
            content, fault
        ),
    ),
    "prompts": Kind(
        "prompts.jsonl",
        lambda folder: [text for _, text in read_prompts(folder / "prompts.jsonl")],
        lambda folder: readers.read_prompts(folder / "prompts.jsonl"),
        _more_prompts,
    ),
}
ROWS = Kind(
    "rows.mindrecord*",
    _rows,
    lambda folder: readers.read_rows(folder / "rows.mindrecord"),
    lambda content, fault: (
        changed_bytes(content, Fault("zeros", fault.at, fault.number))
        if content.startswith(b"SQLite")
        else _changed_header(content, fault)
    ),
)


def take_or_refuse(judge: Any, whole: Path, kind: Kind, file: int, fault: Fault) -> None:
    with judge.folder() as folder:
        shutil.copytree(whole, folder, dirs_exist_ok=True)
        paths = sorted(folder.glob(kind.files))
        if fault.kind in TREES and kind.change is None:
            fault = Fault("edge number", fault.at, fault.number)
        with judge(str(folder), "split ", "MindRecord"):
            with spoiled(paths[file % len(paths)], fault, kind.change or changed_json):
                found = kind.read(folder)
            assert found == kind.again(folder)


@pytest.mark.parametrize("kind", KINDS)
@given(file=NUMBERS, fault=st.one_of(FAULTS, TREE_FAULTS))
@example(file=1, fault=Fault("cut short", 20, 3))
@example(file=1, fault=Fault("cut short", 40, 3))
@example(file=0, fault=Fault("cut short", 100, 1))
@example(file=1, fault=Fault("edge number", 17, 3))
@example(file=1, fault=Fault("flipped bit", 36, 2))
@example(file=0, fault=Fault("key twice", 0, 1))
@example(file=0, fault=Fault("value", 0, 0, "1"))
def test_a_file_with_a_fault(judge, whole, kind, file, fault) -> None:
    take_or_refuse(judge, whole, KINDS[kind], file, fault)


@given(file=NUMBERS, fault=st.one_of(FAULTS, TREE_FAULTS))
def test_a_mindrecord_with_a_fault(judge, whole, mindrecord, file, fault) -> None:
    take_or_refuse(judge, whole, ROWS, file, fault)


# ---- text ----

BROKEN = ("{", "[1,", '"x', '{"text": "a"} {"text": "b"}', '\ufeff{"text": "x"}', "\0", "\r",
          "<|endoftext|>", '{"text": "\\u0000"}', '{"text": "\\ud800"}')  # fmt: skip
ITEMS = st.one_of(
    st.builds(lambda fault: to_json(changed_tree({"text": "hell x", "id": 1}, fault)), TREE_FAULTS),
    st.sampled_from(BROKEN),
    st.sampled_from(VALUES).map(to_json),
)
KEYS = st.sampled_from((("text",),) * 8 + (("id",), ("a/b",), ("",), ("..",), ("text", "text"),
                       ("a\0b",), ("text", "id")))  # fmt: skip
RULES = (DocumentRule.FILE, DocumentRule.LINE, DocumentRule.BLANK_LINE, DocumentRule.EOT)


@given(name=st.sampled_from(("corpus.txt", "corpus.jsonl", "corpus.json")),
       items=st.lists(st.tuples(st.integers(0, 20), ITEMS), max_size=3),
       fault=st.none() | FAULTS, zipped=st.sampled_from((None, None, "first", "then")), keys=KEYS,
       rule=st.sampled_from(RULES), block=st.sampled_from((16, 100, 1 << 20)))  # fmt: skip
@example("corpus.json", [], Fault("cut short", 90, 1), None, ("text",), RULES[0], 100)
@example("corpus.txt", [], Fault("cut short", 70, 1), "first", ("text",), RULES[0], 16)
@example("corpus.jsonl", [(2, '{"text": "\\ud800"}')], None, None, ("text",), RULES[1], 16)
def test_a_corpus_with_faults(judge, whole, name, items, fault, zipped, keys, rule, block) -> None:
    """items: lines that are other ones. zipped: before the fault, or after it."""
    if fault is not None and "GiB" in fault.kind:
        return  # an hour of zeros
    with judge.folder() as folder:
        lines = (whole / name).read_bytes().split(b"\n")
        for place, item in items:
            lines[place % len(lines)] = item.encode("utf-8", "surrogatepass")
        content, path = b"\n".join(lines), folder / name
        byte_fault = fault is not None and fault.kind in BYTES
        if byte_fault and zipped != "first":
            content = changed_bytes(content, fault)
        if zipped:
            path, content = folder / f"{name}.gz", gzip.compress(content, mtime=0)
            content = changed_bytes(content, fault) if byte_fault and zipped == "first" else content
        path.write_bytes(content)
        with judge(str(folder), "--json-keys", "output_prefix"):
            options = PreprocessOptions(
                inputs=(path,), output_prefix=folder / "out", tokenizer=_choice(whole),
                documents=rule, json_keys=keys, block_bytes=block,
            )  # fmt: skip
            with nullcontext() if byte_fault else spoiled(path, fault):
                prefixes = preprocess(options).prefixes
            if keys != ("text",):
                return
            tokenizer = options.tokenizer.load()
            found = "".join(
                tokenizer.decode([token for token in sequence if token != tokenizer.eod_id])
                for sequence in readers.read_pair(prefixes[0])[0]
            )
            data = path.read_bytes()
            data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
            expected = readers.read_corpus(data, name)
            # None: read as text where the name says JSON, or the other way round, with a warning
            assert expected is None or readers.bare(found) == readers.bare(expected)
