"""Data files, each held against an independent reader: .idx/.bin pairs, FleetX's files,
.meta.json, MindRecord with its index, corpora, vocabularies, prompts, cached sample orders.
"""

from __future__ import annotations

import gzip
import json
import shutil
import sqlite3
from contextlib import closing, nullcontext
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
from tests.fuzz.data_files import (
    TEXTS,
    WIDTH,
    bare,
    expected_text,
    read_pair,
    read_rows,
    with_header,
    write_mindrecord,
)
from tests.fuzz.faults import (
    BYTE_FAULTS,
    BYTES,
    FAULTS,
    SMALL_FILE_FAULTS,
    TREE_FAULTS,
    VALUES,
    Fault,
    changed_bytes,
    changed_tree,
    spoiled,
    to_json,
    tree_faults,
)
from tests.reference import MERGES, write_vocabulary

LENGTHS = (30, 1, 55, 20, 17)


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
    for name, dtype in (("pair", np.uint16), ("wide", np.int32)):
        with IndexedWriter(folder / name, dtype) as writer:
            for length in LENGTHS:
                writer.append(generator.integers(0, 60_000, size=length), np.array([length]))
    rows = np.where(
        generator.random((20, WIDTH)) < 0.3,
        generator.choice([0, 127, 128, 32767, 32768, 2**31 - 1], (20, WIDTH)),
        generator.integers(0, 50257, (20, WIDTH)),
    )
    write_mindrecord(folder / "rows.mindrecord", rows)
    assert _rows(folder / "rows.mindrecord").tolist() == rows.tolist()
    lens = np.array(LENGTHS, dtype=np.int32)
    tokens = generator.integers(0, 50257, size=sum(LENGTHS)).astype(np.uint16)
    np.save(folder / "fleetx_ids.npy", tokens)
    np.savez(folder / "fleetx_idx.npz", lens=lens, docs=np.array([0, 2, 3, 4, 5], dtype=np.int64))
    write_vocabulary(folder / "vocabulary", MERGES)
    shutil.copy(folder / "vocabulary" / "encoder.json", folder / "vocab.json")
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *MERGES, ""]))
    lines = [json.dumps({"text": text, "id": n}) + "\n" for n, text in enumerate(TEXTS)]
    array = json.dumps([{"text": text} for text in TEXTS], indent=1)
    corpora = {".txt": "\n\n".join(TEXTS), ".jsonl": "".join(lines), ".json": array}
    for suffix, text in corpora.items():
        (folder / f"corpus{suffix}").write_text(text, encoding="utf-8")
    (folder / "prompts.txt").write_text("Once upon a time\n\nhello\r\nthe end", encoding="utf-8")
    (folder / "prompts.jsonl").write_text(
        '{"prompt": "Once upon"}\n{"text": "hello"}\n{"ids": [464, 3290]}\n\n'
        '{"prompt": null, "text": "x"}\n'
    )
    options = PreprocessOptions(
        inputs=(folder / "corpus.txt",), output_prefix=folder / "made", tokenizer=_choice(folder)
    )
    (prefix,) = preprocess(options).prefixes
    for suffix in (".idx", ".bin", ".meta.json"):
        prefix.with_suffix(suffix).rename(folder / f"made{suffix}")
    return folder


def take(whole: Path, folder: Path, *names: str) -> list[Path]:
    return [Path(shutil.copy(whole / name, folder / name)) for name in names]


# ---- token files ----


def use(data: Any) -> Any:
    """Read windows of two splits."""
    for split, shuffle in (("train", True), ("valid", False)):
        samples = GPTDataset(
            data, split=split, seq_length=4, seed=1, split_weights=(0.6, 0.4, 0), shuffle=shuffle
        )
        assert samples.read(np.arange(min(samples.samples_per_epoch, 1000))).shape[1] == 5
    return data


@given(name=st.sampled_from(("pair", "pair", "wide")), suffix=st.sampled_from((".idx", ".bin")),
       fault=FAULTS, of_another=st.sampled_from((None, None, ".idx", ".bin")))  # fmt: skip
