"""Missing inputs are named before a framework is imported, with the folder they were looked for in."""

import sys
from pathlib import Path
from typing import Any

import pytest

from common.backends import _paths_here, check_inputs
from common.config.load import build_config
from common.config.schema import RunConfig
from common.errors import DataError, UserError
from common.resolve.derive import resolve_config
from run_gpt2 import main
from tests.common.resolve.test_refusals import small_tree, with_words


def config(words: str = "") -> RunConfig:
    """words: ``section.key=value``."""
    data = {"train": "data/own", "tokenizer": "data/nowhere"}
    tree = small_tree(data=data, model__seq_length=32, model__vocab_size=50257)
    return resolve_config(build_config(with_words(tree, words.split())))


HERE = "(looked in {cwd})"
ABSENT = f"there is no such file or folder {HERE}"


@pytest.mark.parametrize(
    ("mode", "words", "message"),
    [
        ("train", "", f"data/own.idx: not found {HERE}: the folder data does not exist"),
        ("train", "data.train=null", "data.train is not given"),
        ("train", "data.train=here data.validation=gone", f"gone.idx: not found {HERE}"),
        ("train", "data.train=here checkpoint.resume=old", f"(checkpoint.resume=old): {ABSENT}"),
        ("train", "data.train=here train.max_steps=null", "the length of the run is not given"),
        ("finetune", "data.train=here", "give checkpoint.init_from"),
        ("finetune", "data.train=here checkpoint.init_from=gpt2",
            f"(checkpoint.init_from): {ABSENT}; a model of the Hugging Face hub is named"),
        ("predict", "", "predict.prompt is not given"),
        ("predict", "predict.prompt=a", f"data/nowhere: does not exist {HERE}"),
        ("predict", "predict.prompt=a data.tokenizer=null", "data.tokenizer is not given"),
        ("predict", "predict.prompt_file=p.txt",
            f"predict.prompt_file: p.txt: no such file; check the path {HERE}"),
        ("eval", "", f"data/own.idx: not found {HERE}"),
        ("eval", "data.train=here", "no whole checkpoint here"),
        ("eval", "data.train=here checkpoint.load=gone", f"(checkpoint.load=gone): {ABSENT}"),
        ("eval", "evaluation.task=text evaluation.file=wiki.txt data.tokenizer=here",
            f"evaluation.file=wiki.txt: not found {HERE}"),
        ("export", "checkpoint.load=/nowhere/at/all",
            "(checkpoint.load=/nowhere/at/all): there is no such file or folder"),
    ],
)  # fmt: skip
def test_missing(mode, words, message, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("here.idx", "here.bin", "here"):
        (tmp_path / name).touch()
    with pytest.raises(UserError) as caught:
        check_inputs(mode, config(words))
    assert message.replace("{cwd}", str(tmp_path)) in str(caught.value)


def test_the_front_door_says_it_before_it_imports_a_framework(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("common.config.load.ROOT", tmp_path)  # or a quick start's data are found
    monkeypatch.setitem(sys.modules, "torch", None)  # an import would fail, with another message
    preset = Path(__file__).resolve().parents[2] / "configs" / "gpt2" / "run_gpt2_tiny.yaml"
    for mode, words, message in (
        ("train", [], "corpus_text_document.idx: not found (looked in "),
        ("predict", ["predict.prompt=hi"], "data/quickstart: does not exist (looked in "),
        ("predict", [], "predict.prompt is not given"),
        ("train", ["data.train=."], "and . holds no .bin/.idx pair"),
    ):
        assert main(["--config", str(preset), "--run_mode", mode, *words]) == 2
        assert message in capsys.readouterr().err


def test_the_data_of_a_folder(tmp_path: Path) -> None:
    def found() -> Any:
        return _paths_here(config(f"data.train={tmp_path}/data"))["data"]["train"]

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
    for name in ("c_ids.npy", "c_idx.npz"):
        (folder / name).touch()
    with pytest.raises(DataError, match=r"holds 2 corpora \(c, b\)"):
        found()
    (folder / "b.idx").unlink()
    assert found() == [str(folder / "c")], "FleetX reads the files of its input_dir, not those below"
    (folder / "c_ids.npy").rename(folder / "inner" / "rows.mindrecord")
    (folder / "c_idx.npz").unlink()
    with pytest.raises(DataError, match=r"holds 2 corpora \(inner/a, inner/rows.mindrecord\)"):
        found()
    (tmp_path / "data.idx").touch()
    assert found() == [str(folder)], "a prefix that is a folder's name too"
