"""A rank looks for the scheduler before MindSpore waits itself, which nothing can interrupt."""

import tests.needs_mindspore  # noqa: F401

# isort: split
import os

import pytest

from common.cluster.environment import Process
from common.errors import ConfigError, RunError
from common.processes.addresses import free_port, listen
from common.resolve.derive import resolve_config
from common.run_config import load_config
from mindformers_gpt2.device import MindSporeDevice
from mindformers_gpt2.parallel import world
from mindformers_gpt2.parallel.world import _wait_for_scheduler
from tests.common.config.test_presets import ROOT


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


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ('"hccl" wheel was not installed correctly', ConfigError, "source CANN's set_env.sh"),
        ("Get hccl rank_table_file failed", RuntimeError, "^Get hccl rank_table_file failed$"),
        ("The scheduler has gone", RunError, "no contact with the other ranks"),
    ],
)
def test_a_fault_of_this_host_is_not_lost_contact(
    text: str, kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init() -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(world, "init", init)
    monkeypatch.setattr(world, "_wait_for_scheduler", lambda *_: None)
    monkeypatch.setenv("MS_SCHED_HOST", "127.0.0.1")
    config = resolve_config(load_config(ROOT / "configs/gpt2/run_gpt2_tiny.yaml", ()))
    device = MindSporeDevice(kind="npu", index=0, name="Ascend910B3")
    process = Process(rank=1, world_size=2)
    with pytest.raises(kind, match=message), world.open_world(config, process, device):
        pass
