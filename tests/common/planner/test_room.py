"""Runs that fit the memory, runs that cannot, and the message of a failed allocation."""

import errno
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.accelerators import Hardware
from common.config.load import build_config
from common.config.resolved import as_run
from common.errors import ConfigError
from common.parallel.run import Run
from common.planner import room
from common.planner.plan import make_plan
from common.planner.room import asked_for, check_room, fits_machine, machine_memory, out_of_memory
from common.resolve.derive import resolve_config
from tests.config_overrides import changed


def config(world_size: int = 1, **changes: Any) -> Run:
    tree: dict[str, Any] = {
        "output_dir": "out",
        "model": {
            "num_layers": 4,
            "hidden_size": 256,
            "num_heads": 4,
            "seq_length": 64,
            "vocab_size": 1000,
        },
        "train": {"max_steps": 10, "micro_batch_size": 2},
        "optimizer": {"learning_rate": 0.1},
    }
    return resolve_config(build_config(changed(tree, changes)), world_size=world_size)


def machine(folder: Path, kilobytes: int, cgroup: str | None = None) -> Path:
    (folder / "proc").mkdir()
    (folder / "proc" / "meminfo").write_text(
        f"MemTotal: {kilobytes} kB\nMemFree: 1 kB\nSwapTotal: 1000 kB\n"
    )
    if cgroup is not None:
        (folder / "sys" / "fs" / "cgroup").mkdir(parents=True)
        (folder / "sys" / "fs" / "cgroup" / "memory.max").write_text(cgroup)
    return folder


@pytest.mark.parametrize(
    ("cgroup", "expected"), [(None, 6000 * 1024), ("max\n", 6000 * 1024), ("4096\n", 4096)]
)
def test_memory_of_a_machine_or_a_container(
    tmp_path: Path, cgroup: str | None, expected: int
) -> None:
    assert machine_memory(machine(tmp_path, 5000, cgroup)) == expected


CPU = Hardware(kind="cpu")


def on(hardware: Hardware, run: Run) -> Run:
    return as_run(Run, run, hardware=hardware)


def test_a_system_that_does_not_say(tmp_path: Path) -> None:
    assert machine_memory(tmp_path) is None
    assert fits_machine(config(), 10**15, tmp_path) is None


def test_weights_and_moments_are_certain_the_rest_is_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = on(CPU, config())
    plan = make_plan(run).stages[0].memory
    state = plan.weights + plan.optimizer
    likely = plan.peak + state  # a checkpoint is written from a copy
    monkeypatch.setattr(room, "_of_meminfo", lambda *_: likely - 1)
    monkeypatch.setattr(room, "machine_memory", lambda: 2 * likely)
    short = check_room(run, training=True)
    assert short is not None and re.match(
        "memory is short: a rank needs .* GiB by the plan, and .* GiB of this machine's .* GiB are"
        " free; end other programs, or lower train.micro_batch_size",
        short,
    )
    monkeypatch.setattr(room, "_of_meminfo", lambda *_: likely)
    for there, expected in (
        (likely, None),
        (likely - 1, "may not fit"),
        (state, "may not fit"),
    ):
        monkeypatch.setattr(room, "machine_memory", lambda there=there: there)
        warning = check_room(run, training=True)
        assert warning is None if expected is None else expected in str(warning)
    monkeypatch.setattr(room, "machine_memory", lambda: state - 1)
    with pytest.raises(
        ConfigError,
        match=r"does not fit: a rank needs .* for its weights and optimizer state, but this"
        r" machine has",
    ):
        check_room(run, training=True)
    assert check_room(run) is None  # generation has no moments
    monkeypatch.setattr(room, "machine_memory", lambda: 2 * state - 1)
    with pytest.raises(ConfigError, match=r"2 ranks need"):  # that share the machine
        check_room(run, ranks=2, training=True)