@example(name="pair", suffix=".idx", fault=Fault("cut short", 20, 3), of_another=None)
@example(name="pair", suffix=".idx", fault=Fault("cut short", 40, 3), of_another=None)
@example(name="pair", suffix=".bin", fault=Fault("cut short", 100, 1), of_another=None)
@example(name="pair", suffix=".idx", fault=Fault("edge number", 17, 3), of_another=None)
@example(name="pair", suffix=".idx", fault=Fault("flipped bits", 36, 2), of_another=None)
def test_a_pair_with_a_fault(judge, whole, name, suffix, fault, of_another) -> None:
    with judge.folder() as folder:
        take(whole, folder, f"{name}.idx", f"{name}.bin")
        prefix = folder / name
        if of_another:
            shutil.copy(whole / f"made{of_another}", prefix.with_suffix(of_another))
        with judge(str(prefix), "split "):
            with spoiled(prefix.with_suffix(suffix), fault):
                data = use(IndexedDataset(prefix))
            sequences, documents = read_pair(prefix)
            assert [data[n].tolist() for n in range(len(data))] == sequences
            assert data.document_index[:].tolist() == documents


@given(name=st.sampled_from(("fleetx_idx.npz", "fleetx_ids.npy", "fleetx_idx.npz")), fault=FAULTS)
def test_fleetx_files_with_a_fault(judge, whole, name, fault) -> None:
    with judge.folder() as folder:
        take(whole, folder, "fleetx_ids.npy", "fleetx_idx.npz")
        with judge(str(folder / "fleetx"), "split "):
            with spoiled(folder / name, fault):
                data = use(FleetXDataset(folder / "fleetx"))
            with np.load(folder / "fleetx_idx.npz") as arrays:
                lens = arrays["lens"]
                docs = arrays["docs"] if "docs" in arrays else np.arange(len(lens) + 1)
            ends = np.concatenate([[0], np.cumsum(lens, dtype=np.int64)])
            assert data.tokens.tolist() == np.load(folder / "fleetx_ids.npy").tolist()
            starts = [data.tokens_before(n) for n in range(data.document_count + 1)]
            assert starts == ends[docs].tolist()


@given(fault=TREE_FAULTS)
@example(fault=Fault("value", 0, 0, "1"))
@example(fault=Fault("missing file"))
def test_metadata_with_a_fault(judge, whole, fault) -> None:
    with judge.folder() as folder:
        *_, path = take(whole, folder, "made.idx", "made.bin", "made.meta.json")
        with judge(str(path)):
            with spoiled(path, fault):
                found = IndexedDataset(folder / "made").metadata()
            assert found is not None or not path.exists()
            words = {} if found is None else json.loads(path.read_text(encoding="utf-8"))
            for key in ("tokenizer", "vocab_size", "tokens", "documents", "eod_id"):
                if found is not None and not (key == "eod_id" and words[key] is None):
                    assert type(words[key]) is (str if key == "tokenizer" else int)
                    assert getattr(found, key) == words[key]


def _rows(path: Path) -> np.ndarray:
    samples = MindRecordSamples(
        path, split="train", seq_length=WIDTH - 1, seed=0, split_weights=(1, 0, 0), shuffle=False
    )
    return samples.read(np.arange(samples.samples_per_epoch))


def _changed_header(content: bytes, fault: Fault) -> bytes:
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    return with_header(to_json(changed_tree(header, fault)), content[4096:], 4096)


@given(name=st.sampled_from(("rows.mindrecord", "rows.mindrecord.db")), fault=FAULTS,
       header=tree_faults())  # fmt: skip
def test_a_mindrecord_with_a_fault(judge, whole, name, fault, header) -> None:
    with judge.folder() as folder:
        path, _ = take(whole, folder, "rows.mindrecord", "rows.mindrecord.db")
        if fault.number % 2 and name == "rows.mindrecord":
            fault = header
        with judge(str(folder), "MindRecord"):
            with spoiled(folder / name, fault, _changed_header):
                found = _rows(path)
            assert found.tolist() == read_rows(path)


