"""Two pods train the losses of one process. A mounted rank table, which the platform fills while
they wait, tells them of each other. They are network namespaces with addresses of their own.

What a training operator tells its pods: tests/common/cluster/test_pods.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.network_hosts import two_hosts
from tests.run_scripts import run_words, start_script, wait_until
from tests.system.test_restarts import CONFIG, require_equal, run_alone

pytestmark = pytest.mark.long

POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
KEYS: dict[str, object] = {"train__max_steps": 3, "validation__interval": 0, "model__dropout": 0.0}
NODES, PODS = ("10.9.0.1", "10.9.0.2"), ("10.79.0.1", "10.79.0.2")


@pytest.fixture
def pods() -> Iterator[tuple[str, str]]:
    """Names of two network namespaces, joined by a cable."""
    yield from two_hosts(PODS, "eth0")


def mount(folder: Path, content: object) -> None:
    """Put a ConfigMap's file there as kubelet does: a new folder, then a link that is renamed."""
    number = len(list(folder.glob("..20*")))
    data = folder / f"..20{number:02}"
    data.mkdir(parents=True)
    (data / "hccl.json").write_text(json.dumps(content))
    (folder / "..new").symlink_to(data.name)
    (folder / "..new").rename(folder / "..data")
    if not (folder / "hccl.json").is_symlink():
        (folder / "hccl.json").symlink_to("..data/hccl.json")


def test_two_pods_with_a_mounted_rank_table(pods: tuple[str, str], corpus_prefix: Path, tmp_path: Path) -> None:
    """The range counts devices as a container sees them; the table has the node's numbers."""
    servers = [
        {
            "device": [{"device_id": "5", "device_ip": f"10.78.{host}.1", "rank_id": str(host)}],
            "server_id": NODES[host],
            "container_ip": PODS[host],
        }
        for host in range(2)
    ]
    table = {"status": "completed", "version": "1.0", "server_count": "2", "server_list": servers}
    logs = [tmp_path / f"pod-{number}.log" for number in range(2)]
    mounts = [tmp_path / f"pod-{number}" / "config" for number in range(2)]
    for folder in mounts:
        mount(folder, {"status": "initializing"})
    words = [CONFIG, "[0,1)", "train", *run_words(tmp_path / "run", corpus_prefix, **KEYS)]
    processes = [
        start_script(
            str(mounts[number] / "hccl.json"), *words, log=logs[number], **POD,
            before=("ip", "netns", "exec", pod), HOSTNAME=f"gpt2-worker-{number}",
            XDL_IP=NODES[number], POD_IP=PODS[number],
        )
        for number, pod in enumerate(pods)
    ]  # fmt: skip
    try:
        for log in logs:
            wait_until(lambda log=log: "status is 'initializing'" in log.read_text(), str(log))
        for folder in reversed(mounts):
            mount(folder, table)
        codes = [process.wait(timeout=180) for process in processes]
    finally:
        for process in processes:
            process.kill()
    told = [log.read_text() for log in logs]
    assert codes == [0, 0], told
    for number, text in enumerate(told):
        assert "waiting up to 1800 s" in text
        assert f"ranks of {PODS[number]}: {number} on device 0; of 2 in all" in text
        assert "is not an address of this machine" not in text
    assert len(run_alone(tmp_path / "one", corpus_prefix, **KEYS)) == 3
    require_equal(tmp_path / "run", tmp_path / "one")
