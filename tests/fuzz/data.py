"""Data files: .idx/.bin pairs, .meta.json, MindRecord with its index, corpora, vocabularies, prompts."""

from __future__ import annotations

import gzip
import json
import shutil
import sqlite3
import struct
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.dataset import GPTDataset, IndexedDataset, IndexedWriter
from common.dataset.blocks import DocumentRule
from common.dataset.mindrecord import MindRecordSamples
from common.dataset.preprocess import PreprocessOptions, preprocess
from common.dataset.workers import TokenizerChoice
from common.generation.prompts import read_prompts
from common.tokenizer.gpt2_bpe import GPT2BPETokenizer
from tests.fuzz.dice import Dice
from tests.fuzz.engine import Case, Differs
from tests.fuzz.mutations import BYTES, FILES, UNREADABLE, hostile_value, spoil_file, spoil_json, spoil_one, spoil_tree, to_json, unreadable

CLASSES = {
    "pair": ".idx or .bin: bytes, special files, another pair's half, words of the index at the edges of their types",
    "metadata": ".meta.json: bytes, special files, faults of its tree",
    "MindRecord": "pages and header by bytes, the header by its tree, special files",
    "MindRecord index": ".db: bytes, other values, rows missing or twice, a view in place of a table, a view without end",
    "corpus": "text, JSON Lines, an array, each with gzip or not: bytes, special files, hostile items and keys",
    "vocabulary": "vocab.json and merges.txt: bytes, special files, faults of the tree, lines exchanged",
    "prompts": "text and .jsonl: bytes, special files, hostile items",
}
WIDTH = 9
"""Tokens of a MindRecord's row."""
SCHEMA = {"input_ids": {"type": "int32", "shape": [-1]}}


@dataclass
class Prepared:
    folder: Path
    rows: np.ndarray
    choice: TokenizerChoice


# ---- whole files ----


