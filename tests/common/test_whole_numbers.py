"""Numbers that a person, a launcher or a platform wrote: only ASCII digits, and none so large that
a list of them fills the memory.
"""

import argparse
from collections.abc import Callable
from typing import Any

import pytest

from common.cluster.environment import find_process
from common.cluster.rank_environment import given_port, parse_master
from common.errors import ConfigError
from common.flags import at_least, make_parser
from common.modelarts.job import find_places
from common.processes import heartbeat
from common.whole_numbers import whole_number

NONE = ["", "٣٣٣٣", "３３", "3_3", "+3", "-3", " 3", "3 ", "3\n", "3.0", "0x3", "²", "9" * 19]
SLURM = {
    "SLURM_STEP_NODELIST": "n1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2",
    "SLURM_LOCALID": "0",
}  # fmt: skip
HOSTS = {"VC_WORKER_HOSTS": "a,b", "MA_NUM_HOSTS": "2", "VC_TASK_INDEX": "0"}
PORTS = "is not a usable port; expected 1024 to 65534"


def test_only_ascii_digits_are_a_number() -> None:
    assert [text for text in NONE if whole_number(text) is not None] == []
    assert [whole_number(text) for text in ("0", "007", "9" * 18)] == [0, 7, 10**18 - 1]


@pytest.mark.parametrize(
    ("read", "given", "message"),
    [
        *((given_port, {"MASTER_PORT": text}, PORTS) for text in ("٣٣٣٣", "9" * 5000, "0")),
        *((parse_master, f"10.0.0.1:{text}", PORTS) for text in ("٣٣٣٣", "9" * 5000, "65535")),
        (find_process, {"RANK": "0", "WORLD_SIZE": "9999999999"},
            "WORLD_SIZE=9999999999: expected the number of processes, 65536 at most"),
        (find_process, {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "9999999999"},
            "LOCAL_WORLD_SIZE=9999999999: expected the number of"),
        (find_process, {"RANK": "٠", "WORLD_SIZE": "2"}, "RANK=٠: expected a number, 0 or more"),
        (find_process, {"RANK_ID": "0", "RANK_SIZE": "9" * 5000},
            "999: expected the number of processes"),
        (find_process, SLURM | {"SLURM_PROCID": "²"}, "SLURM_PROCID=²: expected a number"),
        *((at_least(1, 64), text, "expected a whole number from 1 to 64") for text in ("٣", "9" * 19, "0", "65")),
        (find_places, HOSTS | {"MA_NUM_GPUS": "32769"}, "MA_NUM_GPUS="),
    ],
)  # fmt: skip
def test_a_number_that_is_none(read: Callable[[Any], Any], given: Any, message: str) -> None:
    with pytest.raises((ConfigError, argparse.ArgumentTypeError)) as error:
        read(given)
    assert message in str(error.value) and len(str(error.value)) < 1000


def test_a_wrong_word_of_any_length_is_a_short_message(capsys: pytest.CaptureFixture[str]) -> None:
    """argparse's messages are no GPT2Error, which cuts its own."""
    parser = make_parser(None)
    parser.add_argument("--count", type=at_least(1))
    with pytest.raises(SystemExit):
        parser.parse_args(["--count", "9" * 100_000])
    said = capsys.readouterr().err
    assert said.startswith("error: argument --count: '999") and "expected a whole number of 1 or more" in said
    assert len(said) < 1100


def test_a_heartbeat_that_no_pipe_has_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number of 18 digits is more than the system takes for a file."""
    monkeypatch.setattr(heartbeat, "die_with_parent", lambda launcher: True)
    monkeypatch.setenv("GPT2_LAUNCHER_PID", "1")
    monkeypatch.setenv("GPT2_HEARTBEAT_FD", "9" * 18)
    heartbeat.start_heartbeat()
    assert heartbeat._pipe is None
