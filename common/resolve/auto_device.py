"""What ``device: auto`` has become, said where a refusal follows from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.config.schema import RunConfig
from common.errors import ConfigError, DeviceError


def sees_ascend(root: Path = Path("/")) -> bool:
    """Tell whether this host has an Ascend, by its device files."""
    return any((root / "dev").glob("davinci[0-9]*"))


@contextmanager
def naming_auto(config: RunConfig, kind: str, missing: str) -> Iterator[None]:
    """Put the cause before a refusal that follows from ``auto`` having become ``cpu``. missing:
    what is not there, such as "Ascend".
    """
    try:
        yield
    except (ConfigError, DeviceError) as error:
        if config.device != "auto" or kind != "cpu":
            raise
        raise type(error)(
            f"device=auto became cpu because no {missing} is seen here (where there is one,"
            f" device={_WANTED[config.backend]} tells why it is not found), and the CPU refuses"
            f" this: {error}"
        ) from None


_WANTED = {"torch": "cuda or device=npu", "mindspore": "npu"}


def check_device_id(config: RunConfig, kind: str) -> None:
    """Refuse a number of a device where there is one without numbers. kind: of the device that the
    run has. Raises ConfigError.
    """
    if kind == "cpu" and config.context.device_id:
        raise ConfigError(
            f"context.device_id={config.context.device_id}: there is one CPU, number 0; leave it"
            " out"
        )
