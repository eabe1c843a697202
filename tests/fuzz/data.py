"""Data files: .idx/.bin pairs, .meta.json, MindRecord with its index, corpora, vocabularies,
prompts.
"""

from __future__ import annotations

import gzip
import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.dataset import GPTDataset, IndexedDataset, IndexedWriter
from common.dataset.blocks import DocumentRule
from common.dataset.fleetx import FleetXDataset
from common.dataset.mindrecord import MindRecordSamples
from common.dataset.preprocess import PreprocessOptions, preprocess
from common.dataset.workers import TokenizerChoice
from common.generation.prompts import Given, read_prompts
from common.tokenizer.gpt2_bpe import GPT2BPETokenizer
from tests.fuzz.data_files import (
    TEXTS,
    WIDTH,
    bare,
    expected_text,
    read_pair,
    read_rows,
    write_mindrecord,
    write_vocabulary,
)
from tests.fuzz.dice import Dice
from tests.fuzz.engine import Case, Differs
from tests.fuzz.mutations import (
    BYTES,
    FILES,
    UNREADABLE,
    hostile_value,
    spoil_file,
    spoil_json,
    spoil_one,
    spoil_tree,
    to_json,
    unreadable,
)

CLASSES = {
    "FleetX": "_ids.npy or _idx.npz: bytes, special files",
    "pair": ".idx or .bin: bytes, special files, another pair's half, words of the index at the"
    " edges of their types",
    "metadata": ".meta.json: bytes, special files, faults of its tree",
    "MindRecord": "pages and header by bytes, the header by its tree, special files",
    "MindRecord index": ".db: bytes, other values, rows missing or twice, a view in place of a"
    " table, a view without end",
    "corpus": "text, JSON Lines, an array, each with gzip or not: bytes, special files, hostile"
    " items and keys",
    "vocabulary": "vocab.json and merges.txt: bytes, special files, faults of the tree, lines"
    " exchanged",
    "prompts": "text and .jsonl: bytes, special files, hostile items",
}


@dataclass
class Prepared:
    folder: Path
    rows: np.ndarray
    choice: TokenizerChoice


# ---- whole files, each held against its independent reader ----


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
    lens = np.array([30, 1, 55, 20, 17], dtype=np.int32)
    np.save(
        folder / "fleetx_ids.npy",
        generator.integers(0, 50257, size=int(lens.sum())).astype(np.uint16),
    )
    np.savez(folder / "fleetx_idx.npz", lens=lens, docs=np.array([0, 2, 3, 4, 5], dtype=np.int64))
    vocab_file, merge_file = write_vocabulary(folder)
    choice = TokenizerChoice(
        kind="GPT2BPETokenizer", vocab_file=vocab_file, merge_file=merge_file, backend="tokenizers"
    )
    (folder / "corpus.txt").write_text("\n\n".join(TEXTS), encoding="utf-8")
    (folder / "corpus.jsonl").write_text(
        "".join(json.dumps({"text": text, "id": n}) + "\n" for n, text in enumerate(TEXTS))
    )
    (folder / "corpus.json").write_text(json.dumps([{"text": text} for text in TEXTS], indent=1))
    for name in ("corpus.txt", "corpus.jsonl", "corpus.json"):
        (folder / f"{name}.gz").write_bytes(gzip.compress((folder / name).read_bytes(), mtime=0))
    result = preprocess(
        PreprocessOptions(
            inputs=(folder / "corpus.txt",), output_prefix=folder / "made", tokenizer=choice
        )
    )
    result.prefixes[0].with_suffix(".meta.json").rename(folder / "made.meta.json")
    for extension in (".bin", ".idx"):
        result.prefixes[0].with_suffix(extension).rename(folder / f"made{extension}")
    (folder / "prompts.txt").write_text("Once upon a time\n\nhello\r\nthe end", encoding="utf-8")
    (folder / "prompts.jsonl").write_text(
        '{"prompt": "Once upon"}\n{"text": "hello"}\n{"ids": [464, 3290]}\n\n'
        '{"prompt": null, "text": "x"}\n'
    )
    assert (
        MindRecordSamples(
            folder / "rows.mindrecord",
            split="train",
            seq_length=WIDTH - 1,
            seed=0,
            split_weights=(1, 0, 0),
            shuffle=False,
        ).read(np.arange(20))
        == rows
    ).all()
    return Prepared(folder=folder, rows=rows, choice=choice)


def make(dice: Dice, prepared: Prepared, folder: Path) -> Case:
    kind = dice.pick(
        (
            *("pair",) * 2,
            "FleetX",
            "metadata",
            "MindRecord",
            "MindRecord index",
            *("corpus",) * 3,
            *("vocabulary",) * 2,
            "prompts",
        )
    )
    case = MAKERS[kind](dice, prepared, folder)
    case.kind = kind
    return case


def _take(prepared: Prepared, folder: Path, *names: str) -> list[Path]:
    return [Path(shutil.copy(prepared.folder / name, folder / name)) for name in names]


