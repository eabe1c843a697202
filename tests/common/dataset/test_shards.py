"""Parts of a corpus and their merge: the bytes that one process writes."""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.dataset import IndexedDataset, IndexedWriter
from common.dataset.merge import merge_datasets
from common.dataset.metadata import Shard, parse_shard
from common.dataset.preprocess import PreprocessOptions, preprocess
from common.dataset.workers import TokenizerChoice
from common.errors import ConfigError, DataError, StorageError
from tests.common.dataset.conftest import files_of


@pytest.fixture
def options(tmp_path: Path, byte_tokenizer: TokenizerChoice) -> PreprocessOptions:
    """Text, JSON Lines, an array and a gzipped text, of about 200 kB."""
    words = random.Random(0)
    texts = ["".join(words.choices("abcdefgh ", k=words.randrange(1, 900))) for _ in range(600)]
    (tmp_path / "a.txt").write_text("\ufeff" + "\n\n".join(texts[:150]))
    (tmp_path / "b.jsonl").write_text(
        "\n".join(json.dumps({"text": text * (n % 5 > 0)}) for n, text in enumerate(texts[150:300]))
    )
    (tmp_path / "c.json").write_text(json.dumps(texts[300:450]))
    with gzip.open(tmp_path / "d.txt.gz", "wt", encoding="utf-8") as file:
        file.write("\r\n\r\n".join(texts[450:]))
    return PreprocessOptions(
        inputs=tuple(sorted(tmp_path.glob("?.*"))), output_prefix=tmp_path / "whole", tokenizer=byte_tokenizer
    )


def shards(options: PreprocessOptions, count: int) -> list[Path]:
    """Write all parts, the last one first; return their prefixes in that order."""
    return [
        preprocess(replace(options, shard=Shard(number=number, count=count))).prefixes[0]
        for number in range(count, 0, -1)
    ]


def files(prefix: Path) -> list[bytes]:
    return files_of(prefix, ".bin", ".idx", ".meta.json")


@pytest.mark.parametrize("count", [1, 8, 200])
def test_merged_shards_have_the_bytes_of_one_process(tmp_path, options, count) -> None:
    whole = preprocess(options).prefixes[0]
    parts = shards(options, count)
    merge_datasets(parts, tmp_path / "merged")
    assert files(tmp_path / "merged") == files(whole)
    if count == 8:  # parts are about equal, and none is the whole
        sizes = [Path(f"{part}.bin").stat().st_size for part in parts]
        assert max(sizes) < 0.4 * sum(sizes)


def test_a_finished_shard_is_kept_and_one_of_other_inputs_is_not(tmp_path, options) -> None:
    second = replace(options, shard=Shard(number=2, count=3))
    first, again = preprocess(second), preprocess(second)
    assert not first.kept and again.kept
    assert again.progress.tokens == first.progress.tokens > 0
    with (tmp_path / "a.txt").open("a") as file:
        file.write("\n\nmore")
    assert not preprocess(second).kept


def test_a_shard_of_empty_documents_keeps_them(tmp_path: Path, options: PreprocessOptions) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"text": "{text}"}}\n' for text in ["one"] + 9000 * [""] + ["two"]))
    options = replace(options, inputs=(path,))
    whole = preprocess(options).prefixes[0]
    merge_datasets(shards(options, 8), tmp_path / "merged")
    assert files(tmp_path / "merged") == files(whole)
    assert IndexedDataset(whole).document_count == 9002


def test_shards_that_do_not_make_a_whole_are_refused(tmp_path, options) -> None:
    def refused(message: str, *parts: Path, output: str = "merged") -> None:
        with pytest.raises((ConfigError, DataError, StorageError), match=message):
            merge_datasets(parts, tmp_path / output)

    parts = shards(options, 3)
    refused("shards 2 of 3 are missing; preprocess them with --shard", parts[0], parts[2])
    refused("named twice", *parts, parts[0])
    refused("choose another --output-prefix", *parts, output=parts[0].name)
    (tmp_path / "empty").mkdir()
    refused(r"empty: holds no \.idx", tmp_path / "empty")
    refused("could not be written", *parts, output="a.txt/merged")
    other = preprocess(replace(options, shard=Shard(number=1, count=2))).prefixes[0]
    refused("of another division", *parts, other)
    metadata = Path(f"{parts[0]}.meta.json")
    there = metadata.read_text()
    metadata.write_text(there.replace('"3/3"', '"x/3"'))
    refused("is shard x/3, but others are of another division", *parts)
    metadata.write_text(there)
    preprocess(replace(options, append_eod=False, shard=Shard(number=2, count=3)))
    refused(r"eod_id is (None|256), but (None|256)", *parts)


def test_other_pairs_follow_one_another(tmp_path: Path) -> None:
    """Sentences and documents included, with the bytes of Megatron's own builder."""
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="megatron-core is not installed")
    random_numbers = np.random.default_rng(0)
    folder = tmp_path / "pairs"
    for name, documents in (("a", [2, 0, 1]), ("b", [1]), ("c", [3, 1])):
        sizes = random_numbers.integers(0, 9, sum(documents))
        with IndexedWriter(folder / name, np.uint16) as writer:
            writer.append(random_numbers.integers(0, 60000, sizes.sum()), sizes, np.array(documents))
    merge_datasets([folder], tmp_path / "merged")
    builder: Any = indexed.IndexedDatasetBuilder(str(tmp_path / "megatron.bin"), dtype=np.uint16)
    for name in "abc":
        builder.add_index(str(folder / name))
    builder.finalize(str(tmp_path / "megatron.idx"))
    assert files_of(tmp_path / "merged") == files_of(tmp_path / "megatron")
    assert IndexedDataset(tmp_path / "merged").document_count == 6
    with IndexedWriter(folder / "d", np.int32) as writer:
        writer.append(np.arange(3), np.array([3]))
    with pytest.raises(DataError, match="has tokens of int32, but uint16"):
        merge_datasets([folder], tmp_path / "merged")


def test_shards_are_named_by_number() -> None:
    assert parse_shard("2/8") == Shard(number=2, count=8)
    for text in ("0/3", "4/3", "half", "1/100000"):
        with pytest.raises(ConfigError, match=rf"--shard {text}: expected I/N, .*a number from 1 to N"):
            parse_shard(text)
