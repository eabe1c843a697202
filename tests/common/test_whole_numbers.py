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
from common.flags import at_least
from common.modelarts.job import find_places
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