def _spoil(
    dice: Dice, path: Path, run: Callable[[], Any], **options: Any
) -> tuple[str, Callable[[], Any]]:
    """Spoil a file, or let it be unreadable while ``run`` runs."""
    if dice.chance(0.05):
        kind = dice.pick(list(UNREADABLE))

        def refused() -> Any:
            with unreadable(kind, path):
                return run()

        return f"{path.name}: {kind}", refused
    return f"{path.name}: {spoil_one(dice, path, **options)}", run


# ---- pairs ----


def _make_pair(dice: Dice, prepared: Prepared, folder: Path) -> Case:
    name = dice.pick(("pair", "pair", "wide"))
    index, tokens = _take(prepared, folder, f"{name}.idx", f"{name}.bin")
    prefix = folder / name

    def run() -> IndexedDataset:
        data = IndexedDataset(prefix)
        for split, shuffle in (("train", True), ("valid", False)):
            samples = GPTDataset(
                data,
                split=split,
                seq_length=4,
                seed=1,
                split_weights=(0.6, 0.4, 0),
                shuffle=shuffle,
            )
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


def _make_fleetx(dice: Dice, prepared: Prepared, folder: Path) -> Case:
    ids, index = _take(prepared, folder, "fleetx_ids.npy", "fleetx_idx.npz")
    prefix = folder / "fleetx"

    def run() -> FleetXDataset:
        data = FleetXDataset(prefix)
        samples = GPTDataset(data, split="train", seq_length=4, seed=1, split_weights=(0.6, 0.4, 0))
        if samples.read(np.arange(min(samples.samples_per_epoch, 1000))).shape[1] != 5:
            raise Differs("a window of another width")
        return data

    def check(data: FleetXDataset) -> str | None:
        with np.load(index) as arrays:
            lens = arrays["lens"]
            docs = arrays["docs"] if "docs" in arrays else np.arange(len(lens) + 1)
        ends = np.concatenate([[0], np.cumsum(lens, dtype=np.int64)])
        if (
            data.tokens.tolist() != np.load(ids).tolist()
            or data.document_offsets().tolist() != ends[docs].tolist()
        ):
            return "other tokens or documents than numpy reads"
        return None

    about, run_it = _spoil(dice, dice.pick((ids, index, index)), run)
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

    about, run = _spoil(
        dice, path, lambda: IndexedDataset(folder / "made").metadata(), structured=spoil_json
    )
    return Case(kind="", run=run, names=(str(path),), check=check, about=about)


# ---- MindRecord ----


