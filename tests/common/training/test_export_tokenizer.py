"""The tokenizer that an export takes along is the one that the run had."""

import json
from pathlib import Path

from common.config.load import build_config
from common.resolve.derive import resolve_config
from common.tokenizer import load_tokenizer
from common.training.export import put_tokenizer_files


def test_case_added_tokens_and_ends_stay(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (source / "vocab.txt").write_text("\n".join([*marks, "Hello", "hello"]))
    (source / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    (source / "added_tokens.json").write_text('{"<|user|>": 7}')
    (source / "special_tokens_map.json").write_text('{"bos_token": "<|never|>"}')
    (source / "config.json").write_text('{"eos_token_id": [3, 7], "vocab_size": 8}')
    section = {
        "num_layers": 1, "hidden_size": 8, "num_heads": 1, "seq_length": 8, "vocab_size": 8,
    }  # fmt: skip
    tree = {"output_dir": str(tmp_path), "model": section, "data": {"tokenizer": str(source)}}
    more = {"optimizer": {"learning_rate": 1.0}, "train": {"micro_batch_size": 1}}
    assert put_tokenizer_files(target, resolve_config(build_config(tree | more)))
    (target / "manifest.json").write_text(json.dumps({"config": {"model": section}}))
    before, after = load_tokenizer(None, source), load_tokenizer(None, target)
    assert after.encode("Hello hello").tolist() == before.encode("Hello hello").tolist() == [5, 6]
    assert after.encode("hello<|user|>", True).tolist() == [6, 7]
    assert (after.ends, after.sha256, after.vocab_size) == ((3, 7), before.sha256, 8)
