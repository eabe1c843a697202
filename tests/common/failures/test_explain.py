"""Known errors: the data file itself, and logs of public issues explained by it."""

import re
from pathlib import Path

import pytest

from common.errors import DataError
from common.failures import (
    Kind,
    error_of,
    explain_code,
    explain_log,
    find_errors,
    find_in_logs,
    known_errors,
    language_of,
)
from common.yaml_files import read_yaml_mapping

EXCERPTS = read_yaml_mapping(Path(__file__).with_name("excerpts.yaml"))["excerpts"]
HAN = re.compile("[\u4e00-\u9fff]")


@pytest.mark.parametrize("excerpt", EXCERPTS, ids=[each["source"][19:] for each in EXCERPTS])
def test_a_log_of_a_public_issue_is_explained(excerpt: dict[str, str]) -> None:
    assert find_errors(excerpt["text"], Path())[0].error.name == excerpt["expected"]


def test_texts_are_in_their_language_and_codes_name_one_error() -> None:
    errors = known_errors()
    codes = [code for error in errors for code in {error.name, *error.codes}]
    assert len(codes) == len(set(codes))
    for error in errors:
        assert all(HAN.search(text) for text in (error.meaning["zh"], *error.steps["zh"]))
        assert not any(HAN.search(text) for text in (error.meaning["en"], *error.steps["en"]))
        assert error.patterns
        assert len(error.steps["zh"]) == len(error.steps["en"]) == 3
        assert error.sources
        assert all(re.match(r"https://\S+$|docs/\S+$", each) for each in error.sources)


def test_every_code_is_found_in_a_log_as_libraries_write_it() -> None:
    for error in known_errors():
        for code in error.codes:
            line = f"failed, error code is {code}[Error]" if code.isdigit() else f"{code}: failed"
            assert find_errors(line, Path())[0].error is error, code
            assert error_of(code.lower()) is error


def test_a_healthy_line_has_no_error_and_the_first_of_two_causes_is_named() -> None:
    for line in (
        "step 507015 of 600000, loss 3.2, 207001 tokens/s, loss code: 5070151",
        "NCCL INFO NET/Plugin: libnccl-net.so: cannot open shared object file: No such file",
        "[INFO] HCCL_CONNECT_TIMEOUT=600, model EI0006X, checkpoint 107020",
    ):
        assert find_errors(line, Path()) == []
    text = "No space left on device\nRuntimeError: CUDA error: device-side assert triggered\n"
    assert find_errors(text, Path())[0].error.name == "disk_full"


def test_the_cause_on_one_rank_comes_before_its_consequences_on_others(tmp_path: Path) -> None:
    texts = {each["expected"]: each["text"] for each in EXCERPTS}
    for rank, name in enumerate(["EI0006", "nccl_timeout", "EE1002", "oom.npu"]):
        text = texts.get(name, "EE1002: Stream synchronize timeout\n")
        log = tmp_path / f"mf_parallel{rank}" / "mindformer.log"
        log.parent.mkdir()
        log.write_text("step 1\n" * 1000 + text * 50, encoding="utf-8")
    found = find_in_logs(tmp_path)
    assert (found[0].error.name, found[0].line) == ("oom.npu", 1001)
    assert "mf_parallel3" in str(found[0].path)
    assert [hit.error.kind for hit in found] == sorted(hit.error.kind for hit in found)
    text, known = explain_log(tmp_path, "en")
    assert known and text.index("NPU out of memory") < text.index("EI0006")


def test_a_huge_log_is_read_at_both_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a progress bar, which draws its states over each other, is one huge line."""
    monkeypatch.setattr("common.failures.MAX_LOG_BYTES", 2**20)
    for filler in (b"\0" * 100, b"\r 50% |#####     |"):
        log = tmp_path / "huge.log"
        log.write_bytes(filler * (2**20 // len(filler) + 9) + b"\rCUDA out of memory\n")
        assert find_in_logs(log)[0].error.name == "oom.cuda"


def test_a_code_is_explained_in_both_languages() -> None:
    assert explain_code("ei0006", "en").startswith("EI0006\nHCCL could not connect")
    chinese = explain_code("EI0006", "zh")
    assert "下一步" in chinese and "HCCL_CONNECT_TIMEOUT" in chinese
    assert error_of("RuntimeError: CUDA out of memory. Tried").kind is Kind.CAUSE


def test_unknown_codes_and_logs_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such log, and no known code"):
        explain_code("EI9876", "en")
    with pytest.raises(DataError, match="a folder without logs"):
        explain_log(tmp_path, "en")
    (tmp_path / "quiet.log").write_text("step 1\n")
    said = f"{tmp_path}: no known error; look at its last lines, and at the other logs\n"
    assert explain_log(tmp_path, "en") == (said, False)


def test_the_locale_chooses_the_language() -> None:
    for environment, language in (
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LC_ALL": "C", "LANG": "zh_CN.UTF-8"}, "en"),
        ({"LC_ALL": "", "LC_MESSAGES": "zh_TW"}, "zh"),
        ({}, "en"),
    ):
        assert language_of(environment) == language
