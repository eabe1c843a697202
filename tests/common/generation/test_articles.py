"""A folder with a file for each text, filled by a stopped run and the one that resumes it, and
the samples of GPT2-Chinese.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import ConfigError
from common.generation import output
from common.generation.output import write_continuations
from common.generation.prompts import Prompt
from common.training.opened_checkpoint import Checkpoint
from tests.common.generation.test_output import Bytes, config

SAMPLING = {"strategy": "sampling", "num_sequences": 3, "output_folder": "made"}


class Stopped(Exception):
    pass


class Weighted:
    """A decoder whose next letter depends on the prompt and on the tokens so far."""

    rows = 4

    def __init__(self, starts: int = 99) -> None:
        self.starts = starts

    def start(self, prompts: Sequence[Sequence[int]], room: int) -> Any:
        self.starts -= 1
        if self.starts < 0:
            raise Stopped
        self.sums = [sum(prompt) for prompt in prompts]
        return self.logits()

    def step(self, tokens: Sequence[int]) -> Any:
        self.sums = [7 * total + token for total, token in zip(self.sums, tokens, strict=True)]
        return self.logits()

    def logits(self) -> Any:
        found = np.zeros((len(self.sums), 257), np.float32)
        for row, total in enumerate(self.sums):
            found[row, 97:123] = np.random.default_rng(total % 99991).normal(size=26) + 9
        return found


@pytest.fixture(autouse=True)
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "step_00000001"
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    monkeypatch.setattr(output, "checkpoint_to_use", lambda run: Checkpoint(folder))
    return folder


def write(titles: str = "ab", decoder: Any = None, style: str = "gpt2", **predict: Any) -> None:
    prompts = [Prompt(text=title, ids=[ord(title)], new_tokens=6) for title in titles]
    run = config(**SAMPLING | predict)
    run = run.model_copy(update={"logging": run.logging.model_copy(update={"style": style})})
    write_continuations(decoder or Weighted(), prompts, run, Bytes())  # type: ignore[arg-type]


def texts(folder: str = "made") -> dict[str, str]:
    return {path.name: path.read_text() for path in Path(folder).glob("*.txt")}


def test_a_stopped_run_resumes_with_the_same_texts() -> None:
    """Titles added at the end and more texts for each leave those that are there as they are."""
    write(output_folder="whole")
    expected = texts("whole")
    assert sorted(expected) == [f"{i}-{j}.txt" for i in (0, 1) for j in (0, 1, 2)]
    assert len(set(expected.values())) == 6
    assert all(text[0] == "ab"[int(name[0])] for name, text in expected.items())

    with pytest.raises(Stopped):
        write(decoder=Weighted(starts=1))
    assert texts() == dict(sorted(expected.items())[:4])
    Path("made/0-1.txt").write_text("kept")
    write()
    assert texts() == expected | {"0-1.txt": "kept"}
    write(titles="abc", num_sequences=4)
    assert texts().items() >= (expected | {"0-1.txt": "kept"}).items()
    assert len(texts()) == 12
    write(titles="a")
    write(titles="abc", batch_size=2)
    assert json.loads(Path("made/generation.json").read_text())["prompts"] == ["a", "b", "c"]


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


def test_a_folder_older_than_a_setting_resumes_without_it() -> None:
    write(titles="a")
    record = json.loads(Path("made/generation.json").read_text())
    for name in ("stop", "logit_bias", "bad_words", "presence_penalty", "frequency_penalty"):
        del record[name]
    Path("made/generation.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match="come from bad_words="):
        write(titles="a", bad_words="x")
    write(titles="ab")
    assert len(texts()) == 6


def test_texts_of_other_weights_are_not_mixed(checkpoint: Path) -> None:
    write()
    (checkpoint / "manifest.json").write_text('{"state": 2}')
    with pytest.raises(ConfigError, match=r"come from checkpoint=.*step_00000001 "):
        write()
    Path("file").write_text("")
    with pytest.raises(ConfigError, match=r"predict\.output_folder=file: is a file"):
        write(output_folder="file")


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
