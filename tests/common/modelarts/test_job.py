"""Ranks of a ModelArts job, who starts them, and whose files a process copies."""

from pathlib import Path

import pytest

from common.cluster.environment import ALONE, Process, find_process
from common.errors import ConfigError
from common.modelarts import job as modelarts_job

INSIDE = {"MA_JOB_DIR": "/home/ma-user/modelarts/user-job-dir"}
TWO_HOSTS = {**INSIDE, "MA_NUM_HOSTS": "2", "VC_WORKER_HOSTS": "job-0.job,job-1.job"}
EIGHT, FOUR, ONE = ({**INSIDE, "MA_NUM_GPUS": count} for count in "841")
TWO_EACH = {**TWO_HOSTS, "MA_NUM_GPUS": "2"}
CARD = {**TWO_HOSTS, "RANK_SIZE": "4"}
"""One process per card, of which RANK_ID is given."""
TABLE = "v0_modelarts_k8s_jobstart_2x8_unordered.json"


@pytest.mark.parametrize(
    ("environ", "starts", "one_process", "copied"),
    [
        ({}, False, False, (0,)),
        ({"MA_NUM_GPUS": "8"}, False, False, (0,)),  # not inside ModelArts
        (ONE, False, False, (0,)),
        (FOUR, True, False, (0, 1, 2, 3)),
        (FOUR, True, True, (0,)),
        ({**TWO_EACH, "VC_TASK_INDEX": "1"}, True, False, (2, 3)),
        ({**TWO_EACH, "VC_TASK_INDEX": "1"}, True, True, ()),
        ({**TWO_HOSTS, "MA_NUM_GPUS": "1"}, True, False, (0,)),
        ({**CARD, "RANK_ID": "0"}, False, False, (0, 1)),
        ({**CARD, "RANK_ID": "1"}, False, False, ()),
        ({**CARD, "RANK_ID": "2"}, False, False, (2, 3)),
        ({**EIGHT, "RANK_ID": "0", "RANK_SIZE": "8"}, False, False, tuple(range(8))),
        ({**EIGHT, "RANK": "0", "WORLD_SIZE": "8"}, False, False, (0,)),
    ],
)
def test_who_starts_the_ranks_and_whose_files_a_process_copies(
    environ: dict[str, str], starts: bool, one_process: bool, copied: tuple[int, ...]
) -> None:
    assert modelarts_job.must_start_ranks(environ) is starts
    process = ALONE if starts else find_process(environ)
    assert modelarts_job.ranks_to_copy(process, environ, one_process=one_process) == copied


def test_files_that_a_process_copies_by_the_platforms_table(samples: Path) -> None:
    environ = {**INSIDE, "RANK_TABLE_FILE": str(samples / TABLE)}
    for rank, expected in ((0, tuple(range(8))), (7, ()), (8, tuple(range(8, 16)))):
        own = {**environ, "RANK_ID": str(rank)}
        assert modelarts_job.ranks_to_copy(find_process(own), own, one_process=False) == expected


def test_places_by_the_names_of_the_hosts() -> None:
    environ = {**TWO_HOSTS, "MA_NUM_GPUS": "4", "VC_TASK_INDEX": "1"}
    table, places = modelarts_job.find_places(environ)
    assert table is None and places.master == "job-0.job" and places.own_host == "job-1.job"
    own = [(place.rank, place.device_id, place.local_rank) for place in places.own]
    assert own == [(4, 0, 0), (5, 1, 1), (6, 2, 2), (7, 3, 3)]
    assert places.world_size == 8
    for wrong, message in (
        ({"MA_NUM_HOSTS": "3"}, "MA_NUM_HOSTS=3, but VC_WORKER_HOSTS=job-0.job,job-1.job names 2"),
        ({"VC_TASK_INDEX": "2"}, "VC_TASK_INDEX=2, but VC_WORKER_HOSTS names 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            modelarts_job.find_places(environ | wrong)


def test_places_by_the_platforms_table(samples: Path, tmp_path: Path) -> None:
    environ = {**INSIDE, "RANK_TABLE_FILE": str(samples / TABLE), "TMPDIR": str(tmp_path)}
    environ["VC_TASK_INDEX"] = "1"
    written, places = modelarts_job.find_places(environ)
    assert (places.own_host, places.master) == ("10.19.1.79", "10.19.1.142")
    assert [place.rank for place in places.own] == list(range(8, 16))
    assert written is not None and '"version": "1.0"' in written.read_text()
    other = modelarts_job.find_places({**environ, "MA_CURRENT_IP": "10.19.1.142"})[1]
    assert other.own_host == "10.19.1.142"
    message = "nor VC_TASK_INDEX=2 says which server of .*: it holds 10.19.1.142, 10.19.1.79"
    with pytest.raises(ConfigError, match=message):
        modelarts_job.find_places({**environ, "VC_TASK_INDEX": "2"})


def test_variables_that_a_process_per_card_lacks(samples: Path, tmp_path: Path) -> None:
    table = samples / "v0_modelarts_cce_1x1.json"
    environ = {**INSIDE, "RANK_TABLE_FILE": str(table), "RANK_ID": "0", "TMPDIR": str(tmp_path)}
    environ["HCCL_CONNECT_TIMEOUT"] = "600"
    found = modelarts_job.platform_variables(Process(device_id=0, launcher="rank table"), environ)
    assert '"rank_id": "0"' in Path(found.pop("RANK_TABLE_FILE")).read_text()
    assert found == {
        "RANK_SIZE": "1", "DEVICE_ID": "0", "HCCL_CONNECT_TIMEOUT": "600",
        "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