_ENDLESS = "VIEW {} AS WITH RECURSIVE c(x) AS (SELECT 0 UNION ALL SELECT x + 1 FROM c) SELECT x AS"
STATEMENTS = (
    "UPDATE INDEXES SET {column} = {value} WHERE ROW_ID = {row}",
    "UPDATE INDEXES SET {column} = {value} WHERE ROW_ID = {row}",
    "UPDATE INDEXES SET {column} = {value}", "DELETE FROM INDEXES",
    "DELETE FROM INDEXES WHERE ROW_ID = {row}",
    "INSERT INTO INDEXES SELECT {value}, 0,0,0,0, PAGE_ID_BLOB, PAGE_OFFSET_BLOB,"
    " PAGE_OFFSET_BLOB_END FROM INDEXES WHERE ROW_ID = {row}",
    "DROP TABLE INDEXES", "DROP TABLE SHARD_NAME", "UPDATE SHARD_NAME SET NAME = {value}",
    "INSERT INTO SHARD_NAME VALUES ({value})", "DELETE FROM SHARD_NAME",
    "ALTER TABLE INDEXES RENAME COLUMN {column} TO X",
    "ALTER TABLE INDEXES RENAME TO I2; CREATE VIEW INDEXES AS SELECT * FROM I2",
)  # fmt: skip
ENDLESS = (
    f"DROP TABLE INDEXES; CREATE {_ENDLESS.format('INDEXES')} ROW_ID, 0 AS PAGE_ID_BLOB,"
    " 0 AS PAGE_OFFSET_BLOB, 60 AS PAGE_OFFSET_BLOB_END FROM c",
    f"DROP TABLE SHARD_NAME; CREATE {_ENDLESS.format('SHARD_NAME')} NAME FROM c",
)
SQL = ("-1", "0", "1", "255", "256", "9223372036854775807", "-9223372036854775808", "1e308",
       "1.5", "NULL", "'x'", "x'00ff'", "''", "'../rows.mindrecord'", "5", "16",
       "100000")  # fmt: skip
COLUMNS = ("ROW_ID", "PAGE_ID_BLOB", "PAGE_OFFSET_BLOB", "PAGE_OFFSET_BLOB_END")


@given(statement=st.sampled_from(STATEMENTS), column=st.sampled_from(COLUMNS),
       value=st.sampled_from(SQL), row=st.integers(0, 19))  # fmt: skip
@example(statement=ENDLESS[0], column="", value="", row=0)
@example(statement=ENDLESS[1], column="", value="", row=0)
@example(statement=STATEMENTS[-1], column="", value="", row=0)
def test_another_index_of_a_mindrecord(judge, whole, statement, column, value, row) -> None:
    with judge.folder() as folder:
        path, index = take(whole, folder, "rows.mindrecord", "rows.mindrecord.db")
        with closing(sqlite3.connect(index)) as database:
            try:
                database.executescript(statement.format(column=column, value=value, row=row))
            except sqlite3.Error:
                return  # the database itself refuses
        with judge(str(folder), "MindRecord"):
            found = _rows(path)
            assert found.tolist() == read_rows(path)


# ---- text ----

BROKEN = ("{", "[1,", '"x', '{"text": "a"} {"text": "b"}', '\ufeff{"text": "x"}', "\0", "\r",
          "<|endoftext|>", '{"text": "\\u0000"}', "nul", '{"text": "\\ud800"}')  # fmt: skip
ITEMS = st.one_of(
    st.sampled_from(TEXTS).map(lambda text: to_json({"text": text, "id": 1})),
    st.builds(
        lambda fault: to_json(changed_tree({"text": "hell x", "id": 1}, fault)), tree_faults()
    ),
    st.sampled_from(BROKEN),
    st.sampled_from(VALUES).map(to_json),
)
KEYS = st.sampled_from((("text",),) * 8 + (("id",), ("a/b",), ("",), ("..",), ("text", "text"),
                       ("a\0b",), ("text", "id")))  # fmt: skip
RULES = (DocumentRule.FILE, DocumentRule.LINE, DocumentRule.BLANK_LINE, DocumentRule.EOT)


@given(name=st.sampled_from(("corpus.txt", "corpus.jsonl", "corpus.json")),
       items=st.lists(st.tuples(st.integers(0, 20), ITEMS), max_size=3),
       fault=st.one_of(st.none(), BYTE_FAULTS, SMALL_FILE_FAULTS),
       zipped=st.sampled_from((None, None, "first", "then")), keys=KEYS,
       rule=st.sampled_from(RULES), sentences=st.sampled_from((False, False, False, True)),
       block=st.sampled_from((16, 100, 1 << 20)),
       marks=st.sampled_from((None, "tokens", "text")))  # fmt: skip
@example("corpus.json", [], Fault("cut short", 90, 1), None, ("text",), RULES[0], False, 100, None)
@example("corpus.txt", [], Fault("cut short", 70, 1), "first", ("text",), RULES[0], False, 16, None)
@example("corpus.jsonl", [(2, '{"text": "\\ud800"}')], None, None, ("text",), RULES[1], False, 16,
         None)  # fmt: skip
