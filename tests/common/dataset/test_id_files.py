"""GPT2-Chinese's data: its loop over transformers' BertTokenizer, written out here, is the
reference for the pieces, the frame, line ends and short texts.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from common.dataset.corpus import CorpusFormat
from common.dataset.encodings import checked_encoding
from common.dataset.indexed import IndexedDataset
from common.dataset.preprocess import PreprocessOptions, preprocess
from common.dataset.workers import TokenizerChoice
from common.errors import ConfigError, DataError
from tests.common.dataset.conftest import files_of

TEXTS = [
    "她说：你好，world！\n第二行 of 2019年。",
    "短",
    "",
    "一二三四五六七八九十\n\n甲乙丙丁",
    "unaffable 龘 [SEP]x 未收录",
    "  ",
    "天地玄黄宇宙洪荒日月盈昃辰宿列张",
    "寒来暑往秋收冬藏闰余成岁律吕调阳",
]
TOKENS = [
    "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "un", "##aff", "##able", "world", "of", "2019",
    *dict.fromkeys("她说：你好，！第二行年。短一三四五六七八九十甲乙丙丁天地玄黄宇宙洪荒日月盈昃[]x"),
]  # fmt: skip


@pytest.fixture
def vocabulary(tmp_path: Path) -> TokenizerChoice:
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(TOKENS) + "\n", encoding="utf-8")
    return TokenizerChoice(kind=None, vocab_file=path, merge_file=None, backend="auto")


def build_files(texts: list[str], vocab_file: Path, pieces: int, least: int) -> list[str]:
    """Text that GPT2-Chinese writes into its pieces."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.BertTokenizer(str(vocab_file))
    # a spelled mark is text to us, and a mark to transformers: none but line ends are in the test
    lines = [text.replace("[SEP]", "[ SEP ]").replace("\n", " [SEP] ") for text in texts]
    share = len(lines) // pieces
    written = []
    for number in range(pieces):
        part = lines[share * number : share * (number + 1) if number < pieces - 1 else None]
        out = ""
        for line in part:
            if len(line) > least:
                tokens = ["[MASK]", *tokenizer.tokenize(line), "[CLS]"]
                out += "".join(f"{each} " for each in tokenizer.convert_tokens_to_ids(tokens))
        written.append(out)
    return written


def run(target: Path, choice: TokenizerChoice, source: Path, **options: object) -> Path:
    settings = PreprocessOptions(
        inputs=(source,), output_prefix=target / "tokenized_train", tokenizer=choice, **options
    )
    return preprocess(settings).prefixes[0]


def write(path: Path, texts: list[str]) -> Path:
    path.write_text(json.dumps(texts), encoding="utf-8")
    return path


@pytest.mark.parametrize(("pieces", "least"), [(1, 0), (3, 10), (8, 0), (20, 12)])
def test_pieces_equal_those_of_gpt2_chinese(tmp_path, vocabulary, pieces, least) -> None:
    texts = [text.replace("[SEP]", "[ SEP ]") for text in TEXTS]
    source = write(tmp_path / "train.json", texts)
    texts = ["" if text.isspace() else text for text in texts]
    expected = build_files(texts, vocabulary.vocab_file, pieces, least)
    options = {"format": "pieces", "pieces": pieces, "min_length": least}
    for size in (1, 1 << 20):
        run(tmp_path, vocabulary, source, block_bytes=size, **options)
        names = [f"tokenized_train_{n}.txt" for n in range(pieces)]
        assert [(tmp_path / name).read_text() for name in names] == expected
    assert not list(tmp_path.glob("*spool*"))


def test_pieces_are_read_as_the_documents_that_they_were(tmp_path, vocabulary) -> None:
    source, folder = write(tmp_path / "train.json", TEXTS * 4), tmp_path / "pieces"
    run(folder, vocabulary, source, format="pieces", pieces=12)
    pair = IndexedDataset(run(tmp_path / "a", vocabulary, source))
    again = run(tmp_path / "b", vocabulary, folder, input_format=CorpusFormat.IDS, block_bytes=64)
    back = IndexedDataset(again)
    assert len(pair) == len(back) == 6 * 4
    assert all(np.array_equal(pair[n], back[n]) for n in range(len(pair)))
    assert back[0][0] == TOKENS.index("[MASK]") and back[0][-1] == TOKENS.index("[CLS]")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("4 99999 2 ", "id 99999 .number 2 from byte 0. is beyond the"),
        ("4 -1 2 ", "byte 2: found '-1', expected ids"),
        ("4 2147483648 2 ", "id 2147483648 .number 2 from byte 0. is beyond the"),
        ("4 " + "9" * 5000, "byte 2: found '99999999999999999999', expected ids"),
        ("4 她 2 ", "byte 2: found '她', expected ids"),
        ("", "all 0 documents"),
    ],
)
def test_an_invalid_id_is_refused(tmp_path, vocabulary, content, message) -> None:
    source = tmp_path / "tokenized_train_0.txt"
    source.write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        run(tmp_path, vocabulary, source, input_format=CorpusFormat.IDS)


def test_a_missing_piece_one_too_many_and_short_documents_are_refused(tmp_path, vocabulary) -> None:
    source = write(tmp_path / "train.json", TEXTS)
    run(tmp_path, vocabulary, source, format="pieces", pieces=3)
    with pytest.raises(ConfigError, match=r"tokenized_train_2.txt: is of an earlier run"):
        run(tmp_path, vocabulary, source, format="pieces", pieces=2)
    (tmp_path / "tokenized_train_1.txt").unlink()
    with pytest.raises(DataError, match=r"tokenized_train_1.txt is not there, 2 others are"):
        run(tmp_path / "out", vocabulary, tmp_path, input_format=CorpusFormat.IDS)
    with pytest.raises(DataError, match="none of the 8 documents has more than 128 characters"):
        run(tmp_path, vocabulary, source, min_length=128)


@pytest.mark.parametrize("name", ["train.json", "train.txt"])
def test_gbk_is_named_and_read_when_said(tmp_path, vocabulary, name) -> None:
    text = "她说：你好。" * 30
    content = json.dumps([text], ensure_ascii=False) if name.endswith("json") else text
    source, utf8 = tmp_path / name, tmp_path / f"utf8.{name}"
    source.write_text(content, encoding="gbk")
    utf8.write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match="the file looks like GBK: add --encoding gbk"):
        run(tmp_path / "a", vocabulary, source)
    ours = run(tmp_path / "b", vocabulary, source, encoding=checked_encoding("gbk"))
    assert files_of(ours) == files_of(run(tmp_path / "c", vocabulary, utf8))
    with pytest.raises(DataError, match="is not big5"):
        run(tmp_path / "d", vocabulary, utf8, encoding=checked_encoding("big5"))
    with pytest.raises(ConfigError, match="'gkb': not an encoding"):
        checked_encoding("gkb")
