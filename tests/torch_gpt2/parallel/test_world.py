"""Ranks that meet, as threads with a store over the loopback interface, and limits of groups. Ranks
that the project's own script or DeepSpeed's launcher starts, against one process.
"""

import datetime
import importlib.util
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from common.cluster.environment import Process, torch_variables
from common.errors import ConfigError, RunError
from common.processes.addresses import listen
from tests.layouts import TENSOR, TOLERANCE, TORCH
from tests.ranks import ROOT, free_port
from tests.run_scripts import clean_environment
from tests.tiny import require_equal, tiny_config, train_here
from torch_gpt2.device import select_device
from torch_gpt2.parallel import world
from torch_gpt2.parallel.world import _open_store
from torch_gpt2.private_api import limit_new_groups


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    """Rank 0 of three at a free port, with torch's variables of all."""
    first = Process(world_size=3, local_world_size=3, master="127.0.0.1", port=free_port())
    for name, value in torch_variables(first).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    return first


def seconds(number: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=number)


def test_a_port_that_is_taken_is_named(process: Process) -> None:
    message = rf"port {process.port} of 127.0.0.1 is taken"
    with listen("127.0.0.1", process.port), pytest.raises(ConfigError, match=message):
        _open_store(process, seconds(5))


def test_attempts_of_one_store_are_apart(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torchrun's agent keeps the store: an early rank does not take what the attempt before has written."""
    agent = dist.TCPStore("127.0.0.1", process.port, None, True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with ThreadPoolExecutor(3) as pool:
        for attempt in (b"1", b"2"):
            waiting = {rank: pool.submit(_open_store, replace(process, rank=rank), seconds(30)) for rank in (1, 2, 0)}
            stores = [waiting[rank].result(timeout=30) for rank in range(3)]
            assert [store.check(["key"]) for store in stores] == [False] * 3
            stores[0].set("key", attempt)
            assert [store.get("key") for store in stores] == [attempt] * 3
        early = pool.submit(_open_store, replace(process, rank=1), seconds(1))
        with pytest.raises(RunError, match=r"has waited 1 s .* for rank 0; see"):
            early.result(timeout=30)
    assert agent.num_keys() > 0


@pytest.mark.parametrize("dies", [False, True])
def test_the_rank_that_does_not_come_is_named(process: Process, *, dies: bool) -> None:
    """dies: it came, and was killed before all were there."""
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(_open_store, process, seconds(2))
        second = pool.submit(_open_store, replace(process, rank=1, local_rank=1), seconds(3))
        if dies:
            gone = dist.TCPStore("127.0.0.1", process.port, None, False, wait_for_workers=False)
            gone.wait(["attempt"], seconds(5))
            gone.set(f"{gone.get('attempt').decode()} rank 2 has come", b"")
        with pytest.raises(RunError, match=r"rank 0 of 3 has waited 2 s .* for rank 2; see"):
            first.result(timeout=30)
        with pytest.raises((RunError, RuntimeError)):
            second.result(timeout=30)


def test_groups_without_a_limit_get_that_of_the_run() -> None:
    """DeepSpeed makes groups of its own; torch gives a group 30 minutes."""
    usual, limit = dist.distributed_c10d.default_pg_timeout, seconds(77)
    limit_new_groups(limit)
    dist.init_process_group("cpu:gloo,cuda:gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
    try:
        for group in (dist.group.WORLD, dist.new_group([0])):
            assert group._get_backend(torch.device("cpu")).options._timeout == limit
    finally:
        dist.destroy_process_group()
        limit_new_groups(usual)


def test_hccl_waits_as_long_as_the_run(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own limit is 1836 s, and runtime.stall_limit 3600 s with a margin of 30."""
    monkeypatch.setattr(world, "limit_new_groups", lambda _: None)
    monkeypatch.setattr(world, "_open_store", Mock(side_effect=ConfigError("enough")))
    for given, found in ((None, "3672"), ("60", "60")):
        monkeypatch.delenv("HCCL_EXEC_TIMEOUT", raising=False)
        if given:
            monkeypatch.setenv("HCCL_EXEC_TIMEOUT", given)
        opened = world.open_world(tiny_config(), process, select_device("cpu"))
        with pytest.raises(ConfigError, match="enough"), opened:
            pass
        assert os.environ["HCCL_EXEC_TIMEOUT"] == found


OURS = "bash scripts/run_distribute.sh none {config} [0,2) train"
# the last two words spare the launcher its questions over ssh
HOSTFILE = "--hostfile {folder}/hostfile --include localhost:1,3 --master_addr 127.0.0.1"
THEIRS = "{python} -m deepspeed.launcher.runner {options} --master_port {port} run_gpt2.py"
THEIRS += " --config {config} --run_mode train"
STARTS: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "run_distribute": (OURS, "", {}, 2),
    "hostfile": (THEIRS, f"{HOSTFILE} --no_ssh_check", {"engine": "deepspeed"} | TENSOR, 1),
    "two accelerators": (THEIRS, "--num_accelerators 2", {"engine": "deepspeed"}, 2),
}
"""Command and options; settings, and ranks of the data axis."""
MARKS = {"hostfile": pytest.mark.long, "two accelerators": pytest.mark.campaign}


@pytest.mark.parametrize("start", [pytest.param(name, marks=MARKS.get(name, ())) for name in STARTS])
def test_launchers_train_as_one_process(corpus_prefix: Path, tmp_path: Path, start: str) -> None:
    command, options, settings, replicas = STARTS[start]
    if "engine" in settings and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    (tmp_path / "hostfile").write_text("localhost slots=4\n")
    alone, run = (
        TORCH.job(tmp_path / name, corpus_prefix, train__max_steps=3, **changes)
        for name, changes in (("alone", {}), ("run", settings | {"train__micro_batch_size": 1}))
    )
    config = tmp_path / "run.yaml"
    config.write_text(json.dumps(run))
    words = {"python": sys.executable, "port": free_port(), "folder": tmp_path, "config": config}
    words["options"] = options.format(**words)
    environ = clean_environment(DS_ACCELERATOR="cpu", PYTHONPATH=str(ROOT))
    command = command.format(**words).split()
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    require_equal(tmp_path / "run", train_here(alone), TOLERANCE)
    assert f"micro 1 x data parallel {replicas} x" in done.stdout