def test_a_corpus_with_faults(judge, whole, name, items, fault, zipped, keys, rule, sentences,
                              block, marks) -> None:  # fmt: skip
    """items: lines that are other ones. zipped: before the fault, or after it."""
    with judge.folder() as folder:
        (path,) = take(whole, folder, name)
        lines = path.read_bytes().split(b"\n")
        for place, item in items:
            lines[place % len(lines)] = item.encode("utf-8", "surrogatepass")
        content = b"\n".join(lines)
        byte_fault = fault is not None and fault.kind in BYTES
        if byte_fault and zipped != "first":
            content = changed_bytes(content, fault)
        if zipped:
            path = folder / f"{name}.gz"
            content = gzip.compress(content, mtime=0)
            content = changed_bytes(content, fault) if byte_fault and zipped == "first" else content
        path.write_bytes(content)
        with judge(str(folder), "--json-keys", "output_prefix"):
            options = PreprocessOptions(
                inputs=(path,), output_prefix=folder / "out", tokenizer=_choice(whole),
                documents=rule, json_keys=keys, split_sentences=sentences, block_bytes=block,
                special_tokens=marks,
            )  # fmt: skip
            with nullcontext() if fault is None or byte_fault else spoiled(path, fault):
                prefixes = preprocess(options).prefixes
            if len(prefixes) != 1 or keys != ("text",):
                return
            tokenizer = options.tokenizer.load()
            found = "".join(
                tokenizer.decode([token for token in sequence if token != tokenizer.eod_id])
                for sequence in read_pair(prefixes[0])[0]
            )
            data = path.read_bytes()
            data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
            expected = expected_text(data, name)
            # None: read as text where the name says JSON, or the other way round, with a warning
            assert expected is None or bare(found) == bare(expected)


ODD_MERGES = (b"h", b"h e l", b" ", b"\0", b"\xff\xfe", b"zz zz", "\u0120\u0120 t".encode(),
              b"#version", b"h  e", b"\t", b"x" * 5000)  # fmt: skip


def _changed_merges(content: bytes, fault: Fault) -> bytes:
    """Exchange two lines, repeat, remove or replace one."""
    lines = content.split(b"\n")
    one, other = fault.at % len(lines), fault.number // 4 % len(lines)
    new = [lines[other]], [lines[one], lines[other]], [], [ODD_MERGES[fault.number % 11]]
    lines[one : one + 1] = new[fault.number % 4]
    return b"\n".join(lines)


@given(name=st.sampled_from(("vocab.json", "merges.txt")), fault=TREE_FAULTS)
@example(name="vocab.json", fault=Fault("key removed", 0))
@example(name="vocab.json", fault=Fault("key twice", 0, 1))
@example(name="merges.txt", fault=Fault("value", 1, 2))
def test_a_vocabulary_with_a_fault(judge, whole, name, fault) -> None:
    with judge.folder() as folder:
        vocab, merges = take(whole, folder, "vocab.json", "merges.txt")
        structured = {"merges.txt": _changed_merges} if name == "merges.txt" else {}
        with judge(str(vocab), str(merges)):
            with spoiled(folder / name, fault, *structured.values()):
                tokenizer = GPT2BPETokenizer.from_files(vocab, merges, backend="tokenizers")
            for text in (*TEXTS, "hello the hell \x00\x7f \ud7ff"):
                ids = tokenizer.encode(text).tolist()
                assert tokenizer.decode(ids) == text
                assert all(0 <= token < tokenizer.vocab_size for token in ids)
            table = json.loads(vocab.read_text(encoding="utf-8-sig"))
            assert len(table) == tokenizer.vocab_size
            assert table["<|endoftext|>"] == tokenizer.eod_id


def _more_prompts(content: bytes, fault: Fault) -> bytes:
    item = changed_tree({"prompt": "x", "text": "y", "ids": [0, 7]}, fault)
    return content + to_json(item).encode("utf-8", "surrogatepass") + b"\n"


@given(fault=TREE_FAULTS, name=st.sampled_from(("prompts.txt", "prompts.jsonl", "prompts.jsonl")))
def test_prompts_with_a_fault(judge, whole, name, fault) -> None:
    with judge.folder() as folder:
        (path,) = take(whole, folder, name)
        with judge(str(path)):
            with spoiled(path, fault, _more_prompts):
                found = [text for _, text in read_prompts(path)]
            lines = path.read_bytes().decode("utf-8-sig").split("\n")
            lines = [line.removesuffix("\r") for line in lines if line.strip()]
            if name == "prompts.jsonl":
                items, keys = [json.loads(line) for line in lines], ("prompt", "text", "ids")
                lines = [next(i[key] for key in keys if i.get(key) is not None) for i in items]
            assert found == lines
