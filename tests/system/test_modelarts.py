"""ModelArts jobs as the platform starts them, with a folder for the bucket. No real one has run yet."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.processes.addresses import free_port
from tests.cluster_tables import devices, table_0
from tests.run_scripts import ROOT, clean_environment, pids_with, process_of_rank, wait_until
from tests.system.test_restarts import require_equal, rows_of
from tests.tiny import tiny_run

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def bucket(tmp_path: Path, corpus_prefix: Path) -> Path:
    """Files that a user uploads: a folder with the data, and a config beside the code."""
    folder = tmp_path / "bucket"
    (folder / "data").mkdir(parents=True)
    for extension in (".bin", ".idx"):
        shutil.copy(corpus_prefix.with_suffix(extension), folder / "data")
    config = tiny_run(
        f"file://{folder}/out", train={"max_steps": 3, "micro_batch_size": 2}, data={}, validation__max_samples=2
    )
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return folder


@pytest.fixture
def start(tmp_path: Path, bucket: Path) -> Start:
    """Start the start file with the platform's paths, from a folder that is not the code's."""

    def run(
        *words: str, container: str = "a", program: str = "run_gpt2.py", prefix: Sequence[str] = (), **variables: str
    ) -> "subprocess.Popen[str]":
        disk = tmp_path / f"container_{container}"
        disk.mkdir(exist_ok=True)
        platform = {"MA_JOB_DIR": str(ROOT.parent), "MA_MOUNT_PATH": "/home/ma-user/modelarts"}
        platform |= {"MA_NUM_HOSTS": "1", "TMPDIR": str(disk)}
        data = f"--data_url=file://{bucket}/data"
        command = [sys.executable, str(ROOT / program), f"--config={bucket}/run.yaml", data]
        environment = clean_environment(**platform | variables)
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen([*prefix, *command, *words], cwd=disk, env=environment, **pipes)

    return run


def finish(*jobs: "subprocess.Popen[str]") -> list[tuple[str, str]]:
    said = [job.communicate(timeout=120) for job in jobs]
    assert not any(job.returncode for job in jobs), said
    return said


def steps_of(folder: Path) -> list[int]:
    return [row[0] for row in rows_of(folder)]


@pytest.mark.long
def test_one_process_per_card(start: Start, bucket: Path, tmp_path: Path, samples: Path) -> None:
    """The platform fills its version 0 table while the processes start."""
    table = table_0("job", ("pod-0", "192.168.6.101", devices(["192.1.244.169", "192.1.244.170"])))
    file = tmp_path / "jobstart_hccl.json"
    shutil.copy(samples / "status_initializing.json", file)
    common = {"RANK_TABLE_FILE": str(file), "MASTER_PORT": str(free_port()), "MA_NUM_GPUS": "2"}
    names = ("RANK_ID", "DEVICE_ID", "ASCEND_DEVICE_ID")
    cards = [common | {"RANK_SIZE": "2"} | dict.fromkeys(names, card) for card in "01"]
    jobs = [start("--run_mode=train", "--platform_flag=1", **card) for card in cards]
    time.sleep(0.5)
    file.with_suffix(".new").write_text(json.dumps(table))
    file.with_suffix(".new").rename(file)
    (out, _), (out_of_1, _) = finish(*jobs)
    assert "--platform_flag=1 is not an argument of this program; ignored" in out
    assert "micro 2 x data parallel 2" in out and "copying" not in out_of_1
    assert steps_of(bucket / "out") == [1, 2, 3]
    assert (bucket / "out" / "checkpoints" / "latest").is_file()


def test_a_stopped_job_resumes_in_another_container(start: Start, bucket: Path) -> None:
    """File and arguments as a user of MindFormers names them; one card, no table; --train_url before output_dir."""
    words = ["--run_mode=train", "--use_parallel=False", "--batch_size=1", "--dataset_id=random"]
    words.append(f"--train_url=file://{bucket}/url")
    card = {"RANK_ID": "0", "RANK_SIZE": "1", "DEVICE_ID": "0", "MA_NUM_GPUS": "1"}
    job = start(*words, "--epochs=4", program="run_mindformer.py", **card)
    assert job.stdout is not None
    while not (line := job.stdout.readline()).partition("| loss")[1]:
        assert line, "ended before its first step"
    job.send_signal(signal.SIGTERM)
    _, error = job.communicate(timeout=120)
    assert job.returncode == 143, error
    done = steps_of(bucket / "url")[-1]
    words += ["--train.max_epochs=null", f"--train.max_steps={done + 2}"]
    ((out, _),) = finish(start(*words, program="run_mindformer.py", container="b", **card))
    assert "resuming" in out
    assert steps_of(bucket / "url") == list(range(1, done + 3))


@pytest.mark.campaign
@pytest.mark.parametrize("killed", [0, 1])
def test_two_hosts_start_a_killed_rank_again(start: Start, bucket: Path, tmp_path: Path, killed: int) -> None:
    """One job. Each host has a disk of its own at the same place, so that rank 1 can only have the
    checkpoint of rank 0 by the bucket. Losses are those of one process that nobody kills.
    """
    disk = tmp_path / "disk"
    for folder in (disk, tmp_path / "host_0", tmp_path / "host_1", bucket / "out"):
        folder.mkdir()
    words = ["unshare", "-m", "mount", "--bind", str(tmp_path / "host_0"), str(disk)]
    if subprocess.run(words, capture_output=True).returncode:
        pytest.skip("this needs the right to mount folders (unshare -m)")
    mount = ("unshare", "-m", "sh", "-c", 'mount --bind "$0" "$1" && shift && exec "$@"')
    common = {"MA_NUM_HOSTS": "2", "VC_WORKER_HOSTS": "127.0.0.1,127.0.0.2"}
    common |= {"MA_NUM_GPUS": "1", "MASTER_PORT": str(free_port()), "TMPDIR": str(disk)}
    keys = ["--run_mode=train", "--train.max_steps=400", "--train.global_batch_size=4"]
    keys += ["--checkpoint.interval=50"]
    keys_of_both = [*keys, "--runtime.max_restarts=2"]
    prefixes = [(*mount, f"{tmp_path}/host_{index}", str(disk)) for index in "01"]
    jobs = [start(*keys_of_both, VC_TASK_INDEX=str(n), prefix=each, **common) for n, each in enumerate(prefixes)]

    def steps() -> int:
        files = (tmp_path / "host_0").rglob("metrics.jsonl")
        return max((len(steps_of(path.parent)) for path in files), default=0)

    try:
        wait_until(lambda: steps() > 60, "60 steps")
        os.kill(process_of_rank(str(bucket), killed), signal.SIGKILL)
        finish(*jobs)
    finally:
        for job in jobs:
            job.kill()
    out = bucket / "out"
    first, second = map(json.loads, (out / "attempts.jsonl").read_text().splitlines())
    assert (first["exit_code"], first["then"], second["then"]) == (137, "restarted", "ended")
    assert second["first_step"] % 50 == 1 and 51 <= second["first_step"] <= first["last_step"]
    for rank in range(2):
        assert (out / f"mf_parallel{rank}" / "mindformer.log.1").is_file()
    assert pids_with(str(bucket)) == []
    assert steps_of(out) == list(range(1, 401)), "every step is there once"
    ours = out.rename(tmp_path / "ours")
    finish(start(*keys, container="alone", MA_NUM_GPUS="1"))
    require_equal(ours, out)