def write_mindrecord(path: Path, rows: np.ndarray, page_size: int = 256, header_size: int = 1024) -> None:
    """As MindSpore's FileWriter: rows in pages of blobs, of which the index says where they lie."""
    pages, places, page = [b""], [], 0
    for row in rows.tolist():
        codes, numbers = [], b""
        for token in row:
            code = next(code for code in range(3) if -(2 ** (8 * 2**code - 1)) <= token < 2 ** (8 * 2**code - 1))
            codes.append(code)
            numbers += token.to_bytes(2**code, "little", signed=True)
        codes += [0] * (-len(codes) % 4)
        packed = bytes(codes[n] << 6 | codes[n + 1] << 4 | codes[n + 2] << 2 | codes[n + 3] for n in range(0, len(codes), 4))
        blob = len(row).to_bytes(4, "big") + packed + numbers
        blob = len(blob).to_bytes(8, "little") + blob
        if len(pages[page]) + len(blob) > page_size:
            pages.append(b"")
            page += 1
        places.append((page, len(pages[page]), len(pages[page]) + len(blob)))
        pages[page] += blob
    first = 0
    records = []
    for number, content in enumerate(pages):
        count = sum(place[0] == number for place in places)
        records.append({
            "page_id": number, "page_size": len(content), "page_type": "BLOB_DATA", "page_type_id": number, "shard_id": 0,
            "start_row_id": first,
            "end_row_id": first + count, "row_group_ids": [],
        })  # fmt: skip
        first += count
    header = {
        "header_size": header_size, "page_size": page_size, "version": "3.0", "index_fields": [], "shard_addresses": [path.name],
        "shard_id": 0, "page": records,
        "schema": [{"desc": "test", "schema": SCHEMA, "schema_id": 0, "blob_fields": ["input_ids"]}], "statistics": [],
        "compression_size": 0,
    }  # fmt: skip
    text = json.dumps(header, separators=(",", ":")).encode()
    start = len(text).to_bytes(8, "little") + text
    header_size = max(header_size, -(-len(start) // 1024) * 1024)
    if header_size != header["header_size"]:
        write_mindrecord(path, rows, page_size, header_size)
        return
    path.write_bytes(start.ljust(header_size, b"\0") + b"".join(content.ljust(page_size, b"\0") for content in pages))
    with closing(sqlite3.connect(path.with_name(path.name + ".db"))) as database, database:
        database.execute("CREATE TABLE SHARD_NAME(NAME TEXT NOT NULL)")
        database.execute("INSERT INTO SHARD_NAME VALUES (?)", (path.name,))
        database.execute(
            "CREATE TABLE INDEXES(ROW_ID INT NOT NULL, PAGE_ID_RAW INT, PAGE_OFFSET_RAW INT, PAGE_OFFSET_RAW_END INT, ROW_GROUP_ID INT,"
            " PAGE_ID_BLOB INT, PAGE_OFFSET_BLOB INT, PAGE_OFFSET_BLOB_END INT, PRIMARY KEY(ROW_ID))"
        )
        database.executemany("INSERT INTO INDEXES VALUES (?,0,0,0,0,?,?,?)", [(n, *place) for n, place in enumerate(places)])


def _vocabulary(folder: Path) -> tuple[Path, Path]:
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    table = {byte: chr(byte) for byte in shown} | {byte: chr(256 + n) for n, byte in enumerate(hidden)}
    merges = ["h e", "l l", "he ll", "hell o", "\u0120 t"]
    tokens = [*(table[byte] for byte in range(256)), *(merge.replace(" ", "") for merge in merges), "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    return folder / "vocab.json", folder / "merges.txt"


TEXTS = [
    "hello there, the first document.",
    "the second\ndocument: caf\u00e9 \u4e2d\u6587 \U0001f600",
    "a third one 123",
    "x",
    "hell hello he" * 5,
]


def prepare(folder: Path) -> Prepared:
    generator = np.random.default_rng(0)
    for name, dtype in (("pair", np.uint16), ("wide", np.int32)):
        with IndexedWriter(folder / name, dtype) as writer:
            for length in (30, 1, 55, 20, 17):
                writer.append(generator.integers(0, 60_000, size=length), np.array([length]))
    rows = np.where(
        generator.random((20, WIDTH)) < 0.3,
        generator.choice([0, 127, 128, 32767, 32768, 2**31 - 1], (20, WIDTH)),
        generator.integers(0, 50257, (20, WIDTH)),
    )
    write_mindrecord(folder / "rows.mindrecord", rows)
    vocab_file, merge_file = _vocabulary(folder)
    choice = TokenizerChoice(kind="GPT2BPETokenizer", vocab_file=vocab_file, merge_file=merge_file, backend="tokenizers")
    (folder / "corpus.txt").write_text("\n\n".join(TEXTS), encoding="utf-8")
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text, "id": n}) + "\n" for n, text in enumerate(TEXTS)))
    (folder / "corpus.json").write_text(json.dumps([{"text": text} for text in TEXTS], indent=1))
    for name in ("corpus.txt", "corpus.jsonl", "corpus.json"):
        (folder / f"{name}.gz").write_bytes(gzip.compress((folder / name).read_bytes(), mtime=0))
    result = preprocess(PreprocessOptions(inputs=(folder / "corpus.txt",), output_prefix=folder / "made", tokenizer=choice))
    result.prefixes[0].with_suffix(".meta.json").rename(folder / "made.meta.json")
    for extension in (".bin", ".idx"):
        result.prefixes[0].with_suffix(extension).rename(folder / f"made{extension}")
    (folder / "prompts.txt").write_text("Once upon a time\n\nhello\r\nthe end", encoding="utf-8")
    (folder / "prompts.jsonl").write_text('{"prompt": "Once upon"}\n{"text": "hello"}\n\n{"prompt": null, "text": "x"}\n')
    assert (
        MindRecordSamples(
            folder / "rows.mindrecord", split="train", seq_length=WIDTH - 1, seed=0, split_weights=(1, 0, 0), shuffle=False
        ).read(np.arange(20))
        == rows
    ).all()
    return Prepared(folder=folder, rows=rows, choice=choice)


def make(dice: Dice, prepared: Prepared, folder: Path) -> Case:
    kind = dice.pick(
        ("pair", "pair", "metadata", "MindRecord", "MindRecord index", "corpus", "corpus", "corpus", "vocabulary", "vocabulary", "prompts")
    )
    case = MAKERS[kind](dice, prepared, folder)
    case.kind = kind
    return case


def _take(prepared: Prepared, folder: Path, *names: str) -> list[Path]:
    return [Path(shutil.copy(prepared.folder / name, folder / name)) for name in names]


