"""Device addresses from files of vendors' guides and from a stand-in for the driver's tool."""

import re
from pathlib import Path

import pytest
import yaml

import common.cluster.hccn as module
from common.cluster.hccn import device_addresses
from common.errors import DataError

REFUSALS = yaml.safe_load(Path(__file__).with_name("refusals.yaml").read_text())


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An hccn_tool on PATH that answers as the driver's; its /etc/hccn.conf is absent."""
    path = tmp_path / "bin" / "hccn_tool"
    path.parent.mkdir()
    answer = 'printf "ipaddr:192.168.7.%s\\nnetmask:255.255.255.0\\n" "$2"'
    path.write_text(f'#!/bin/sh\n[ "$1 $3 $4" = "-i -ip -g" ] || exit 9\n{answer}\n')
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")
    monkeypatch.setattr(module, "DEFAULT_CONF", tmp_path / "etc.conf")
    return path


def test_the_file_of_eight_devices_and_ipv4_before_ipv6(samples: Path, tmp_path: Path) -> None:
    lines = (samples / "hccn_paddle_8p.conf").read_text().split()
    expected = {int(line[8]): line[10:] for line in lines if line.startswith("address_")}
    assert device_addresses(range(8), samples / "hccn_paddle_8p.conf") == expected
    assert device_addresses([0], samples / "hccn_hixl_mixed.conf") == {0: "192.168.1.10"}
    text = (samples / "hccn_hixl_mixed.conf").read_text().replace("address_0=192.168.1.10\n", "")
    (tmp_path / "six.conf").write_text(text)
    assert device_addresses([0], tmp_path / "six.conf") == {0: "121::101"}


@pytest.mark.parametrize(("text", "message"), REFUSALS["hccn"])
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "conf").write_text(text)
    with pytest.raises(DataError, match=re.escape(message)):
        device_addresses([0], tmp_path / "conf")


def test_the_tool_is_asked_first_unless_a_file_is_named(tool: Path, samples: Path) -> None:
    assert device_addresses([4, 11]) == {4: "192.168.7.4", 11: "192.168.7.11"}
    assert device_addresses([1], samples / "hccn_hixl_gap.conf") == {1: "192.168.1.11"}


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            '[ "$2" = 0 ] && echo ipaddr:192.168.7.0 && exit 0\necho "no such chip" >&2; exit 3',
            "`hccn_tool -i 1 -ip -g` ended with code 3 and no line `ipaddr:ADDRESS`: no such chip; reading",
        ),
        ("echo ipaddr:192.168.7.0; exit 1", "ended with code 1"),
        ("exec sleep 60", "no answer within 1 s"),
    ],
)
def test_when_the_tool_fails_for_one_device_the_file_serves_all(
    tool: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, script: str, said: str
) -> None:
    monkeypatch.setattr(module, "_TOOL_SECONDS", 1.0 if "sleep" in script else 20.0)
    tool.write_text(f"#!/bin/sh\n{script}\n")
    text = "address_0_before=10.9.9.9\naddress_0=10.9.0.0\naddress_1=10.9.0.1\n"
    module.DEFAULT_CONF.write_text(text)
    assert device_addresses([0, 1]) == {0: "10.9.0.0", 1: "10.9.0.1"}
    assert said in caplog.text


def test_neither_tool_nor_file(tool: Path) -> None:
    tool.write_text("#!/bin/sh\nexit 0\n")
    with pytest.raises(DataError, match=r"ended with code 0 .*, and .*etc\.conf: no such file; .*--hccn_conf"):
        device_addresses([0])
    tool.unlink()
    with pytest.raises(DataError, match=r"hccn_tool is not on PATH, and .*etc\.conf: no such file"):
        device_addresses([0])
