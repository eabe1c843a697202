"""Runs that fit the memory, runs that cannot, and the message of a failed allocation."""

import errno
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from common.accelerators import Hardware
from common.cluster.environment import Process
from common.config.resolved import as_run
from common.errors import ConfigError
from common.parallel.run import Run
from common.planner import fitting
from common.planner.fitting import asked_for, check_memory, fits_machine, machine_memory, memory_limit, out_of_memory
from common.planner.plan import make_plan
from tests.common.planner.runs import small

CPU = Hardware(kind="cpu")
TRAIN = {"max_steps": 10, "micro_batch_size": 2, "accumulation_steps": None}


def config(hardware: Hardware = CPU, data: int = 1, **sections: Any) -> Run:
    train = {**TRAIN, **sections.pop("train", {})}
    model = {"hidden_size": 256, "seq_length": 64, **sections.pop("model", {})}
    run = small(data=data, train=train, model=model, **sections)
    return as_run(Run, run, hardware=hardware)


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Check a training on a machine with this much memory, and return the warning."""

    def check(run: Run, there: int, free: int, **options: Any) -> str:
        caplog.clear()
        monkeypatch.setattr(fitting, "machine_memory", lambda: there)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
        check_memory(run, **{"training": True, **options})
        return caplog.text

    monkeypatch.setattr(logging.getLogger("gpt2"), "propagate", True)
    return check


def test_memory_of_a_machine_or_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=5000))
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(total=1000))
    assert machine_memory(tmp_path) == 6000
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    for limit, expected in (("max\n", 6000), ("4096\n", 4096)):
        (tmp_path / "sys/fs/cgroup/memory.max").write_text(limit)
        assert machine_memory(tmp_path) == expected


def test_weights_and_moments_are_certain_the_rest_is_a_warning(warned: Any) -> None:
    run = config()
    plan = make_plan(run).stages[0]
    state = plan.weights + plan.optimizer
    likely = plan.peak + state  # a checkpoint is written from a copy
    said = "memory is short: a rank needs .* GiB by the plan, and .* GiB of this machine's .* GiB are free; end other"
    assert re.search(said, warned(run, 2 * likely, likely - 1))
    assert warned(run, likely, likely) == ""
    for there in (likely - 1, state):
        assert "may not fit" in warned(run, there, likely)
    with pytest.raises(ConfigError, match=r"a rank needs .* for its weights and optimizer state, "):
        warned(run, state - 1, likely)
    assert warned(run, state - 1, likely, training=False) == ""  # generation has no moments
    with pytest.raises(ConfigError, match=r"2 ranks need"):  # that share the machine
        warned(config(data=2), 2 * state - 1, likely, process=Process(world_size=2, local_world_size=2))


def test_a_device_has_its_own_memory(warned: Any) -> None:
    assert warned(config(Hardware(kind="cuda")), 0, 0) == ""
    with pytest.raises(ConfigError, match=r"a rank needs .* but the device has 0.00 GiB"):
        eight = Process(world_size=8, local_world_size=8)
        warned(config(Hardware(kind="cuda", memory=1000), data=8), 0, 0, process=eight)
    for section, key in (("model", "vocab_multiple"), ("train", "micro_batch_size"), ("model", "num_layers")):
        with pytest.raises(ConfigError, match=r"does not fit: .*--run_mode plan shows"):
            warned(config(**{section: {key: 2**40}}), 2**36, 2**36)


def test_ranks_share_the_memory_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "machine_memory", lambda: 1000)
    assert [memory_limit(config(), CPU, ranks=ranks) for ranks in (1, 4)] == [940, 235]
    for size, reserve in ((80, 4.8), (16, 2.4)):
        device = Hardware(kind="cuda", memory=size * 2**30)
        found = memory_limit(config(), device, ranks=4)
        assert found == pytest.approx((size - reserve) * 2**30)


class OutOfMemoryError(RuntimeError):
    """By the name of torch's."""


TORCHS = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 419430400 bytes. Error code 12"


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (MemoryError("Unable to allocate 8.00 PiB"), "Unable to allocate 8.00 PiB"),  # numpy's
        (MemoryError(), "the system gave no more"),
        (RuntimeError(f"[enforce fail at alloc_cpu.cpp:127] err == 0. {TORCHS}"), "0.39 GiB at once"),
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0"), "Tried to allocate 20.00 GiB"),
        (RuntimeError("Device memory isn't enough and alloc failed"), "memory isn't enough"),
        (RuntimeError("Storage size calculation overflowed with sizes=[1, 2]"), "overflowed"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "Cannot allocate memory"),
        (RuntimeError("The size of tensor a (3) must match"), None),
        (OSError(errno.ENOSPC, "No space left on device"), None),
    ],
)
def test_the_requested_size_is_read_from_the_error(error: BaseException, asked: str | None) -> None:
    assert asked_for(error) is None if asked is None else asked in str(asked_for(error))


def test_one_message_with_the_plan_the_machine_and_what_each_key_frees() -> None:
    """Compare with the plans of runs that were written that way."""
    model = {"hidden_size": 1024, "num_layers": 12, "num_heads": 16, "seq_length": 1024}
    train = {"micro_batch_size": 8, "global_batch_size": 16}
    run = config(data=2, model=model, train=train)
    message = out_of_memory(MemoryError(), run, training=True)
    assert message is not None and "\n" not in message and message.startswith("out of memory: ")
    assert f"holds {make_plan(run).peak / 2**30:.2f} GiB at most" in message
    assert "; this machine has " in message
    for section, change, words in (
        ("train", {"micro_batch_size": 4}, "train.micro_batch_size (now 8) to 4"),
        ("train", {"recompute": "full"}, "set train.recompute=full"),
        ("parallel", {"zero_stage": 1}, "parallel.zero_stage (now 0) to 1"),
    ):
        changes = {"train": train} | {section: (train if section == "train" else {}) | change}
        other = make_plan(config(data=2, model=model, **changes))
        less = (make_plan(run).peak - other.peak) / 2**30
        assert less > 0.01
        assert f"{words} (frees {less:,.2f} GiB)" in message
    assert out_of_memory(ValueError("x"), run) is None


def test_the_plan_says_when_this_machine_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "machine_memory", lambda root: 2000)
    line = str(fits_machine(config(), 10**9, tmp_path))
    assert line.startswith("does not fit this machine: a rank needs 0.93 GiB, and there are 0.00 GiB; ")
    assert fits_machine(config(), 1000, tmp_path) is None
    assert fits_machine(config(device="cuda"), 10**9, tmp_path) is None
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    assert fits_machine(config(), 10**9, tmp_path) is None
    assert fits_machine(config(device="cpu"), 10**9, tmp_path) is not None