def _spoil(dice: Dice, path: Path, run: Callable[[], Any], **options: Any) -> tuple[str, Callable[[], Any]]:
    """Spoil a file, or let it be unreadable while ``run`` runs."""
    if dice.chance(0.05):
        kind = dice.pick(list(UNREADABLE))

        def refused() -> Any:
            with unreadable(kind, path):
                return run()

        return f"{path.name}: {kind}", refused
    return f"{path.name}: {spoil_one(dice, path, **options)}", run


# ---- pairs ----


def read_pair(prefix: Path) -> tuple[list[list[int]], list[int]]:
    """Read sequences and document bounds with the struct module alone."""
    index = prefix.with_suffix(".idx").read_bytes()
    magic, version, code, count, bounds = struct.unpack_from("<9sQBQQ", index)
    assert magic == b"MMIDIDX\0\0" and version == 1
    letter = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}[code]
    sizes = struct.unpack_from(f"<{count}i", index, 34)
    pointers = struct.unpack_from(f"<{count}q", index, 34 + 4 * count)
    documents = struct.unpack_from(f"<{bounds}q", index, 34 + 12 * count)
    tokens = prefix.with_suffix(".bin").read_bytes()
    return [list(struct.unpack_from(f"<{size}{letter}", tokens, at)) for size, at in zip(sizes, pointers, strict=True)], list(documents)


def _make_pair(dice: Dice, prepared: Prepared, folder: Path) -> Case:
    name = dice.pick(("pair", "pair", "wide"))
    index, tokens = _take(prepared, folder, f"{name}.idx", f"{name}.bin")
    prefix = folder / name

    def run() -> IndexedDataset:
        data = IndexedDataset(prefix)
        for split, shuffle in (("train", True), ("valid", False)):
            samples = GPTDataset(data, split=split, seq_length=4, seed=1, split_weights=(0.6, 0.4, 0), shuffle=shuffle)
            if samples.read(np.arange(min(samples.samples_per_epoch, 1000))).shape[1] != 5:
                raise Differs("a window of another width")
        return data

    def check(data: IndexedDataset) -> str | None:
        sequences, documents = read_pair(prefix)
        found = [data[n].tolist() for n in range(len(data))]
        if found != sequences or data.document_index.tolist() != documents:
            return f"{len(found)} sequences, {len(sequences)} in the file, or other tokens"
        return None

    about, run_it = _spoil(dice, dice.pick((index, index, tokens)), run)
    if dice.chance(0.1):
        about += ", the half of another pair"
        shutil.copy(
            prepared.folder / f"made{dice.pick(('.idx', '.bin'))}", dice.pick((index, tokens))
        ) if tokens.is_file() and index.is_file() else None
    return Case(kind="", run=run_it, names=(str(prefix), "split "), check=check, about=about)


def _make_metadata(dice: Dice, prepared: Prepared, folder: Path) -> Case:
    *_, path = _take(prepared, folder, "made.idx", "made.bin", "made.meta.json")

    def check(found: Any) -> str | None:
        if found is None:
            return None if not path.exists() else "a file is there, and none was read"
        words = json.loads(path.read_text(encoding="utf-8"))
        for key in ("tokenizer", "vocab_size", "tokens", "documents", "eod_id"):
            kind = str if key == "tokenizer" else int
            if type(words[key]) is not kind and not (key == "eod_id" and words[key] is None):
                return f"{key}={words[key]!r} was taken"
            if getattr(found, key) != words[key]:
                return f"{key} is {getattr(found, key)!r}, the file says {words[key]!r}"
        return None

    about, run = _spoil(dice, path, lambda: IndexedDataset(folder / "made").metadata(), structured=spoil_json)
    return Case(kind="", run=run, names=(str(path),), check=check, about=about)


# ---- MindRecord ----


