"""Prompts from lists and files: what is read, how many tokens may follow, and one message for bad input."""

from pathlib import Path
from typing import Any

import pytest

from common.config.load import build_config
from common.errors import ConfigError, DataError, UserError
from common.generation.prompts import encode_prompts, sliding_window
from common.parallel.run import Run
from common.resolve.derive import resolve_mode
from tests.common.generation.test_output import Bytes
from tests.tiny import tiny_config, tiny_run


def config(positions: int = 16, **predict: Any) -> Run:
    return tiny_config(model__seq_length=positions, model__vocab_size=257, predict=predict)


def read(**words: Any) -> list[Any]:
    return encode_prompts(config(**words), Bytes())  # type: ignore[arg-type]


def test_a_text_file_and_a_json_file(tmp_path: Path) -> None:
    """Fields beside the prompt may hold what Python writes."""
    (tmp_path / "plain.txt").write_bytes("\ufeffone\r\n\n two \n".encode())
    rows = '{"prompt": "a\\nb", "text": "x"}\n\n{"prompt": null, "text": "é", "score": NaN}'
    (tmp_path / "some.NDJSON").write_text(rows)
    plain = read(prompt="zero", prompt_file=str(tmp_path / "plain.txt"))
    assert [each.text for each in plain] == ["zero", "one", " two "]
    some = [(each.text, each.ids) for each in read(prompt_file=str(tmp_path / "some.NDJSON"))]
    assert some == [("a\nb", [97, 10, 98]), ("é", [195, 169])]


def test_prompts_as_ids(tmp_path: Path) -> None:
    """In the configuration, where a plain list of ids is one prompt, and in files."""
    assert [(each.text, each.ids, each.is_given_as_ids) for each in read(prompt=[97, 98])] == [("ab", [97, 98], True)]
    assert [(each.ids, each.is_given_as_ids) for each in read(prompt=[[97], "12", [98, 99]])] == [
        ([97], True), ([49, 50], False), ([98, 99], True),
    ]  # fmt: skip
    (tmp_path / "a.jsonl").write_text('{"prompt": [97, 98]}\n{"ids": [99]}\n{"text": "d"}\n')
    assert [each.text for each in read(prompt_file=str(tmp_path / "a.jsonl"))] == ["ab", "c", "d"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"positions": 16}, 13),
        ({"positions": 300}, 100),
        ({"positions": 300, "min_new_tokens": 150}, 150),
        ({"max_new_tokens": 13}, 13),
        ({"positions": 4}, 1),
    ],
)
def test_number_of_tokens_that_may_follow(words: dict[str, Any], expected: int) -> None:
    assert read(prompt="abc", **words)[0].new_tokens == expected


def test_the_window_slides_for_more_tokens_than_positions() -> None:
    """Also where asked to, and then for any prompt; a number that only does not fit is refused."""
    long = read(prompt="x" * 40, max_new_tokens=17)[0]
    assert (len(long.ids), long.new_tokens) == (40, 17)
    assert [sliding_window(config(max_new_tokens=n)) for n in (16, 17)] == [None, 16]
    asked = config(window=9, max_new_tokens=14)
    assert sliding_window(asked) == 9
    assert read(prompt="x" * 40, window=9)[0].new_tokens == 100
    with pytest.raises(ConfigError, match=r"=13; with predict\.window=16 the window slides$"):
        read(prompt="abc", max_new_tokens=14)
    for window in (1, 17):
        with pytest.raises(ConfigError, match=rf"predict\.window={window}: expected 2 to 16"):
            config(window=window)


def test_an_exported_program_cannot_slide() -> None:
    for words in ({"window": 16}, {"max_new_tokens": 17}):
        made = build_config(tiny_run(backend="mindspore", predict=words))
        with pytest.raises(ConfigError, match="has the fixed shape of 16 positions"):
            resolve_mode(made, "export", world_size=1)
        resolve_mode(made, "predict", world_size=1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"predict\.prompt is not given"),
        ({"prompt": ["a", ""]}, r"predict\.prompt is empty"),
        ({"prompt": [97, 257]}, r"predict\.prompt: id 257 is outside .*; expected 0 to 256"),
        ({"prompt": "x" * 16}, "^a prompt of 16 tokens and 1 to add go beyond the model's 16 pos"),
        ({"prompt": "abc", "max_new_tokens": 14}, r"3 tokens and 14 to add .*max_new_tokens=13"),
        ({"prompt": "abc", "min_new_tokens": 14}, r"3 tokens and 14 to add .*min_new_tokens=13"),
        (("a.txt", b" \n\n"), r"a\.txt: holds no prompt"),
        (("a.txt", b"good\nb\xffd\n"), r"a\.txt, line 2: byte 0xff is not UTF-8"),
        (("a.txt", b"good\n" + b"x" * 20), r"a\.txt, line 2: a prompt of 20 tokens"),
        (("b.json", b'["one"]'), r"b\.json: expected one object a line; name such a file \.jsonl"),
        (("a.jsonl", b'{"prompt": "a"}\n\n{"prompt": '), r"a\.jsonl, line 3: not JSON"),
        (("a.jsonl", b'{"question": "b"}'), r"line 1: expected an object with the text field prompt"),
        (("a.jsonl", b'{"prompt": ""}'), r"a\.jsonl, line 1 is empty"),
        (("a.jsonl", b'{"ids": [1]}\n{"ids": [257]}'), r"a\.jsonl, line 2: id 257 is outside"),
        (("a.jsonl", b'{"prompt": [1, 2.0]}'), r"a\.jsonl, line 1: expected .* or a list of ids"),
        (("a.txt", b"one\n" + bytes(4096)), r"a\.txt: holds NUL bytes"),
        (("a.txt", "one\ntwo\n".encode("utf-16-le")), r"looks like UTF-16 without its mark"),
        ({"prompt_file": "b.txt"}, r"b\.txt: no such file"),
    ],
)
def test_bad_settings_and_files_are_one_message(
    tmp_path: Path, given: dict[str, Any] | tuple[str, bytes], message: str
) -> None:
    if isinstance(given, tuple):
        (tmp_path / given[0]).write_bytes(given[1])
        given = {"prompt_file": str(tmp_path / given[0])}
    with pytest.raises(UserError, match=message) as caught:
        read(**given)
    assert caught.value.exit_code == 2 and isinstance(caught.value, DataError | ConfigError)
