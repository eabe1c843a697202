"""Folders as people have them: prompts' ids, ends, begin and filling are those of transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.dataset.indexed import IndexedDataset
from common.dataset.metadata import read_metadata
from common.dataset.options import PreprocessOptions
from common.dataset.preprocess import preprocess
from common.errors import TokenizerError
from common.systems.hugging_face.tokenizer import files_of
from common.tokenizer import Tokenizer, load_tokenizer
from common.tokenizer.text_tokenizer import encode_prompt, encode_words
from common.tokenizer.training import TRAINERS

transformers = pytest.importorskip("transformers")
TEXT = "the king said hello there, hi there and the queen was here 1984 她说：你好 "
MARKS = ["<|pad|>", "<|im_end|>", "<|user|>", "<|bot|>"]
PROMPTS = [
    "hi there", " hi", "<|user|> hi<|bot|>", "<|user|>  hi <|bot|>there<|im_end|>\n",
    "<|endoftext|>the <|user|>", "the king</s>", "a<|bot|><|bot|> 她说：你好",
]  # fmt: skip
Files = dict[str, Any]
BASE = {"config.json": {"model_type": "gpt2", "vocab_size": 400}}
NAMES = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
MAP = NAMES | {"additional_special_tokens": MARKS[2:]}
CLASS = {"tokenizer_class": "GPT2Tokenizer"}
SIZE = 330


def decoder(**flags: bool) -> dict[str, Any]:
    """Entry added_tokens_decoder of a tokenizer_config.json, as transformers 4 writes it."""
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False) | flags
    return {str(SIZE + number): {"content": text, "special": True} | flags for number, text in enumerate(MARKS)}


def settings(**keys: Any) -> Files:
    return {"tokenizer_config.json": CLASS | keys}


def config(**keys: Any) -> Files:
    return {"config.json": BASE["config.json"] | keys}


BERT = settings(tokenizer_class="BertTokenizer") | {"kind": "BertWordPieceLowerCase"}
ADDED = {text: SIZE + number for number, text in enumerate(MARKS)}
FOLDERS: dict[str, Files] = {
    "the plain pair": {},
    "the names of Megatron-LM": {"vocab.json": "gpt2-vocab.json", "merges.txt": "gpt2-merges.txt"},
    "saved by transformers 5": {"save": True},
    "saved by transformers 5, with marks": {"added_tokens.json": ADDED, "special_tokens_map.json": MAP, "save": True},
    "transformers 4: pair and tokenizer.json": settings(**NAMES) | {
        "added_tokens.json": ADDED, "save": "beside", "special_tokens_map.json": MAP},
    "one mark begins as another": {"added_tokens.json": ADDED | {"<|user": SIZE + 4}, "special_tokens_map.json": MAP},
    "added_tokens.json, tokenizer_config.json": settings(**NAMES) | {"added_tokens.json": ADDED},
    "special_tokens_map.json": {"special_tokens_map.json": MAP},
    "added_tokens_decoder": settings(**NAMES, added_tokens_decoder=decoder()),
    "marks that take white space": settings(added_tokens_decoder=decoder(lstrip=True, rstrip=True)),
    "marks that stand alone": settings(added_tokens_decoder=decoder(single_word=True)),
    "add_prefix_space": settings(add_prefix_space=True) | {"added_tokens.json": ADDED},
    "add_bos_token": settings(add_bos_token=True),
    "add_bos_token, saved by transformers 5": settings(add_bos_token=True) | {"save": True},
    "ends of generation_config.json": config(eos_token_id=5) | {
        "generation_config.json": {"eos_token_id": [3, 198]}},
    "ends and filling of config.json": config(eos_token_id=[7, 8], pad_token_id=9, bos_token_id=4),
    "</s>": settings(eos_token="</s>", bos_token="<s>", unk_token="<unk>") | {"end": "</s>"},
    "no row for a mark": config(vocab_size=SIZE) | {"special_tokens_map.json": {"pad_token": "<|pad|>"}},
    "vocab.txt of BERT": BERT,
    "vocab.txt of BERT, with marks": BERT | {"special_tokens_map.json": {"additional_special_tokens": MARKS[2:]}},
    "tokenizer.json of BERT": settings(tokenizer_class="BertTokenizer", do_lower_case=False) | {
        "kind": "BertWordPieceCase", "save": True},
    "SentencePiece": {"kind": "SentencePieceTokenizer"},
}  # fmt: skip
"""Changes to the files of a trained vocabulary. save: what transformers writes is the folder, or lies beside it."""


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    made: dict[tuple[str, str], Path] = {}

    def make(kind: str, end: str) -> Path:
        if (kind, end) not in made:
            made[kind, end] = folder = tmp_path_factory.mktemp("vocabulary")
            size = 290 if kind == "SentencePieceTokenizer" else SIZE
            for name, content in TRAINERS[kind](lambda: [TEXT * 5], size).items():  # bert-base-chinese has U+2028
                (folder / name).write_bytes(content + "\u2028\n".encode() * (name == "vocab.txt"))
            if kind == "GPT2BPETokenizer":
                pad(folder / "vocab.json", end)
        return made[kind, end]

    return make


def pad(file: Path, end: str) -> None:
    """Fill a vocabulary up to SIZE ids, as tokens that no merge makes, and rename its end."""
    ids = json.loads(file.read_text())
    ids = {token: number for number, token in enumerate(t for t in ids if t != "<|endoftext|>")}
    own = [f"<unused{number}>" for number in range(SIZE - len(ids) - 3)]
    tokens = [*ids, *own, "<s>", "<unk>", end]
    file.write_text(json.dumps({token: number for number, token in enumerate(tokens)}))


def write(folder: Path, files: Mapping[str, Any]) -> None:
    for name, content in files.items():
        if isinstance(content, str):
            (folder / name).rename(folder / content)
        else:
            (folder / name).write_text(json.dumps(content))


@pytest.fixture
def folder(name: str, vocabularies: Callable[[str, str], Path], tmp_path: Path) -> Path:
    files = BASE | FOLDERS[name]
    kind, end = files.pop("kind", "GPT2BPETokenizer"), files.pop("end", "<|endoftext|>")
    save = files.pop("save", False)
    folder = tmp_path / "folder"
    shutil.copytree(vocabularies(kind, end), folder)
    write(folder, files)
    if save:
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        if save == "beside":
            theirs._tokenizer.save(str(folder / "tokenizer.json"))
            return folder
        shutil.rmtree(folder)
        theirs.save_pretrained(folder)
        write(folder, {"config.json": files["config.json"]})
    return folder


@pytest.mark.parametrize(
    ("name", "has_marks"),
    [
        ("the plain pair", True),  # <s> and <unused0> were added to vocab.json by hand
        ("saved by transformers 5", False),
        ("</s>", True),
        ("special_tokens_map.json", True),
        ("vocab.txt of BERT", True),
        ("tokenizer.json of BERT", True),
        ("SentencePiece", False),
    ],
)
def test_documents_and_prompts_have_one_encoder(name, has_marks, folder, tmp_path, caplog) -> None:
    tokenizer = load_tokenizer(None, folder)
    assert tokenizer.has_marks == has_marks
    end = next(text for text, each in tokenizer.special.items() if each == tokenizer.eod_id)
    texts = [f"hi {end} there", "<|user|> hi<|bot|>", "the king\n said"]
    (tmp_path / "corpus.json").write_text(json.dumps(texts))
    options = PreprocessOptions(inputs=(tmp_path / "corpus.json",), output_prefix=tmp_path / "out", vocab_file=folder)
    for wish in ("tokens", "text", None):
        caplog.clear()
        (prefix,) = preprocess(replace(options, special_tokens=wish)).prefixes
        data, metadata = IndexedDataset(prefix), read_metadata(Path(f"{prefix}.meta.json"))
        as_tokens = wish == "tokens" or (wish is None and has_marks)
        encode = encode_words if as_tokens else encode_text
        frame = tokenizer.framing
        expected = [[*frame.prefix, *encode(tokenizer, text), *frame.suffix] for text in texts]
        assert [part.tolist() for part in np.split(data.tokens, np.cumsum(data.sizes[:])[:-1])] == expected
        assert (metadata.options.get("special_tokens") == "tokens") == as_tokens
        stays = sum(text.count(mark) for text in texts for mark in tokenizer.special)
        said = [each.getMessage() for each in caplog.records if "spell" in each.getMessage()]
        assert len(said) == (not as_tokens) and all(f" {stays} times" in each for each in said)


@pytest.mark.parametrize("name", ["ends of generation_config.json"])
def test_the_ends_of_the_model_come_before_those_beside_the_vocabulary(folder, tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 6}')
    assert load_tokenizer(None, folder, model=tmp_path / "model.safetensors").ends == (6,)
    assert load_tokenizer(None, folder, model=folder / "nowhere").ends == (3, 198)


@pytest.mark.parametrize("name", ["</s>"])
def test_a_named_end_without_a_row_leaves_that_of_the_vocabulary(name: str, folder: Path) -> None:
    """In dbmdz/german-gpt2 the id of <|endoftext|> is the one behind the last row."""
    write(folder, settings(eos_token="<|endoftext|>") | config(vocab_size=SIZE, eos_token_id=SIZE))
    write(folder, {"manifest.json": ["of another program"]})
    tokenizer = load_tokenizer(None, folder)
    assert (tokenizer.eod_id, tokenizer.ends) == (SIZE - 1, (SIZE - 1,))
    assert tokenizer.encode("the</s>", True)[-1] == SIZE - 1 and tokenizer.vocab_size == SIZE


CLOSED = {
    "type": "TemplateProcessing", "pair": [],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [327], "tokens": ["<s>"]}},
    "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<s>", "type_id": 0}}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda tree: tree["model"].update(merges=[" ".join(m) for m in tree["model"]["merges"]]),
         "GPT2BPETokenizer"),
        (lambda tree: tree.update(normalizer={"type": "NFC"}), "HuggingFaceTokenizer"),
        (lambda tree: tree.update(post_processor=CLOSED), "HuggingFaceTokenizer"),
        (lambda tree: tree["pre_tokenizer"].update(use_regex=False), "HuggingFaceTokenizer"),
        (lambda tree: tree["model"].update(ignore_merges=True), "HuggingFaceTokenizer"),
        (lambda tree: tree["model"]["vocab"].pop("<unused3>"), "HuggingFaceTokenizer"),
        (lambda tree: tree["added_tokens"].append({"content": "<|user|>", "id": 1 << 40}), None),
        (lambda tree: tree["added_tokens"].append({"content": "\ud800", "id": 1}), None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["saved by transformers 5"])
def test_a_tokenizer_json_that_is_not_gpt2s(name, folder, change, kind) -> None:
    before, file = load_tokenizer(None, folder), folder / "tokenizer.json"
    tree = json.loads(file.read_text())
    change(tree)
    file.write_text(json.dumps(tree))
    if kind is None:
        with pytest.raises(TokenizerError, match=r"id 1099511627776; expected|half of a pair"):
            load_tokenizer(None, folder)
        return
    after = load_tokenizer(None, folder)
    assert after.kind == kind and (after.sha256 == before.sha256) == (kind == before.kind)
    assert after.encode("hi there").tolist() == before.encode("hi there").tolist()


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of lines of ordinary text, with the mark for their ends."""
    mark = tokenizer.framing.newline
    if mark is None:
        return tokenizer.encode(text).tolist()
    lines = [[*tokenizer.encode(line).tolist(), mark] for line in text.split("\n")]
    return [token for line in lines for token in line][:-1]