def read_rows(path: Path) -> list[list[int]]:
    """Decode every row as the format says, a number at a time."""
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    with closing(sqlite3.connect(f"{path.with_name(path.name + '.db').as_uri()}?mode=ro&immutable=1", uri=True)) as database:
        places = database.execute("SELECT PAGE_ID_BLOB, PAGE_OFFSET_BLOB, PAGE_OFFSET_BLOB_END FROM INDEXES ORDER BY ROW_ID").fetchmany(
            1000
        )
    rows = []
    for page, first, end in places:
        start = int(header["header_size"]) + page * int(header["page_size"])
        blob = data[start + first : start + end]
        assert int.from_bytes(blob[:8], "little") == len(blob) - 8
        count = int.from_bytes(blob[8:12], "big")
        at, row = 12 + (count + 3) // 4, []
        for n in range(count):
            size = 1 << (blob[12 + n // 4] >> (6 - 2 * (n % 4)) & 3)
            row.append(int.from_bytes(blob[at : at + size], "little", signed=True))
            at += size
        assert at == len(blob)
        rows.append(row)
    return rows


def _open_rows(path: Path) -> np.ndarray:
    samples = MindRecordSamples(path, split="train", seq_length=WIDTH - 1, seed=0, split_weights=(1, 0, 0), shuffle=False)
    return samples.read(np.arange(samples.samples_per_epoch))


def _same_rows(path: Path) -> Callable[[np.ndarray], str | None]:
    def check(found: np.ndarray) -> str | None:
        return None if found.tolist() == read_rows(path) else "other tokens than the file's"

    return check


def _make_mindrecord(dice: Dice, prepared: Prepared, folder: Path) -> Case:
    path, _ = _take(prepared, folder, "rows.mindrecord", "rows.mindrecord.db")
    if dice.chance(0.5):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        tree, about, key = spoil_tree(dice, json.loads(data[8 : 8 + length]))
        text = to_json(tree).encode("utf-8", "surrogatepass")
        size = max(1024 * (1 + (len(text) + 8) // 1024), json.loads(data[8 : 8 + length])["header_size"])
        path.write_bytes((len(text).to_bytes(8, "little") + text).ljust(size, b"\0") + data[1024 * (1 + (length + 8) // 1024) :])
        return Case(
            kind="", run=lambda: _open_rows(path), names=(str(path), "MindRecord"), check=_same_rows(path), about=f"{about} at {key}"
        )
    about, run = _spoil(dice, path, lambda: _open_rows(path))
    return Case(kind="", run=run, names=(str(path), "MindRecord"), check=_same_rows(path), about=about)


STATEMENTS = (
    "UPDATE INDEXES SET {column} = {value} WHERE ROW_ID = {row}", "UPDATE INDEXES SET {column} = {value}",
    "DELETE FROM INDEXES WHERE ROW_ID = {row}", "DELETE FROM INDEXES",
    "INSERT INTO INDEXES SELECT {value}, 0,0,0,0, PAGE_ID_BLOB, PAGE_OFFSET_BLOB, PAGE_OFFSET_BLOB_END FROM INDEXES WHERE ROW_ID = {row}",
    "DROP TABLE INDEXES",
    "DROP TABLE SHARD_NAME", "UPDATE SHARD_NAME SET NAME = {value}", "INSERT INTO SHARD_NAME VALUES ({value})", "DELETE FROM SHARD_NAME",
    "ALTER TABLE INDEXES RENAME COLUMN {column} TO X", "ALTER TABLE INDEXES RENAME TO I2; CREATE VIEW INDEXES AS SELECT * FROM I2",
    "DROP TABLE INDEXES; CREATE VIEW INDEXES AS WITH RECURSIVE c(x) AS (SELECT 0 UNION ALL SELECT x + 1 FROM c)"
    " SELECT x AS ROW_ID, 0 AS PAGE_ID_BLOB, 0 AS PAGE_OFFSET_BLOB, 60 AS PAGE_OFFSET_BLOB_END FROM c",
    "ALTER TABLE SHARD_NAME RENAME TO S2; CREATE VIEW SHARD_NAME AS WITH RECURSIVE c(x) AS (SELECT 0 UNION ALL SELECT x + 1 FROM c)"
    " SELECT x AS NAME FROM c",
)  # fmt: skip
SQL_VALUES = (
    "-1",
    "0",
    "1",
    "255",
    "256",
    "9223372036854775807",
    "-9223372036854775808",
    "1e308",
    "1.5",
    "NULL",
    "'x'",
    "x'00ff'",
    "''",
    "'../rows.mindrecord'",
    "5",
    "16",
    "100000",
)


def _make_index(dice: Dice, prepared: Prepared, folder: Path) -> Case:
    path, index = _take(prepared, folder, "rows.mindrecord", "rows.mindrecord.db")
    if dice.chance(0.4):
        about, run = _spoil(dice, index, lambda: _open_rows(path))
        return Case(kind="", run=run, names=(str(path), "MindRecord"), check=_same_rows(path), about=about)
    statement = dice.pick(STATEMENTS[:-2] if dice.chance(0.95) else STATEMENTS)
    statement = statement.format(
        column=dice.pick(("ROW_ID", "PAGE_ID_BLOB", "PAGE_OFFSET_BLOB", "PAGE_OFFSET_BLOB_END")),
        value=dice.pick(SQL_VALUES),
        row=dice.below(20),
    )
    with closing(sqlite3.connect(index)) as database:
        try:
            database.executescript(statement)
        except sqlite3.Error as error:
            statement += f" ({error})"
    return Case(kind="", run=lambda: _open_rows(path), names=(str(path), "MindRecord"), check=_same_rows(path), about=statement)


# ---- corpora ----


def _lines(dice: Dice, content: bytes) -> tuple[bytes, str, str]:
    """Replace an item of a text, of JSON Lines or of an array of an item a line."""
    lines = content.split(b"\n")
    kind, value = hostile_value(dice)
    if dice.chance(0.7):
        item, fault, _ = spoil_tree(dice, {"text": dice.pick(TEXTS), "id": 1})
        text, kind = to_json(item), fault
    else:
        text = to_json(value)
    if dice.chance(0.1):
        text, kind = (
            dice.pick(
                (
                    "{",
                    "[1,",
                    '"x',
                    '{"text": "a"} {"text": "b"}',
                    "\ufeff" + text,
                    "\0",
                    "\r",
                    "<|endoftext|>",
                    '{"text": "\\u0000"}',
                    "nul",
                )
            ),
            "broken items",
        )
    lines[dice.below(len(lines))] = text.encode("utf-8", "surrogatepass")
    return b"\n".join(lines), kind, ""


def _make_corpus(dice: Dice, prepared: Prepared, folder: Path) -> Case:
    name = dice.pick(("corpus.txt", "corpus.jsonl", "corpus.json"))
    zipped = dice.chance(0.3)
    (path,) = _take(prepared, folder, name)
    opened: str | None = None
    whole = gzip.compress(path.read_bytes(), mtime=0)
    if dice.chance(0.08):
        opened = about = dice.pick(list(UNREADABLE))
    elif dice.chance(0.1):
        about = dice.pick([kind for kind in FILES if kind != "a sparse file of 16 GiB"])
        spoil_file(about, path)
    elif dice.chance(0.6):
        for _ in range(dice.between(1, 3)):
            content, about, _ = _lines(dice, path.read_bytes())
            path.write_bytes(content)
    else:
        about = dice.pick(list(BYTES))
        path.write_bytes(BYTES[about](dice, path.read_bytes()))
    if zipped and path.is_file() and not path.is_symlink():
        content = gzip.compress(path.read_bytes(), mtime=0)
        path.unlink()
        path = folder / f"{name}.gz"
        if dice.chance(0.3):
            about = f"gzip: {dice.pick(list(BYTES))}"
            content = BYTES[about.removeprefix("gzip: ")](dice, whole)
        path.write_bytes(content)
    rule = dice.pick((DocumentRule.FILE, DocumentRule.LINE, DocumentRule.BLANK_LINE, DocumentRule.EOT))
    keys = dice.pick((("text",),) * 8 + (("id",), ("a/b",), ("",), ("..",), ("text", "text"), ("a\0b",), ("text", "id")))
    if keys != ("text",):
        about += f", keys {keys}"[:60]
    sentences = dice.chance(0.2)

    def run() -> list[Path]:
        with ExitStack() as stack:
            if opened is not None:
                stack.enter_context(unreadable(opened, path))
            options = PreprocessOptions(
                inputs=(path,), output_prefix=folder / "out", tokenizer=prepared.choice, documents=rule, json_keys=keys,
                split_sentences=sentences,
                block_bytes=dice_bytes,
            )  # fmt: skip
            return list(preprocess(options).prefixes)

    dice_bytes = dice.pick((16, 100, 1 << 20))

    def check(prefixes: list[Path]) -> str | None:
        if len(prefixes) != 1 or keys != ("text",):
            return None
        tokenizer = prepared.choice.load()
        sequences, _ = read_pair(prefixes[0])
        found = "".join(tokenizer.decode([token for token in sequence if token != tokenizer.eod_id]) for sequence in sequences)
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix == ".gz" else data
        expected = _expected_text(data, name)
        if expected is None:
            return None  # read as text where the name says JSON, or the other way round, with a warning
        return None if _bare(found) == _bare(expected) else f"{_bare(found)[:60]!r}... is not {_bare(expected)[:60]!r}..."

    return Case(kind="", run=run, names=(str(folder), "--json-keys", "output_prefix"), check=check, about=f"{name}: {about}")


def _bare(text: str) -> str:
    return "".join(text.replace("<|endoftext|>", "").replace("\ufeff", "").split())


def _expected_text(data: bytes, name: str) -> str | None:
    text = data.decode("utf-8")
    try:
        if name == "corpus.txt":
            return None if text.lstrip("\ufeff \t\r\n")[:1] in ("{", "[") else text
        if text.lstrip("\ufeff \t\r\n")[:1] != ("[" if name == "corpus.json" else "{"):
            return None
        items = json.loads(text) if name == "corpus.json" else [json.loads(line) for line in text.split("\n") if line.strip()]
        return "".join(item if isinstance(item, str) else item["text"] for item in items)
    except (ValueError, RecursionError, TypeError, KeyError):
        return None


# ---- vocabularies and prompts ----


def _merge_lines(dice: Dice, content: bytes) -> tuple[bytes, str, str]:
    lines = content.split(b"\n")
    kind = dice.pick(("lines exchanged", "a line twice", "a line removed", "an odd line"))
    one, other = dice.below(len(lines)), dice.below(len(lines))
    if kind == "lines exchanged":
        lines[one], lines[other] = lines[other], lines[one]
    elif kind == "a line twice":
        lines.insert(one, lines[other])
    elif kind == "a line removed":
        del lines[one]
    else:
        lines[one] = dice.pick(
            (b"h", b"h e l", b" ", b"\0", b"\xff\xfe", b"zz zz", "\u0120\u0120 t".encode(), b"#version", b"h  e", b"\t", b"x" * 5000)
        )
    return b"\n".join(lines), kind, ""


def _make_vocabulary(dice: Dice, prepared: Prepared, folder: Path) -> Case:
    vocab, merges = _take(prepared, folder, "vocab.json", "merges.txt")
    texts = [*TEXTS, "hello the hell \x00\x7f \ud7ff"]

    def run() -> GPT2BPETokenizer:
        return GPT2BPETokenizer.from_files(vocab, merges, backend="tokenizers")

    def check(tokenizer: GPT2BPETokenizer) -> str | None:
        for text in texts:
            ids = tokenizer.encode(text).tolist()
            if tokenizer.decode(ids) != text or any(not 0 <= token < tokenizer.vocab_size for token in ids):
                return f"{text!r} became {tokenizer.decode(ids)!r}"
        table = json.loads(vocab.read_text(encoding="utf-8-sig"))
        return None if len(table) == tokenizer.vocab_size and table["<|endoftext|>"] == tokenizer.eod_id else "another size, or end of text"

    target = dice.pick((vocab, merges))
    about, run_it = _spoil(dice, target, run, structured=spoil_json if target is vocab else _merge_lines)
    return Case(kind="", run=run_it, names=(str(vocab), str(merges)), check=check, about=about)


def _make_prompts(dice: Dice, prepared: Prepared, folder: Path) -> Case:
    (path,) = _take(prepared, folder, dice.pick(("prompts.txt", "prompts.jsonl", "prompts.jsonl")))

    def check(found: list[tuple[str, str]]) -> str | None:
        lines = [line.removesuffix("\r") for line in path.read_bytes().decode("utf-8-sig").split("\n") if line.strip()]
        if path.suffix == ".jsonl":
            items = [json.loads(line) for line in lines]
            lines = [item["prompt"] if item.get("prompt") is not None else item["text"] for item in items]
        return None if [text for _, text in found] == lines else f"{len(found)} prompts of {len(lines)}"

    def items(dice: Dice, content: bytes) -> tuple[bytes, str, str]:
        item, kind, key = spoil_tree(dice, {"prompt": "x", "text": "y"})
        return content + to_json(item).encode("utf-8", "surrogatepass") + b"\n", kind, key

    about, run = _spoil(dice, path, lambda: read_prompts(path), structured=items if path.suffix == ".jsonl" else None)
    return Case(kind="", run=run, names=(str(path),), check=check, about=about)


MAKERS: dict[str, Callable[[Dice, Prepared, Path], Case]] = {
    "pair": _make_pair,
    "metadata": _make_metadata,
    "MindRecord": _make_mindrecord,
    "MindRecord index": _make_index,
    "corpus": _make_corpus,
    "vocabulary": _make_vocabulary,
    "prompts": _make_prompts,
}
