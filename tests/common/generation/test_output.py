"""Prompts that are read, and output to the terminal, the file and a folder of texts: numbered lines, characters that
are split over tokens, stop strings, a file that is whole or absent, and texts that a stopped run leaves to the next.
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

from common.config.load import build_config
from common.errors import ConfigError, DataError, RunError, StorageError, UserError
from common.generation import output
from common.generation.generate import GrowingText
from common.generation.output import write_continuations
from common.generation.prompts import Prompt, encode_prompts, sliding_window
from common.parallel.run import Run
from common.resolve.derive import resolve_mode
from common.tokenizer import Framing
from common.tokenizer.gpt2_bpe import GPT2BPETokenizer
from common.training.opened_checkpoint import Checkpoint
from tests.tiny import tiny_config, tiny_run

END = 256


class Bytes:
    """A tokenizer of one id a byte."""

    ends, vocab_size, unknown_id = (END,), 257, None
    framing = Framing()

    def encode(self, text: str, allow_special: bool = False) -> Any:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return bytes(ids)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")

    stream = GPT2BPETokenizer.stream


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
        ({"strategy": "greedy", "top_k": 0, "top_p": 0, "repetition_penalty": 1.5}, None),
        ({"strategy": "greedy", "temperature": 0.8}, "predict.temperature=0.8"),
        ({"strategy": "greedy", "top_k": 40, "top_p": 0.9}, "predict.top_k=40 and predict.top_p=0.9"),
    ],
)
def test_settings_that_greedy_does_not_look_at_are_said(
    caplog: pytest.LogCaptureFixture, settings: dict[str, Any], named: str | None
) -> None:
    say("text", **settings)
    assert ("without effect" in caplog.text) == (named is not None)
    assert named is None or f"{named} without effect" in caplog.text


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
def test_a_character_is_printed_when_it_is_whole(monkeypatch: Any, text: str | bytes, pieces: list[str]) -> None:
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
    prompt = Prompt(text="A", ids=[65], new_tokens=3, is_given_as_ids=True)
    write_continuations(Script(b"b", 1), [prompt], config(output_file=str(path)), Bytes())  # type: ignore[arg-type]
    [record] = records_of(path)
    assert (record["prompt"], record["prompt_ids"], record["text"]) == ("A", [65], "Ab")
    assert record["finish_reason"] == "end_of_text"


def test_log_probabilities_in_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The script's logits: 40 of what it says, 0 of the other 256 ids of the vocabulary."""
    path = tmp_path / "out.jsonl"
    say("é", output_file=str(path), logprobs=1, bad_words="z", temperature=1.0)
    records = records_of(path)[0]["logprobs"]
    assert [(each["id"], each["token"]) for each in records] == [(195, "bytes:\\xc3"), (169, "bytes:\\xa9")]
    value = pytest.approx(-np.log1p(256 * np.exp(-40.0)), abs=1e-12)
    assert [each["logprob"] for each in records] == [value] * 2
    assert records[0]["top"] == [{"id": 195, "token": "bytes:\\xc3", "logprob": value}]
    say("a", logprobs=1, stop=r"\n")
    assert "predict.logprobs=1 without effect" in caplog.text
    assert r"predict.stop=\n is a backslash and an n" in caplog.text


def test_a_file_that_cannot_be_written_is_told_before_the_work(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="could not be written"):
        say("abc", output_file=str(tmp_path / "file" / "out.jsonl"))
    with pytest.raises(ConfigError, match="is not a regular file"):
        say("abc", output_file=str(tmp_path))
    assert capsys.readouterr().out == ""


def test_a_terminal_without_the_character_or_a_reader_that_goes_away(tmp_path: Path, monkeypatch: Any) -> None:
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
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
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
        reader, at = GrowingText(Bytes().stream(), stops), 0
        while at < len(text):
            at = min(at + draw.randint(1, 5), len(text))
            reader.advance(text[:at].encode())
            if by_definition(text[:at], stops)[1] is None:
                assert reader.text == text[: at - may_go_on(text[:at], stops)]
        assert reader.is_stopped == (stop is not None)
        reader.advance(text.encode(), final=True)
        assert reader.text == expected
        stopped += stop is not None
    assert 500 < stopped < 1500


SAMPLING = {"strategy": "sampling", "num_sequences": 3, "output_folder": "made"}


class Weighted:
    """A decoder whose next letter depends on the prompt and on the tokens so far."""

    rows = 4

    def __init__(self, starts: int = 99) -> None:
        self.starts = starts

    def start(self, prompts: Sequence[Sequence[int]], room: int) -> Any:
        self.starts -= 1
        if self.starts < 0:
            raise InterruptedError
        self.sums = [0] * len(prompts)
        return self.step([sum(prompt) for prompt in prompts])

    def step(self, tokens: Sequence[int]) -> Any:
        self.sums = [7 * total + token for total, token in zip(self.sums, tokens, strict=True)]
        found = np.zeros((len(self.sums), 257), np.float32)
        for row, total in enumerate(self.sums):
            found[row, 97:123] = np.random.default_rng(total % 99991).normal(size=26) + 9
        return found


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the process is empty, and texts are of this checkpoint."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (folder := tmp_path / "step_00000001").mkdir()
    (folder / "manifest.json").write_text("{}")
    monkeypatch.setattr(output, "checkpoint_to_use", lambda run: Checkpoint(folder))
    return folder


here = pytest.mark.usefixtures("checkpoint")