@pytest.mark.parametrize("name", FOLDERS)
def test_prompts_and_ends_are_those_of_transformers(name: str, folder: Path) -> None:
    ours = load_tokenizer(None, folder)
    if ours.kind == "SentencePieceTokenizer":
        for file, content in files_of(ours, 64).items():
            (folder / file).write_bytes(content)
    if "Megatron" in name:
        write(folder, {"gpt2-vocab.json": "vocab.json", "gpt2-merges.txt": "merges.txt"})
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoConfig.from_pretrained(folder)
    is_bert = ours.framing.newline is not None
    for text in PROMPTS:
        # GPT2-Chinese has [SEP] between lines, and no [CLS] and [SEP] around a prompt
        shown = text.replace("\n", "[SEP]") if is_bert else text
        expected = theirs(shown, add_special_tokens=not is_bert)["input_ids"]
        assert encode_prompt(ours, text).tolist() == expected, text
    rows = model.vocab_size
    assert ours.vocab_size == min(rows, len(theirs))
    assert ours.bos_id == theirs.bos_token_id
    expected = model.pad_token_id if theirs.pad_token_id is None else theirs.pad_token_id
    assert ours.pad_id == (expected if expected is None or expected < rows else None)
    generation = transformers.GenerationConfig
    has_own = (folder / "generation_config.json").exists()
    ends = (generation.from_pretrained(folder) if has_own else generation.from_model_config(model)).eos_token_id
    ends = np.atleast_1d(ends)
    assert ours.ends == (tuple(ends[ends < rows]) or (ours.eod_id,))
    if theirs.eos_token_id is not None:
        assert ours.eod_id == theirs.eos_token_id
