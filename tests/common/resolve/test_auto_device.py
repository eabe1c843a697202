"""A refusal that follows from ``device: auto`` names its cause."""

import pytest

from common.config.load import build_config
from common.config.schema import RunConfig
from common.errors import ConfigError, DeviceError
from common.resolve.auto_device import check_device_id, naming_auto
from tests.tiny import tiny_run


def config(device: str, device_id: int = 0) -> RunConfig:
    return build_config(tiny_run(device=device, context={"device_id": device_id}))


def test_the_cause_comes_first() -> None:
    message = (
        r"^device=auto chose cpu because no GPU or NPU was found .* does not support this: no"
        r" bfloat16$"
    )
    with (
        pytest.raises(DeviceError, match=message),
        naming_auto(config("auto"), "cpu", "GPU or NPU"),
    ):
        raise DeviceError("no bfloat16")


@pytest.mark.parametrize(("device", "kind"), [("cpu", "cpu"), ("auto", "npu"), ("npu", "npu")])
def test_other_refusals_stay_as_they_are(device: str, kind: str) -> None:
    with pytest.raises(ConfigError, match=r"^refused$"), naming_auto(config(device), kind, "GPU"):
        raise ConfigError("refused")


def test_the_number_of_the_device_is_judged_once_auto_is_known() -> None:
    check_device_id(config("auto", 3), "npu")
    check_device_id(config("auto"), "cpu")
    with pytest.raises(ConfigError, match=r"context.device_id=3: there is one CPU"):
        check_device_id(config("auto", 3), "cpu")