def _open_rows(path: Path) -> np.ndarray:
    samples = MindRecordSamples(
        path, split="train", seq_length=WIDTH - 1, seed=0, split_weights=(1, 0, 0), shuffle=False
    )
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
        size = max(
            1024 * (1 + (len(text) + 8) // 1024), json.loads(data[8 : 8 + length])["header_size"]
        )
        path.write_bytes(
            (len(text).to_bytes(8, "little") + text).ljust(size, b"\0")
            + data[1024 * (1 + (length + 8) // 1024) :]
        )
        return Case(
            kind="",
            run=lambda: _open_rows(path),
            names=(str(folder), "MindRecord"),
            check=_same_rows(path),
            about=f"{about} at {key}",
        )
    about, run = _spoil(dice, path, lambda: _open_rows(path))
    return Case(
        kind="", run=run, names=(str(folder), "MindRecord"), check=_same_rows(path), about=about
    )


STATEMENTS = (
    "UPDATE INDEXES SET {column} = {value} WHERE ROW_ID = {row}", "UPDATE INDEXES SET {column} ="
        " {value}",
    "DELETE FROM INDEXES WHERE ROW_ID = {row}", "DELETE FROM INDEXES",
    "INSERT INTO INDEXES SELECT {value}, 0,0,0,0, PAGE_ID_BLOB, PAGE_OFFSET_BLOB,"
    " PAGE_OFFSET_BLOB_END FROM INDEXES WHERE ROW_ID = {row}",
    "DROP TABLE INDEXES",
    "DROP TABLE SHARD_NAME", "UPDATE SHARD_NAME SET NAME = {value}", "INSERT INTO SHARD_NAME VALUES"
        " ({value})", "DELETE FROM SHARD_NAME",
    "ALTER TABLE INDEXES RENAME COLUMN {column} TO X", "ALTER TABLE INDEXES RENAME TO I2; CREATE"
        " VIEW INDEXES AS SELECT * FROM I2",
    "DROP TABLE INDEXES; CREATE VIEW INDEXES AS WITH RECURSIVE c(x) AS (SELECT 0 UNION ALL SELECT x"
    " + 1 FROM c) SELECT x AS ROW_ID, 0 AS PAGE_ID_BLOB, 0 AS PAGE_OFFSET_BLOB, 60 AS"
    " PAGE_OFFSET_BLOB_END FROM c",
    "ALTER TABLE SHARD_NAME RENAME TO S2; CREATE VIEW SHARD_NAME AS WITH RECURSIVE c(x) AS (SELECT"
    " 0 UNION ALL SELECT x + 1 FROM c) SELECT x AS NAME FROM c",
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
        return Case(
            kind="", run=run, names=(str(folder), "MindRecord"), check=_same_rows(path), about=about
        )
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
    return Case(
        kind="",
        run=lambda: _open_rows(path),
        names=(str(folder), "MindRecord"),
        check=_same_rows(path),
        about=statement,
    )


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
    rule = dice.pick(
        (DocumentRule.FILE, DocumentRule.LINE, DocumentRule.BLANK_LINE, DocumentRule.EOT)
    )
    keys = dice.pick(
        (("text",),) * 8
        + (("id",), ("a/b",), ("",), ("..",), ("text", "text"), ("a\0b",), ("text", "id"))
    )
    if keys != ("text",):
        about += f", keys {keys}"[:60]
    sentences = dice.chance(0.2)

    def run() -> list[Path]:
        with ExitStack() as stack:
            if opened is not None:
                stack.enter_context(unreadable(opened, path))
            options = PreprocessOptions(
                inputs=(path,), output_prefix=folder / "out", tokenizer=prepared.choice,
                documents=rule, json_keys=keys,
                split_sentences=sentences,
                block_bytes=dice_bytes, special_tokens=marks,
            )  # fmt: skip
            return list(preprocess(options).prefixes)

    dice_bytes = dice.pick((16, 100, 1 << 20))
    marks = dice.pick((None, "tokens", "text"))

    def check(prefixes: list[Path]) -> str | None:
        if len(prefixes) != 1 or keys != ("text",):
            return None
        tokenizer = prepared.choice.load()
        sequences, _ = read_pair(prefixes[0])
        found = "".join(
            tokenizer.decode([token for token in sequence if token != tokenizer.eod_id])
            for sequence in sequences
        )
        data = path.read_bytes()
        data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        expected = expected_text(data, name)
        if expected is None:
            # read as text where the name says JSON, or the other way round, with a warning
            return None
        return (
            None
            if bare(found) == bare(expected)
            else f"{bare(found)[:60]!r}... is not {bare(expected)[:60]!r}..."
        )

    return Case(
        kind="",
        run=run,
        names=(str(folder), "--json-keys", "output_prefix"),
        check=check,
        about=f"{name}: {about}",
    )


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
            (
                b"h",
                b"h e l",
                b" ",
                b"\0",
                b"\xff\xfe",
                b"zz zz",
                "\u0120\u0120 t".encode(),
                b"#version",
                b"h  e",
                b"\t",
                b"x" * 5000,
            )
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
            if tokenizer.decode(ids) != text or any(
                not 0 <= token < tokenizer.vocab_size for token in ids
            ):
                return f"{text!r} became {tokenizer.decode(ids)!r}"
        table = json.loads(vocab.read_text(encoding="utf-8-sig"))
        return (
            None
            if len(table) == tokenizer.vocab_size and table["<|endoftext|>"] == tokenizer.eod_id
            else "another size, or end of text"
        )

    target = dice.pick((vocab, merges))
    about, run_it = _spoil(
        dice, target, run, structured=spoil_json if target is vocab else _merge_lines
    )
    return Case(kind="", run=run_it, names=(str(vocab), str(merges)), check=check, about=about)


def _make_prompts(dice: Dice, prepared: Prepared, folder: Path) -> Case:
    (path,) = _take(prepared, folder, dice.pick(("prompts.txt", "prompts.jsonl", "prompts.jsonl")))

    def check(found: list[tuple[str, Given]]) -> str | None:
        lines: list[Any] = [
            line.removesuffix("\r")
            for line in path.read_bytes().decode("utf-8-sig").split("\n")
            if line.strip()
        ]
        if path.suffix == ".jsonl":
            items = [json.loads(line) for line in lines]
            names = ("prompt", "text", "ids")
            lines = [
                next(item[name] for name in names if item.get(name) is not None) for item in items
            ]
        return (
            None
            if [text for _, text in found] == lines
            else f"{len(found)} prompts of {len(lines)}"
        )

    def items(dice: Dice, content: bytes) -> tuple[bytes, str, str]:
        item, kind, key = spoil_tree(dice, {"prompt": "x", "text": "y", "ids": [0, 7]})
        return content + to_json(item).encode("utf-8", "surrogatepass") + b"\n", kind, key

    about, run = _spoil(
        dice,
        path,
        lambda: read_prompts(path),
        structured=items if path.suffix == ".jsonl" else None,
    )
    return Case(kind="", run=run, names=(str(path),), check=check, about=about)


MAKERS: dict[str, Callable[[Dice, Prepared, Path], Case]] = {
    "FleetX": _make_fleetx,
    "pair": _make_pair,
    "metadata": _make_metadata,
    "MindRecord": _make_mindrecord,
    "MindRecord index": _make_index,
    "corpus": _make_corpus,
    "vocabulary": _make_vocabulary,
    "prompts": _make_prompts,
}
