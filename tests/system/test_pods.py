"""Two pods on this machine train the losses of one process, told of each other as Kubernetes does:
by a mounted rank table, which the platform fills while they wait, or by the training operator.

Pods with a rank table are network namespaces with addresses of their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.processes.addresses import free_port
from common.training.metrics import read_metrics
from tests.network_hosts import two_hosts
from tests.run_scripts import run_words, start_script, wait_until

pytestmark = pytest.mark.long

CONFIG = "configs/gpt2/run_gpt2_tiny.yaml"
POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
NODES, PODS = ("10.9.0.1", "10.9.0.2"), ("10.79.0.1", "10.79.0.2")
KEYS = {"train__max_steps": 3, "validation__interval": 0, "model__dropout": 0.0}


def losses(run: Path) -> list[tuple[float, float, str]]:
    rows = [row for row in read_metrics(run / "metrics.jsonl") if "loss" in row]
    return [(row["loss"], row["grad_norm"], row["sample_hash"]) for row in rows]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory, corpus_prefix: Path) -> Path:
    folder = tmp_path_factory.mktemp("one")
    words = ("none", CONFIG, "[0,1)", "train", *run_words(folder / "run", corpus_prefix, **KEYS))
    process = start_script(*words, log=folder / "log")
    assert process.wait(timeout=180) == 0, (folder / "log").read_text()
    return folder / "run"


def equal_losses(run: Path, one: Path) -> None:
    found, expected = losses(run), losses(one)
    assert len(found) == len(expected) == 3
    assert [row[2] for row in found] == [row[2] for row in expected]
    for row, other in zip(found, expected, strict=True):
        assert row[:2] == pytest.approx(other[:2], rel=1e-6)


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


def test_two_pods_with_a_mounted_rank_table(
    pods: tuple[str, str], one_process: Path, corpus_prefix: Path, tmp_path: Path
) -> None:
    """The range counts devices as a container sees them; the table has the node's numbers."""
    servers = [
        {
            "device": [
                {"device_id": "5", "device_ip": f"10.78.{host}.1", "rank_id": str(host)},
            ],
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
    run = tmp_path / "run"
    words = run_words(run, corpus_prefix, **KEYS)
    processes = [
        start_script(
            *(str(folder / "hccl.json"), CONFIG, "[0,1)", "train", *words),
            before=("ip", "netns", "exec", pod),
            log=log,
            **POD,
            HOSTNAME=f"gpt2-worker-{number}",
            XDL_IP=NODES[number],
            POD_IP=PODS[number],
        )
        for number, (pod, folder, log) in enumerate(zip(pods, mounts, logs, strict=True))
    ]
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
    equal_losses(run, one_process)


def test_a_rank_table_that_nobody_fills_ends_the_wait(tmp_path: Path) -> None:
    mount(tmp_path / "config", {"status": "initializing"})
    table = tmp_path / "config" / "hccl.json"
    log = tmp_path / "log"
    process = start_script(
        *(str(table), CONFIG, "[0,1)", "train"), log=log, HCCL_CONNECT_TIMEOUT="2", **POD
    )
    assert process.wait(timeout=60) == 2
    last = log.read_text().splitlines()[-1]
    assert last == (
        f"error: {table}: status is 'initializing': the platform has not filled the table yet; try"
        " again later (waited 2 s)"
    )


@pytest.mark.campaign
def test_two_pods_of_a_pytorch_job(one_process: Path, corpus_prefix: Path, tmp_path: Path) -> None:
    port = str(free_port())
    run = tmp_path / "run"
    words = run_words(run, corpus_prefix, **KEYS)
    logs = [tmp_path / f"pod-{number}.log" for number in range(2)]
    processes = []
    for number, log in enumerate(logs):
        variables = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "RANK": str(number), **POD}
        variables |= {"WORLD_SIZE": "2", "PET_NNODES": "2", "PET_NODE_RANK": str(number)}
        variables |= {"PET_NPROC_PER_NODE": "1", "PYTHONUNBUFFERED": "1"}
        processes.append(
            start_script("none", CONFIG, "[0,1)", "train", *words, log=log, **variables)
        )
    try:
        codes = [process.wait(timeout=180) for process in processes]
    finally:
        for process in processes:
            process.kill()
    told = [log.read_text() for log in logs]
    assert codes == [0, 0], told
    for number, text in enumerate(told):
        assert f"hosts by the pod's environment: 2, this is number {number}, rank 0" in text
    equal_losses(run, one_process)
