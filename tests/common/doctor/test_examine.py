"""The list of checks: what a new entry takes, and that facts are found once, when a check needs
them.
"""

import os

import pytest

from common.cluster import hccn
from common.doctor import examine as module, software
from common.doctor.examine import CHECKS, DoctorRequest, Facts, examine
from common.doctor.report import ok


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> DoctorRequest:
    monkeypatch.delenv("MASTER_PORT", raising=False)
    return DoctorRequest(device="cpu")


def test_a_check_is_one_entry(monkeypatch: pytest.MonkeyPatch, asked: DoctorRequest) -> None:
    monkeypatch.setattr(
        module,
        "CHECKS",
        (
            ("kernel", lambda facts: [ok("kernel", os.uname().release)]),
            ("nothing", lambda facts: []),
        ),
    )
    assert examine(asked) == [ok("kernel", os.uname().release)]


def test_each_check_has_a_name_of_its_own_and_the_all_reduce_comes_last() -> None:
    names = [name for name, _ in CHECKS]
    assert len(set(names)) == len(names) and names[-1] == "all-reduce"


def test_facts_are_found_once_and_only_where_they_are_needed(
    monkeypatch: pytest.MonkeyPatch, asked: DoctorRequest
) -> None:
    calls: list[str] = []
    versions = dict.fromkeys(software.PACKAGES)
    monkeypatch.setattr(
        software, "installed_versions", lambda: (calls.append("versions"), versions)[1]
    )
    monkeypatch.setattr(
        software, "check_imports", lambda names, limit: (calls.append("imports"), ([], {}))[1]
    )
    monkeypatch.setattr(hccn, "npu_numbers", lambda: (calls.append("npus"), [])[1])
    facts = Facts(asked)
    assert calls == []
    assert (facts.backend, facts.device, facts.npus, facts.npus) == ("torch", "cpu", [], [])
    assert calls == ["versions", "npus"]
    assert facts.places is None and module.check_all_reduce(facts) == []
    assert calls == ["versions", "npus", "imports"]


@pytest.mark.parametrize(("npus", "imported"), [([0], ["mindspore", "hccl"]), ([], ["mindspore"])])
def test_mindspore_on_an_ascend_needs_the_package_hccl(
    npus: list[int], imported: list[str], monkeypatch: pytest.MonkeyPatch, asked: DoctorRequest
) -> None:
    versions = dict.fromkeys(software.PACKAGES) | {"mindspore": "2.10.0"}
    monkeypatch.setattr(software, "installed_versions", lambda: versions)
    monkeypatch.setattr(software, "check_imports", lambda names, limit: (names, {}))
    monkeypatch.setattr(hccn, "npu_numbers", lambda: npus)
    assert Facts(asked).imports[0] == imported
