"""Explanation of ``device: auto``, for errors that follow from its choice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.config.schema import RunConfig
from common.errors import ConfigError, DeviceError


def sees_ascend(root: Path = Path("/")) -> bool:
    """Tell whether this host has an Ascend, by its device files."""
    return any((root / "dev").glob("davinci[0-9]*"))


def sees_accelerator(root: Path = Path("/")) -> bool:
    """Tell whether this host has an Ascend or a GPU, by its device files."""
    return sees_ascend(root) or any((root / "dev").glob("nvidia[0-9]*"))


@contextmanager
def naming_auto(config: RunConfig, kind: str, missing: str) -> Iterator[None]:
    """Explain an error that follows from ``auto`` having chosen ``cpu``.

    missing: the device that was not found, such as "Ascend".
    """
    try:
        yield
    except (ConfigError, DeviceError) as error:
        if config.device != "auto" or kind != "cpu":
            raise
        raise type(error)(
            f"device=auto chose cpu because no {missing} was found (if this host has one,"
            f" device={_WANTED[config.backend]} reports why), and the CPU does not support this:"
            f" {error}"
        ) from None


_WANTED = {"torch": "cuda or device=npu", "mindspore": "npu"}


def check_device_id(config: RunConfig, kind: str) -> None:
    """Reject the number of a device that has no numbers. Raises ConfigError.

    kind: kind of the run's device.
    """
    if kind == "cpu" and config.context.device_id:
        raise ConfigError(f"context.device_id={config.context.device_id}: there is one CPU, number 0; leave it out")