def test_a_device_has_its_own_memory() -> None:
    run = on(Hardware(kind="cuda"), config())
    assert check_room(run, training=True) is None
    with pytest.raises(ConfigError, match=r"the device has 0.00 GiB"):
        check_room(on(Hardware(kind="cuda", memory=1000), run), ranks=8, training=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"model__vocab_multiple": 2**40},
        {"train__micro_batch_size": 2**40},
        {"model__num_layers": 2**40},
    ],
)
def test_runs_too_large_for_the_machine_are_refused_before_they_allocate(
    changes: dict[str, Any],
) -> None:
    with pytest.raises(ConfigError, match=r"does not fit: .*--run_mode plan shows"):
        check_room(on(CPU, config(**changes)), training=True)


def numpy_error() -> MemoryError:
    with pytest.raises(MemoryError) as caught:
        np.empty(2**50, np.float64)
    return caught.value


class OutOfMemoryError(RuntimeError):
    """By the name of torch's."""


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (numpy_error(), "Unable to allocate 8.00 PiB"),
        (MemoryError(), "the system gave no more"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't"
            " allocate memory: you tried to allocate 419430400 bytes. Error code 12 (Cannot"
            " allocate memory)"), "0.39 GiB at"
                          " once"),
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has ..."), "Tried"
            " to allocate 20.00 GiB"),
        (RuntimeError("Device memory isn't enough and alloc failed, kernel name: ..., alloc size:"
            " 8"), "memory isn't enough"),
        (RuntimeError("Out of memory. Memory malloc failed."), "Out of memory"),
        (RuntimeError("Storage size calculation overflowed with sizes=[1, 2]"), "overflowed"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "Cannot allocate memory"),
        (RuntimeError("The size of tensor a (3) must match"), None),
        (ValueError("not enough values to unpack"), None),
        (OSError(errno.ENOSPC, "No space left on device"), None),
    ],
)  # fmt: skip
def test_the_requested_size_is_read_from_the_error(error: BaseException, asked: str | None) -> None:
    assert asked_for(error) is None if asked is None else asked in str(asked_for(error))


def test_one_message_with_the_plan_the_machine_and_a_way_out() -> None:
    run = config(train__micro_batch_size=8)
    message = out_of_memory(MemoryError(), run, training=True)
    assert message is not None and "\n" not in message
    for part in (
        "out of memory: ",
        "this machine has ",
        "train.micro_batch_size (now 8)",
        "train.recompute=full",
        "parallel.zero_stage",
    ):
        assert part in message
    assert f"holds {make_plan(run).peak / 2**30:.2f} GiB at most" in message
    assert out_of_memory(ValueError("x"), run) is None


def test_advice_says_how_much_each_key_frees() -> None:
    """Compare with the plans of runs that were written that way."""
    sizes = {
        "model__hidden_size": 1024,
        "model__num_layers": 12,
        "model__num_heads": 16,
        "model__seq_length": 1024,
        "train__global_batch_size": 16,
    }
    run = config(2, train__micro_batch_size=8, **sizes)
    message = out_of_memory(MemoryError(), run, training=True)
    assert message is not None
    for key, value, words in (
        ("train__micro_batch_size", 4, "train.micro_batch_size (now 8) to 4"),
        ("train__recompute", "full", "set train.recompute=full"),
        ("parallel__zero_stage", 1, "parallel.zero_stage (now 0) to 1"),
    ):
        other = config(2, **{"train__micro_batch_size": 8, **sizes, key: value})
        less = (make_plan(run).peak - make_plan(other).peak) / 2**30
        assert less > 0.01
        assert f"{words} (frees {less:,.2f} GiB)" in message


def test_the_plan_says_when_this_machine_is_too_small(tmp_path: Path) -> None:
    folder = machine(tmp_path, 1000)
    line = fits_machine(config(), 10**9, folder)
    assert line is not None and re.match(
        r"does not fit this machine: a rank needs 0.93 GiB, and there are 0.00 GiB; ", line
    )
    assert fits_machine(config(), 1000, folder) is None
    assert fits_machine(config(device="cuda"), 10**9, folder) is None
    (folder / "dev").mkdir()
    (folder / "dev" / "nvidia0").touch()
    assert fits_machine(config(), 10**9, folder) is None
    assert fits_machine(config(device="cpu"), 10**9, folder) is not None
