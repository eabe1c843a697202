"""Hosts of a launch that the command does not give, found in the variables of a step of Slurm."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.launcher.nodes import settle_nodes
from common.launcher.request import LaunchRequest

STEP = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
    "MASTER_PORT": "29512",
}
"""Variables that srun(1) lists, of the second of two tasks on two nodes."""
REQUEST = LaunchRequest(
    argv=(), config=Path("run.yaml"), mode="train", numbers=range(8), overrides=()
)


@pytest.fixture(autouse=True)
def step(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "MASTER_", "RANK", "WORLD_SIZE", "PET_")):
            monkeypatch.delenv(name)
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)


def test_a_step_with_one_task_a_node_tells_its_hosts_unless_the_command_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = settle_nodes(REQUEST, meet=True)
    assert (found.nnodes, found.node_rank, found.master) == (2, 1, "gpu03:29512")
    given = replace(REQUEST, master="10.0.0.1:29500", nnodes=4, node_rank=3)
    assert settle_nodes(given, meet=True) == given
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert settle_nodes(REQUEST, meet=True) == REQUEST, "one task is a shell of srun --pty"


def test_several_tasks_on_a_node_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "4(x2)")
    with pytest.raises(ConfigError, match=r"started 4 tasks on this node.*--ntasks-per-node=1"):
        settle_nodes(REQUEST, meet=True)
