"""Two hosts on one machine: network namespaces with addresses of their own, and a cable between."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence

import pytest

ADDRESSES = ("10.77.0.1", "10.77.0.2")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


def two_hosts(addresses: Sequence[str] = ADDRESSES, device: str = "cable") -> Iterator[tuple[str, str]]:
    """Names of two network namespaces, joined by a cable that is the device of both."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the program ip")
    names = (f"gpt2-{os.getpid()}-a", f"gpt2-{os.getpid()}-b")
    try:
        for name in names:
            try:
                ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
            ip("-n", name, "link", "set", "lo", "up")
        peer = ("type", "veth", "peer", "name", device, "netns", names[1])
        ip("-n", names[0], "link", "add", device, *peer)
        for name, address in zip(names, addresses, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", device)
            ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=20)
