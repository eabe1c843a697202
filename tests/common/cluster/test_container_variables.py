"""Variables that containers and foreign launchers leave behind, and who a process is by them."""

import pytest

from common.cluster.environment import ALONE, Process, announced_world_size, find_process
from common.errors import ConfigError

PMI = {"PMI_RANK": "1", "PMI_SIZE": "2"}
TORCHRUN_OF_ONE = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "29501",
}


def test_ranks_of_mpi_that_do_not_know_their_place_on_the_host() -> None:
    with pytest.raises(ConfigError) as caught:
        find_process(PMI)
    assert str(caught.value) == (
        "environment: PMI_SIZE=2, but not which of these processes this one is on its host; start"
        " them with Open MPI's mpirun, srun or torchrun, or unset PMI_SIZE for one process"
    )
    assert find_process({**PMI, "PMI_RANK": "0", "PMI_SIZE": "1"}) == ALONE


def test_rank_0_of_a_container_that_names_no_size() -> None:
    alone = {"RANK_ID": "0", "DEVICE_ID": "3"}
    found = find_process(alone)
    assert (found.rank, found.world_size, found.device_id) == (0, 1, 3)
    assert found.remarks == (
        "RANK_ID=0, but neither RANK_SIZE nor RANK_TABLE_FILE is set: assuming a run of"
        " one process",
    )
    assert announced_world_size(alone) is None
    for environ in ({"RANK_ID": "1"}, {"RANK_ID": "0", "MA_NUM_HOSTS": "2"}):
        with pytest.raises(
            ConfigError, match=f"RANK_ID={environ['RANK_ID']}, but RANK_SIZE is not set; set both"
        ):
            find_process(environ)


def test_torchrun_with_one_process_in_a_container_of_one() -> None:
    """Both give the same ranks; the device is the container's."""
    container = {"RANK_ID": "0", "RANK_SIZE": "1", "DEVICE_ID": "5"}
    assert find_process({**TORCHRUN_OF_ONE, **container, "TORCHELASTIC_RUN_ID": "none"}) == Process(
        master="a", port=29501, launcher="torchrun"
    )
    assert find_process({**TORCHRUN_OF_ONE, **container}).device_id == 5, (
        "ours, printed by a dry run and started by hand"
    )