def write(titles: str = "ab", decoder: Any = None, style: str = "gpt2", **predict: Any) -> None:
    prompts = [Prompt(text=title, ids=[ord(title)], new_tokens=6) for title in titles]
    run = config(**SAMPLING | predict)
    run = run.model_copy(update={"logging": run.logging.model_copy(update={"style": style})})
    write_continuations(decoder or Weighted(), prompts, run, Bytes())  # type: ignore[arg-type]


def texts(folder: str = "made") -> dict[str, str]:
    return {path.name: path.read_text() for path in Path(folder).glob("*.txt")}


@here
def test_a_stopped_run_resumes_with_the_same_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Titles added at the end and more texts for each leave those that are there as they are."""
    write(output_folder="whole")
    expected = texts("whole")
    assert sorted(expected) == [f"{i}-{j}.txt" for i in (0, 1) for j in (0, 1, 2)]
    assert len(set(expected.values())) == 6
    assert all(text[0] == "ab"[int(name[0])] for name, text in expected.items())

    with pytest.raises(InterruptedError):
        write(decoder=Weighted(starts=1))
    assert texts() == dict(sorted(expected.items())[:4])
    Path("made/0-1.txt").write_text("kept")
    write()
    assert texts() == expected | {"0-1.txt": "kept"}
    write(titles="abc", num_sequences=4)
    assert len(texts()) == 12 and texts().items() >= (expected | {"0-1.txt": "kept"}).items()
    monkeypatch.setattr(Bytes, "stream", None)  # what is there costs nothing
    write(titles="a")
    write(titles="abc", batch_size=2)
    assert json.loads(Path("made/generation.json").read_text())["prompts"] == ["a", "b", "c"]


@here
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.5}, r"its texts come from temperature=1\.0, and now it is 0\.5"),
        ({"seed": 9}, r"come from seed=.*, and now it is 9"),
        ({"titles": "ax"}, "come from prompt 1='b', and now it is 'x'"),
        ({"logit_bias": {97: -1}}, r"come from logit_bias=\{\}, and now it is \{'97': -1\.0\}"),
    ],
)
def test_texts_of_other_settings_are_not_mixed(change: dict[str, Any], message: str) -> None:
    write()
    before = texts()
    with pytest.raises(ConfigError, match=message):
        write(**change)
    assert texts() == before


def test_a_folder_older_than_a_setting_resumes_without_it_and_not_with_other_weights(checkpoint: Path) -> None:
    write(titles="a")
    record = json.loads(Path("made/generation.json").read_text())
    for name in ("stop", "logit_bias", "bad_words", "presence_penalty", "frequency_penalty"):
        del record[name]
    Path("made/generation.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match="come from bad_words="):
        write(titles="a", bad_words="x")
    write(titles="ab")
    assert len(texts()) == 6
    (checkpoint / "manifest.json").write_text('{"state": 2}')
    with pytest.raises(ConfigError, match=r"come from checkpoint=.*step_00000001 "):
        write(titles="ab")
    with pytest.raises(ConfigError, match=r"predict\.output_folder=.*manifest.json: is a file"):
        write(output_folder=str(checkpoint / "manifest.json"))


@here
def test_samples_are_those_of_gpt2_chinese(capsys: pytest.CaptureFixture[str]) -> None:
    """Banners of 40 and 80 signs on the screen, 90 in samples.txt, numbered through all titles."""
    write(style="gpt2-chinese", output_file="out/samples.txt", num_sequences=2)
    made = [texts()[f"{i}-{j}.txt"].rstrip("\n") for i in (0, 1) for j in (0, 1)]
    heads = [f"{'=' * 40} SAMPLE {number} {'=' * 40}\n" for number in (1, 2, 3, 4)]
    shown = [f"{head}\n{text}\n" for head, text in zip(heads, made, strict=True)]
    out = capsys.readouterr().out
    assert out == f"{shown[0]}{shown[1]}\n{shown[2]}{shown[3]}\n{'=' * 80}\n"
    kept = [f"{head}{text}\n{'=' * 90}\n\n" for head, text in zip(heads, made, strict=True)]
    assert Path("out/samples.txt").read_text() == "".join(kept)


def sized(positions: int = 16, **predict: Any) -> Run:
    return tiny_config(model__seq_length=positions, model__vocab_size=257, predict=predict)


def read(**words: Any) -> list[Any]:
    return encode_prompts(sized(**words), Bytes())  # type: ignore[arg-type]


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


def test_number_of_tokens_that_may_follow() -> None:
    longer = {"positions": 300, "min_new_tokens": 150}
    for words, expected in (({}, 13), ({"positions": 300}, 100), (longer, 150), ({"positions": 4}, 1)):
        assert read(prompt="abc", **words)[0].new_tokens == expected


def test_the_window_slides_for_more_tokens_than_positions() -> None:
    """Also where asked to, and then for any prompt; a number that only does not fit is refused."""
    long = read(prompt="x" * 40, max_new_tokens=17)[0]
    assert (len(long.ids), long.new_tokens) == (40, 17)
    assert [sliding_window(sized(max_new_tokens=n)) for n in (16, 17)] == [None, 16]
    asked = sized(window=9, max_new_tokens=14)
    assert sliding_window(asked) == 9
    assert read(prompt="x" * 40, window=9)[0].new_tokens == 100
    with pytest.raises(ConfigError, match=r"=13; with predict\.window=16 the window slides$"):
        read(prompt="abc", max_new_tokens=14)
    for window in (1, 17):
        with pytest.raises(ConfigError, match=rf"predict\.window={window}: expected 2 to 16"):
            sized(window=window)


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
        (("a.txt", "one\ntwo\n".encode("utf-16-le")), r"convert it to UTF-8 \(iconv\)"),
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
