"""Missing inputs are named before a framework is imported, with the folder they were looked for
in.
"""

import sys
from pathlib import Path
from typing import Any

import pytest

from common.config.load import build_config
from common.config.schema import RunConfig
from common.errors import DataError, UserError
from common.inputs import _paths_here, check_inputs
from common.resolve.derive import resolve_config
from run_gpt2 import main
from tests.config_overrides import changed


def config(**changes: Any) -> RunConfig:
    tree: dict[str, Any] = {
        "output_dir": "out",
        "model": {
            "num_layers": 1,
            "hidden_size": 8,
            "num_heads": 1,
            "seq_length": 32,
            "vocab_size": 50257,
        },
        "train": {"max_steps": 3, "micro_batch_size": 2},
        "optimizer": {"learning_rate": 0.1},
        "data": {"train": "data/own", "tokenizer": "data/nowhere"},
    }
    return resolve_config(build_config(changed(tree, changes)))


ABSENT = "there is no such file or folder (looked in {cwd})"


@pytest.mark.parametrize(
    ("mode", "changes", "message"),
    [
        ("train", {}, "data/own.idx: not found (looked in {cwd}): the folder data does not exist"),
        ("train", {"data__train": None}, "data.train is not given"),
        (
            "train",
            {"data__train": "here", "data__validation": "gone"},
            "gone.idx: not found (looked in {cwd})",
        ),
        (
            "train",
            {"data__train": "here", "checkpoint__resume": "old"},
            "(checkpoint.resume=old): there is no such file or folder (looked in {cwd})",
        ),
        (
            "train",
            {"data__train": "here", "train__max_steps": None},
            "the length of the run is not given",
        ),
        ("finetune", {"data__train": "here"}, "give checkpoint.init_from"),
        (
            "finetune",
            {"data__train": "here", "checkpoint__init_from": "gpt2"},
            f"(checkpoint.init_from): {ABSENT}; a model of the Hugging Face hub is named as hf://OWNER/NAME",
        ),
        ("predict", {}, "predict.prompt is not given"),
        ("predict", {"predict__prompt": "a"}, "data/nowhere: does not exist (looked in {cwd})"),
        (
            "predict",
            {"predict__prompt": "a", "data__tokenizer": None},
            "data.tokenizer is not given",
        ),
        (
            "predict",
            {"predict__prompt_file": "p.txt"},
            "predict.prompt_file: p.txt: no such file; check the path (looked in {cwd})",
        ),
        ("eval", {}, "data/own.idx: not found (looked in {cwd})"),
        ("eval", {"data__train": "here"}, "no whole checkpoint here"),
        (
            "eval",
            {"data__train": "here", "checkpoint__load": "gone"},
            "(checkpoint.load=gone): there is no such file or folder (looked in {cwd})",
        ),
        (
            "eval",
            {"evaluation": {"task": "text", "file": "wiki.txt"}, "data__tokenizer": "here"},
            "evaluation.file=wiki.txt: not found (looked in {cwd})",
        ),
        (
            "export",
            {"checkpoint__load": "/nowhere/at/all"},
            "(checkpoint.load=/nowhere/at/all): there is no such file or folder",
        ),
    ],
)
def test_missing(
    mode: str,
    changes: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("here.idx", "here.bin", "here"):
        (tmp_path / name).touch()
    with pytest.raises(UserError) as caught:
        check_inputs(mode, config(**changes))
    assert message.replace("{cwd}", str(tmp_path)) in str(caught.value)


def test_the_front_door_says_it_before_it_imports_a_framework(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("common.config.load.ROOT", tmp_path)  # or a quick start's data are found
    monkeypatch.setitem(sys.modules, "torch", None)  # an import would fail, with another message
    preset = Path(__file__).resolve().parents[2] / "configs" / "gpt2" / "run_gpt2_tiny.yaml"
    for mode, words, message in (
        ("train", [], "corpus_text_document.idx: not found (looked in "),
        ("predict", ["predict.prompt=hi"], "data/quickstart: does not exist (looked in "),
        ("predict", [], "predict.prompt is not given"),
    ):
        assert main(["--config", str(preset), "--run_mode", mode, *words]) == 2
        assert message in capsys.readouterr().err


def test_the_data_of_a_folder(tmp_path: Path) -> None:
    def found() -> list[str | float] | None:
        there: list[str | float] = _paths_here(config(data__train=str(tmp_path / "data")))["data"][
            "train"
        ]
        return there

    folder = tmp_path / "data"
    (folder / "inner").mkdir(parents=True)
    assert found() == [str(folder)]  # of MindRecord files, whose reader walks it
    for name in ("a.idx", "a.bin", "no_bin.idx"):
        (folder / "inner" / name).touch()
    assert found() == [str(folder / "inner" / "a")]
    (folder / "b.idx").touch()
    (folder / "b.bin").touch()
    message = r"holds 2 corpora \(b, inner/a\); give one as data.train=FOLDER/NAME"
    with pytest.raises(DataError, match=message):
        found()
    (tmp_path / "data.idx").touch()
    assert found() == [str(folder)], "a prefix that is a folder's name too"
