"""Output to the terminal and the file: numbered lines, characters that are split over tokens, stop
strings, and a file that is whole or absent.
"""

import io
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from common.errors import ConfigError, RunError, StorageError
from common.generation.generate import GrowingText, StopText
from common.generation.output import write_continuations
from common.generation.prompts import Prompt
from common.parallel.run import Run
from common.tokenizer import Framing
from common.tokenizer.streams import ByteStream
from tests.tiny import tiny_config

END = 256


class Bytes:
    """A tokenizer of one id a byte."""

    ends, vocab_size, unknown_id = (END,), 257, None
    framing = Framing()

    def encode(self, text: str, allow_special: bool = False) -> Any:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return bytes(ids)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")

    def stream(self, after: Sequence[int] = ()) -> ByteStream:
        return ByteStream(self.decode_bytes, after)


class Script:
    """A decoder that says a text after every prompt, then the end."""

    def __init__(self, text: bytes, rows: int) -> None:
        self.ids, self.rows = [*text, END], rows

    def start(self, prompts: Sequence[Sequence[int]], room: int) -> Any:
        self.at, self.size = -1, len(prompts)
        return self.step([])

    def step(self, tokens: Sequence[int]) -> Any:
        self.at += 1
        logits = np.zeros((self.size, 300), np.float32)  # beyond 257 the tokenizer has no ids
        logits[:, 280] = 50.0
        logits[:, self.ids[min(self.at, len(self.ids) - 1)]] = 40.0
        return logits


