"""The report as people and as programs read it."""

import json

from common.doctor.report import as_json, as_table, error, exit_code, ok, warning

CHECKS = [
    ok("torch", "2.13.0"),
    warning("disk", "3 GiB free", "make room"),
    error("all-reduce", "rank 1 died\nits log ends", ""),
]


def test_the_table() -> None:
    assert as_table(CHECKS) == (
        "ok       torch       2.13.0\n"
        "warning  disk        3 GiB free\n"
        "                     -> make room\n"
        "error    all-reduce  rank 1 died\n"
        "                     its log ends\n"
        "1 ok, 1 warning, 1 error\n"
    )


def test_colour_only_where_asked() -> None:
    assert "\033[31merror" in as_table(CHECKS, colour=True)
    assert "\033" not in as_table(CHECKS)


def test_json() -> None:
    read = json.loads(as_json(CHECKS))
    assert read["state"] == "error"
    assert read["checks"][1] == {
        "name": "disk",
        "state": "warning",
        "found": "3 GiB free",
        "remedy": "make room",
    }
    assert json.loads(as_json(CHECKS[:2]))["state"] == "warning"
    assert json.loads(as_json([]))["state"] == "ok"
    assert [exit_code(checks) for checks in (CHECKS, CHECKS[:2])] == [2, 0]
