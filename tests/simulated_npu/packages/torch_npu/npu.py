"""The module ``torch.npu``: the functions of the real one that programs here use. Work is done when a call returns."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import _simulated_npu as simulated
import torch

MEMORY = 8 * 2**30
_limits: dict[int, float] = {}

device_count = simulated.device_count
current_device = simulated.current_device
Stream, Event = torch.Stream, torch.Event


def _index(device: Any = None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def _lazy_init() -> None:
    pass


def set_device(device: Any) -> None:
    simulated.set_device(_index(device))


@contextmanager
def device(device: Any) -> Any:
    before = current_device()
    set_device(device)
    try:
        yield
    finally:
        set_device(before)


def get_device_name(device: Any = None) -> str:
    return "Ascend910B3"


def get_device_properties(device: Any = None) -> Any:
    return SimpleNamespace(name=get_device_name(), total_memory=MEMORY)


def is_bf16_supported() -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def synchronize(device: Any = None) -> None:
    pass


def current_stream(device: Any = None) -> torch.Stream:
    return torch.Stream(device=f"npu:{_index(device)}")


default_stream = current_stream


def stream(stream: Any) -> Any:
    return nullcontext()


def empty_cache() -> None:
    pass


def memory_allocated(device: Any = None) -> int:
    return int(simulated.memory_allocated(_index(device)))


def max_memory_allocated(device: Any = None) -> int:
    return int(simulated.max_memory_allocated(_index(device)))


def reset_peak_memory_stats(device: Any = None) -> None:
    simulated.reset_peak_memory(_index(device))


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Free and total bytes."""
    return MEMORY - memory_allocated(device), MEMORY


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    _limits[_index(device)] = fraction


def get_per_process_memory_fraction(device: Any = None) -> float:
    return _limits.get(_index(device), 1.0)


def manual_seed(seed: int) -> None:
    simulated.generator(current_device()).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        simulated.generator(index).manual_seed(seed)


def get_rng_state(device: Any = None) -> torch.Tensor:
    return simulated.generator(_index(device)).get_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    simulated.generator(_index(device)).set_state(state)