class Terminal(io.StringIO):
    """Keeps what each write added."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.writes.append(text)
        return super().write(text)


def shown_by(terminal: Any) -> list[str]:
    writes = [each.removeprefix("Prompt: p0\nGeneration: p0") for each in terminal.writes]
    return [each for each in writes if each]


def config(**predict: Any) -> Run:
    sizes = {"model__seq_length": 64, "model__vocab_size": 257}
    return tiny_config("out", **sizes, predict=predict)


def say(text: str | bytes, count: int = 1, rows: int = 1, new_tokens: int = 40, **predict: Any) -> None:
    raw = text.encode() if isinstance(text, str) else text
    prompts = [Prompt(text=f"p{index}", ids=[index], new_tokens=new_tokens) for index in range(count)]
    script = Script(raw, rows)
    write_continuations(script, prompts, config(**predict), Bytes())  # type: ignore[arg-type]


SAMPLES: dict[str, Any] = {"strategy": "sampling", "top_k": 1, "num_sequences": 2}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"temperature": 0, "top_k": 40}, None),
        ({"strategy": "greedy", "top_k": 0, "top_p": 0, "repetition_penalty": 1.5}, None),
        ({"temperature": 0.8, "strategy": "greedy"}, "predict.temperature=0.8"),
        ({"strategy": "greedy", "top_k": 40, "top_p": 0.9}, "predict.top_k=40 and predict.top_p=0.9"),
    ],
)
def test_settings_that_greedy_does_not_look_at_are_said(
    caplog: pytest.LogCaptureFixture, settings: dict[str, Any], named: str | None
) -> None:
    say("text", **settings)
    assert ("without effect" in caplog.text) == (named is not None)
    if named:
        assert f"{named} without effect" in caplog.text
        assert "set predict.strategy=sampling" in caplog.text


def test_lines_on_standard_output(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of a batch is streamed; and a broken generation leaves the old file."""
    monkeypatch.setattr(sys, "stdout", Terminal())
    say(" is it", count=2, rows=2)
    shown = [f"Prompt: p{n}\nGeneration: p{n} is it" for n in (0, 1)]
    assert sys.stdout.writes == [shown[0], "\n\n", shown[1], "\n\n"]  # type: ignore[attr-defined]
    monkeypatch.setattr(sys, "stdout", out := io.StringIO())
    say("!", count=2, rows=3, strategy="sampling", num_sequences=2, temperature=0.1)
    two = "Prompt: p{0}\nGeneration 1: p{0}!\nGeneration 2: p{0}!\n\n"
    assert out.getvalue() == two.format(0) + two.format(1)
    path = tmp_path / "out.jsonl"
    path.write_text("old")
    monkeypatch.setattr(Script, "step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        say("abc", output_file=str(path))
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("text", "pieces"),
    [("aé跑🙂.", ["a", "é", "跑", "🙂", "."]), (b"a\xf0\x9f", ["a", "\ufffd"]), (b"\xe8b", ["\ufffdb"])],
)
def test_a_character_is_printed_when_it_is_whole(
    monkeypatch: pytest.MonkeyPatch, text: str | bytes, pieces: list[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", streamed := Terminal())
    say(text)
    monkeypatch.setattr(sys, "stdout", at_once := Terminal())
    say(text, stream=False)
    assert streamed.getvalue() == at_once.getvalue()
    assert shown_by(streamed) == [*pieces, "\n\n"]


@pytest.mark.parametrize(("stop", "pieces"), [("end", ["a", "b", " ", "en "]), (["。", "x"], [*"ab en end"])])
def test_no_part_of_a_stop_string_is_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stop: str | list[str], pieces: list[str]
) -> None:
    """A byte a token; what may begin a stop string waits."""
    monkeypatch.setattr(sys, "stdout", Terminal())
    file = tmp_path / "out.jsonl"
    say("ab en end。跑", stop=stop, output_file=str(file))
    assert shown_by(sys.stdout) == [*pieces, "\n\n"]
    kept = "".join(pieces)
    [record] = records_of(file)
    assert record["finish_reason"] == "stop_string"
    assert (record["continuation"], record["text"]) == (kept, f"p0{kept}")
    assert bytes(record["tokens"]).decode() == kept + (stop if isinstance(stop, str) else stop[0])


def records_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_file_of_results(tmp_path: Path) -> None:
    """One named .txt is plain text."""
    poems = tmp_path / "poems.txt"
    say(" says ä\n", count=2, rows=2, output_file=str(poems), **SAMPLES)
    assert poems.read_text(encoding="utf-8") == "p0 says ä\n\n\n" * 2 + "p1 says ä\n\n\n" * 2
    path = tmp_path / "folder" / "out.jsonl"
    say("é!", count=2, rows=2, new_tokens=2, output_file=str(path))
    one = {"prompt": "p0", "sequence": 1, "continuation": "é", "text": "p0é"}
    one |= {"tokens": [195, 169], "finish_reason": "length"}
    assert records_of(path) == [one, one | {"prompt": "p1", "text": "p1é"}]
    say("é!", new_tokens=3, output_file=str(path), **SAMPLES)
    found = [(row["sequence"], row["continuation"]) for row in records_of(path)]
    assert found == [(1, "é!"), (2, "é!")]
    say("é", new_tokens=3, output_file=str(path))
    assert records_of(path)[0]["finish_reason"] == "end_of_text"


def test_log_probabilities_in_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The script's logits: 40 of what it says, 0 of the other 256 ids of the vocabulary."""
    path = tmp_path / "out.jsonl"
    say("é", output_file=str(path), logprobs=1, bad_words="z", temperature=1.0)
    records = records_of(path)[0]["logprobs"]
    assert [(each["id"], each["token"]) for each in records] == [
        (195, "bytes:\\xc3"), (169, "bytes:\\xa9"),
    ]  # fmt: skip
    value = pytest.approx(-np.log1p(256 * np.exp(-40.0)), abs=1e-12)
    assert [each["logprob"] for each in records] == [value] * 2
    assert records[0]["top"] == [{"id": 195, "token": "bytes:\\xc3", "logprob": value}]
    say("a", logprobs=1, stop=r"\n")
    assert "predict.logprobs=1 without effect" in caplog.text
    assert r"predict.stop=\n is a backslash and an n" in caplog.text


def test_a_prompt_of_ids_is_named_by_them(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    prompt = Prompt(text="A", ids=[65], new_tokens=1, is_given_as_ids=True)
    run = config(output_file=str(path))
    write_continuations(Script(b"b", 1), [prompt], run, Bytes())  # type: ignore[arg-type]
    [record] = records_of(path)
    assert (record["prompt"], record["prompt_ids"], record["text"]) == ("A", [65], "Ab")


def test_a_file_that_cannot_be_written_is_told_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="could not be written"):
        say("abc", output_file=str(tmp_path / "file" / "out.jsonl"))
    with pytest.raises(ConfigError, match="is not a regular file"):
        say("abc", output_file=str(tmp_path))
    assert capsys.readouterr().out == ""


def test_a_terminal_without_the_character_or_a_reader_that_goes_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The latter is not a fault of the file, which is not written."""
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    say("é")
    sys.stdout.flush()
    assert raw.getvalue() == b"Prompt: p0\nGeneration: p0?\n\n"
    monkeypatch.setattr(sys, "stdout", gone := Terminal())
    monkeypatch.setattr(gone, "write", Mock(side_effect=BrokenPipeError(32, "Broken pipe")))
    with pytest.raises(RunError, match="standard output: Broken pipe"):
        say("abc", output_file=str(tmp_path / "out.jsonl"))
    assert not list(tmp_path.iterdir())


def by_definition(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Return the text before a stop string, and the string: the first one that is complete."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def may_go_on(text: str, stops: list[str]) -> int:
    """Characters at the end of a text that a stop string may begin with."""
    held = [size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])]
    return max(held, default=0)


def test_random_texts_in_random_pieces() -> None:
    draw = random.Random(0)
    stopped = 0
    for _ in range(2000):
        text = "".join(draw.choices("ab\n。", k=draw.randrange(12)))
        stops = ["".join(draw.choices("ab\n。", k=draw.randint(1, 4))) for _ in range(draw.randint(0, 3))]
        expected, stop = by_definition(text, stops)
        reader, at, shown = StopText(stops), 0, ""
        while at < len(text):
            piece = text[at : at + draw.randint(1, 5)]
            at += len(piece)
            shown += reader.push(piece)
            before = by_definition(text[:at], stops)
            if before[1] is None:
                assert shown == text[: at - may_go_on(text[:at], stops)]
        assert reader.found == stop
        assert shown + reader.push("", final=True) == expected
        stopped += stop is not None
    assert 500 < stopped < 1500


def test_a_sequence_of_bytes_is_read_once_and_shows_whole_characters() -> None:
    tokens = list("é跑。b".encode())
    growing = GrowingText(ByteStream(bytes), ["。"])
    seen = []
    for size in range(1, len(tokens) + 1):
        growing.advance(tokens[:size])
        seen.append(growing.text)
        if growing.is_stopped:
            break
    assert seen == ["", "é", "é", "é", "é跑", "é跑", "é跑", "é跑"]
    assert size == len("é跑。".encode())
    growing.advance(tokens, final=True)
    assert growing.text == "é跑"
