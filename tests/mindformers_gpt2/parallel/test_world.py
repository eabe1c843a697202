"""A rank looks for the scheduler before MindSpore waits itself, which nothing can interrupt."""

import os

import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed")

from common.cluster.environment import Process
from common.errors import ConfigError, RunError
from common.processes.addresses import free_port, listen
from mindformers_gpt2.parallel.world import _wait_for_scheduler


def test_a_rank_first_looks_for_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MS_TOPO_TIMEOUT", "HCCL_EXEC_TIMEOUT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    process, port = Process(rank=1, world_size=2), free_port()
    monkeypatch.setenv("MS_SCHED_HOST", "127.0.0.1")
    monkeypatch.setenv("MS_SCHED_PORT", str(port))
    with pytest.raises(RunError, match=rf"waited 0.2 s .* 127.0.0.1:{port} for MindSpore's sched"):
        _wait_for_scheduler(process, 0.2)
    with listen("127.0.0.1", port):
        _wait_for_scheduler(process, 20000.0)
    assert os.environ["MS_TOPO_TIMEOUT"] == "0", "the first wait has set it"
    monkeypatch.setenv("MS_SCHED_HOST", "no-such-host.invalid")
    monkeypatch.delenv("HCCL_EXEC_TIMEOUT")
    with pytest.raises(ConfigError, match=r"MS_SCHED_HOST=no-such-host.invalid is not an address"):
        _wait_for_scheduler(process, 20000.0)
    assert os.environ["HCCL_EXEC_TIMEOUT"] == "17340"
