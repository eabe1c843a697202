"""One message names what MindSpore or this machine cannot do, before any graph is compiled. A rank
looks for the scheduler before MindSpore waits itself, which nothing can interrupt.
"""

import tests.needs_mindspore  # noqa: F401

# isort: split
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, create_autospec

import mindspore as ms
import numpy as np
import pytest

from common.accelerators import GIB
from common.cluster.environment import Process
from common.errors import ConfigError, DeviceError, GPT2Error, RunError
from common.parallel.kernels import has_attention_kernel
from common.processes.addresses import free_port, listen
from common.resolve.vendor_settings import mindspore_context
from mindformers_gpt2.device import MindSporeDevice, check_support, open_device, select_device
from mindformers_gpt2.parallel import world
from mindformers_gpt2.parallel.world import _wait_for_scheduler
from tests.common.config.test_presets import ROOT
from tests.mindformers_gpt2.test_model import make_config

ASCEND = MindSporeDevice(kind="npu", index=0, name="Ascend910B3")
SECOND = Process(rank=1, world_size=2)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"device": "npu"}, DeviceError, "device=npu.*no Ascend device"),
        ({"device": "cuda"}, DeviceError, "device=cuda.*no GPU device"),
        ({"device": "auto", "context__device_target": "Ascend"}, DeviceError, "device=npu"),
        ({"precision": "bf16"}, DeviceError, "precision.compute=bfloat16"),
        ({"context__max_device_memory": "30GB"}, ConfigError, "for accelerators"),
        ({"context__enable_graph_kernel": True}, ConfigError, "for accelerators"),
        ({"context": {"save_graphs": True, "save_graphs_path": "/proc/none"}}, ConfigError, "path=/proc/none"),
    ],
)
def test_refused_with_the_reason(changes: dict[str, Any], error: type[GPT2Error], message: str) -> None:
    with pytest.raises(error, match=message):
        open_device(make_config(**changes))


def test_numpy_2_and_cached_graphs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MS_COMPILER_CACHE_ENABLE", "1")
    with pytest.raises(ConfigError, match="may be of another function; unset it"):
        open_device(make_config())
    monkeypatch.setattr(np, "__version__", "2.1.0")
    with pytest.raises(ConfigError, match=r"numpy 2\.1\.0; pip install numpy==1\.26\.4"):
        select_device("cpu")


def test_without_mindspore_the_front_door_says_how_to_install_it(tmp_path: Path, corpus_prefix: Path) -> None:
    (tmp_path / "mindspore.py").write_text("raise ImportError('No module named mindspore')")
    preset = ROOT / "configs/gpt2/run_gpt2_tiny.yaml"
    command = [sys.executable, str(ROOT / "run_gpt2.py"), "--config", str(preset)]
    command += ["--run_mode", "train", "backend=mindspore", f"data.train={corpus_prefix}"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "backend=mindspore: it cannot be imported" in done.stderr
    assert "pip install -c constraints.txt -e '.[mindspore]'" in done.stderr


def test_only_later_ascends_have_bfloat16() -> None:
    for name in ("910A", "910ProB", "910B", "910B3", "910B4-1"):  # B1 to B4-1 are the Atlas A2
        expected = name in ("910B3", "910B4-1")
        device = MindSporeDevice(kind="npu", index=0, name=f"Ascend{name}")
        assert (device.supports("bfloat16"), has_attention_kernel(device.kind, device.name)) == (expected, expected)
        if not expected:
            with pytest.raises(DeviceError, match="bfloat16"):
                check_support(make_config(precision="bf16", device="npu"), device)


def test_memory_is_the_tables_until_the_device_says_its_own_and_its_limit_is_set_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the function that MindSpore names in place of set_context; it refuses a second call."""
    told = SimpleNamespace(total_memory=0)
    monkeypatch.setattr(ms.hal, "get_device_properties", lambda _: told)
    assert ASCEND.total_memory() == 64 * GIB
    assert MindSporeDevice(kind="npu", index=0, name="Ascend?").total_memory() is None
    told.total_memory = 65_000_000_000
    assert ASCEND.total_memory() == 65_000_000_000
    monkeypatch.setattr("mindformers_gpt2.device.select_device", lambda *_, **__: ASCEND)
    monkeypatch.setattr(ms.runtime, "set_memory", create_autospec(ms.runtime.set_memory))
    for _ in range(2):
        open_device(make_config(device="npu", context={"max_device_memory": "31GB"}))
    ms.runtime.set_memory.assert_called_once_with(max_size="31GB")


def test_the_context_in_mindspores_words() -> None:
    """All settings of MindFormers' section; 0 and 1 are its names of the modes."""
    assert mindspore_context(make_config()) == {"mode": ms.GRAPH_MODE, "max_call_depth": 10000}
    words: dict[str, Any] = {"max_call_depth": 2000, "save_graphs": True, "graph_kernel_flags": "--opt_level=2"}
    found = mindspore_context(make_config(context=words | {"mode": 1, "enable_graph_kernel": True}))
    own = {"mode": ms.PYNATIVE_MODE, "save_graphs_path": "unused/graph", "jit_config": {"jit_level": "O1"}}
    assert found == words | own
    assert all(f"{name} (" in ms.set_context.__doc__ for name in found if name != "graph_kernel_flags")


def test_graphs_have_the_level_of_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """ms.jit has a default of its own, which would go before the context's."""
    compiled: list[Any] = []
    monkeypatch.setattr(ms, "jit", lambda function, **options: compiled.append(options["jit_level"]))
    ms.set_context(mode=ms.GRAPH_MODE)
    for level in ("O1", "O0"):
        ms.set_context(jit_config={"jit_level": level})
        ASCEND.compile(len)
    assert compiled == ["O1", "O0"]


def test_a_rank_first_looks_for_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MS_TOPO_TIMEOUT", "HCCL_EXEC_TIMEOUT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    port = free_port()
    monkeypatch.setenv("MS_SCHED_HOST", "127.0.0.1")
    monkeypatch.setenv("MS_SCHED_PORT", str(port))
    with pytest.raises(RunError, match=rf"waited 0.2 s .* 127.0.0.1:{port} for MindSpore's sched"):
        _wait_for_scheduler(SECOND, 0.2)
    with listen("127.0.0.1", port):
        _wait_for_scheduler(SECOND, 20000.0)
    assert os.environ["MS_TOPO_TIMEOUT"] == "0", "the first wait has set it"
    monkeypatch.setenv("MS_SCHED_HOST", "no-such-host.invalid")
    monkeypatch.delenv("HCCL_EXEC_TIMEOUT")
    with pytest.raises(ConfigError, match=r"MS_SCHED_HOST=no-such-host.invalid is not an address"):
        _wait_for_scheduler(SECOND, 20000.0)
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
    monkeypatch.setattr(world, "init", Mock(side_effect=RuntimeError(text)))
    monkeypatch.setattr(world, "_wait_for_scheduler", lambda *_: None)
    monkeypatch.setenv("MS_SCHED_HOST", "127.0.0.1")
    with pytest.raises(kind, match=message), world.open_world(make_config(), SECOND, ASCEND):
        pass
