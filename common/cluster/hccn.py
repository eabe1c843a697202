"""The Ascend devices of this machine and their network addresses.

The addresses come from the driver's hccn_tool, else from its file hccn.conf.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from common.cluster.rank_table import parse_address
from common.errors import DataError
from common.processes.process_tree import run_program
from common.structured_files import read_text
from common.whole_numbers import whole_number

DEFAULT_CONF = Path("/etc/hccn.conf")
_TOOL_SECONDS = 20.0
_CONF_BYTES = 2**20
_log = logging.getLogger(__name__)
_ADDRESS_KEY = re.compile(r"(IPv6)?address_([0-9]{1,9})", re.IGNORECASE)


def npu_numbers(root: Path = Path("/")) -> list[int]:
    """Return the numbers of Ascend devices that this machine or container sees."""
    numbers = (whole_number(path.name.removeprefix("davinci")) for path in (root / "dev").glob("davinci[0-9]*"))
    return sorted(number for number in numbers if number is not None)


def device_addresses(devices: Sequence[int], conf: Path | None = None) -> dict[int, str]:
    """Map the physical number of each of ``devices`` to its address.

    conf: file to read instead of asking hccn_tool. With None, ``hccn_tool -i N -ip -g`` is asked if it is on PATH, and
    /etc/hccn.conf is read if it is absent or fails for any device. Addresses of the two are never mixed. Raises
    DataError if a device has no address, naming the sources that were tried.
    """
    tried = ""
    if conf is None:
        tool = shutil.which("hccn_tool")
        try:
            if tool is not None:
                return {device: _ask(tool, device) for device in devices}
            tried = "hccn_tool is not on PATH, and "
        except DataError as error:
            _log.warning("%s; reading %s instead", error, DEFAULT_CONF)
            tried = f"{error}, and "
    found = _read_conf(conf or DEFAULT_CONF, tried)
    for device in devices:
        if device not in found:
            listed = ", ".join(map(str, sorted(found))) or "none"
            raise DataError(
                f"{tried}{conf or DEFAULT_CONF}: no line address_{device}=...; devices with an address there:"
                f" {listed}; add the line, or leave device {device} out of --device_num or --visible_devices"
            )
    return {device: found[device] for device in devices}


def _ask(tool: str, device: int) -> str:
    command = [tool, "-i", str(device), "-ip", "-g"]
    shown = f"`hccn_tool {' '.join(command[1:])}`"
    code, output, errors = run_program(command, _TOOL_SECONDS)
    if code is None:
        raise DataError(f"{shown}: {errors}")
    for line in output.splitlines():
        key, colon, value = line.partition(":")
        if code == 0 and colon and key.strip().lower() in ("ipaddr", "ipv6addr"):
            return str(parse_address(value.strip(), shown))
    said = " ".join(f"{errors} {output}".split())[:200]
    raise DataError(f"{shown} ended with code {code} and no line `ipaddr:ADDRESS`{f': {said}' if said else ''}")


def _read_conf(conf: Path, tried: str) -> dict[int, str]:
    """Read lines KEY=VALUE; a device's IPv4 address overrides its IPv6 address."""
    try:
        lines = read_text(conf, limit=_CONF_BYTES, error=DataError).splitlines()
    except DataError as error:
        raise DataError(
            f"{tried}{error}; name a file with lines such as address_0=192.168.1.10 by --hccn_conf,"
            " or try it without an Ascend: --hccn_conf docs/examples/hccn_140.conf"
        ) from None
    found: dict[tuple[bool, int], str] = {}
    for number, line in enumerate(lines, 1):
        key, _, value = (part.strip() for part in line.partition("="))
        match = _ADDRESS_KEY.fullmatch(key)
        if match is None:
            continue
        address = str(parse_address(value, f"{conf}, line {number}: {key}"))
        if found.setdefault((match[1] is None, int(match[2])), address) != address:
            raise DataError(
                f"{conf}, line {number}: {key} has two addresses,"
                f" {found[match[1] is None, int(match[2])]} and {address}; keep one"
            )
    return {device: found[version_4, device] for version_4, device in sorted(found)}
