"""Numbers that a person, a launcher or a platform wrote: only ASCII digits, and none so large that
a list of them fills the memory.
"""

import argparse

import pytest

from common.cluster.environment import find_process
from common.cluster.rank_environment import given_port, parse_master
from common.errors import ConfigError
from common.launcher.host_list import divide
from common.modelarts.job import find_places
from common.whole_numbers import argument, rank_names, spans, whole_number

NONE = [
    "",
    "٣٣٣٣",
    "３３",
    "3_3",
    "+3",
    "-3",
    " 3",
    "3 ",
    "3\n",
    "3.0",
    "0x3",
    "²",
    "9" * 5000,
    "9" * 19,
]


def test_only_ascii_digits_are_a_number() -> None:
    assert [text for text in NONE if whole_number(text) is not None] == []
    assert [whole_number(text) for text in ("0", "007", "29500", "9" * 18)] == [
        0,
        7,
        29500,
        10**18 - 1,
    ]


@pytest.mark.parametrize("text", ["٣", "9" * 5000, "0", "65"])
def test_an_argument_out_of_range_is_one_error(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=argument(1, 64))
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["--count", text])
    error = capsys.readouterr().err
    assert "expected a whole number from 1 to 64" in error and len(error) < 200


@pytest.mark.parametrize("text", ["٣٣٣٣", "9" * 5000, "0", "65535"])
def test_a_port_that_is_none(text: str) -> None:
    for parse in (
        lambda: given_port({"MASTER_PORT": text}),
        lambda: parse_master(f"10.0.0.1:{text}"),
    ):
        with pytest.raises(
            ConfigError, match=r"is not a usable port; expected 1024 to 65534"
        ) as error:
            parse()
        assert len(str(error.value)) < 200


SLURM = {
    "SLURM_STEP_NODELIST": "n1",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_LOCALID": "0",
}


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {"RANK": "0", "WORLD_SIZE": "9999999999"},
            "WORLD_SIZE=9999999999: expected the number of processes, 65536 at most",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "9999999999"},
            "LOCAL_WORLD_SIZE=9999999999: expected the number of",
        ),
        ({"RANK": "٠", "WORLD_SIZE": "2"}, "RANK=٠: expected a number, 0 or more"),
        (
            {"RANK_ID": "0", "RANK_SIZE": "9" * 5000},
            r"RANK_SIZE=9+\.\.\. \(5000 characters\): expected the number of processes",
        ),
        (SLURM | {"SLURM_PROCID": "²"}, "SLURM_PROCID=²: expected a number"),
    ],
)
def test_processes(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_process(environ)


def test_nodes_that_slurm_counts() -> None:
    """A count beyond every cluster is none: the tasks of this node are then those that are known
    of.
    """
    assert (
        find_process(
            SLURM
            | {"SLURM_PROCID": "4", "SLURM_NTASKS": "6"}
            | {"SLURM_STEP_TASKS_PER_NODE": "2(x3)", "SLURM_NODEID": "2"}
        ).local_world_size
        == 2
    )
    assert (
        find_process(SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x999999999)"}).local_world_size == 2
    )


@pytest.mark.parametrize("count", ["99999999999", "٨", "32769"])
def test_devices_of_a_platform(count: str) -> None:
    hosts = {"VC_WORKER_HOSTS": "a,b", "MA_NUM_HOSTS": "2", "VC_TASK_INDEX": "0"}
    with pytest.raises(ConfigError, match="MA_NUM_GPUS="):
        find_places(hosts | {"MA_NUM_GPUS": count})


def test_ranks_of_a_list_of_hosts() -> None:
    """Half of the ranks, of a size that no memory holds as a list."""
    with pytest.raises(ConfigError, match=r"for the ranks \[0,5\) of 999999998"):
        divide(("a", "b"), range(5), rank_size=999_999_998, table=(), master=None, port=29500)


def test_names_of_ranks() -> None:
    assert [rank_names(ranks) for ranks in ([3], [0, 1, 2], [5, 0, 1, 8, 9], [])] == [
        "rank 3",
        "ranks 0-2",
        "ranks 0-1, 5, 8-9",
        "ranks none",
    ]


def test_spans_of_numbers() -> None:
    assert [spans(numbers, least=3) for numbers in ([0, 1], [4, 5, 6, 9], [], [7])] == [
        "0, 1",
        "4-6, 9",
        "",
        "7",
    ]
