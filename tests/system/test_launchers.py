"""The launchers themselves start a script that asks who it is. mpirun's and srun's variables:
tests/common/cluster/test_environment.py.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common.processes.addresses import free_port
from tests.run_scripts import clean_environment, run_words
from tests.tiny import results_of

ROOT = Path(__file__).resolve().parents[2]
WHO = """
import os, sys
sys.path.insert(0, os.environ["GPT2_ROOT"])
from common.cluster.environment import find_process, is_scheduler
process = find_process(os.environ)
sys.stdout.write(
    f"{process.rank}/{process.world_size} {process.local_rank}/{process.local_world_size} "
    f"{process.device_id} {process.master}:{process.port} {process.launcher}"
    f"{' scheduler' * is_scheduler(os.environ)}\\n"
)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "who.py"
    path.write_text(WHO)
    return path


def start(words: list[str], folder: Path) -> str:
    environ = clean_environment(GPT2_ROOT=str(ROOT))
    done = subprocess.run(
        words, cwd=folder, env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_torchrun(script: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    port = free_port()
    words = f"-m torch.distributed.run --nproc-per-node 2 --master-port {port} {script}".split()
    assert sorted(start([sys.executable, *words], tmp_path).splitlines()) == [
        f"0/2 0/2 None 127.0.0.1:{port} torchrun",
        f"1/2 1/2 None 127.0.0.1:{port} torchrun",
    ]


def test_msrun(script: Path, tmp_path: Path) -> None:
    pytest.importorskip("mindspore")
    program = shutil.which("msrun", path=str(Path(sys.executable).parent))
    assert program, "msrun is part of mindspore"
    port = free_port()
    words = ["--worker_num=2", "--local_worker_num=2", "--log_dir=logs", "--join=True"]
    start([program, *words, f"--master_port={port}", str(script)], tmp_path)
    logs = {path.stem: path.read_text().strip() for path in (tmp_path / "logs").glob("*.log")}
    assert logs == {
        "worker_0": f"0/2 0/2 0 127.0.0.1:{port} msrun",
        "worker_1": f"1/2 1/2 1 127.0.0.1:{port} msrun",
        "scheduler": f"0/2 0/1 None 127.0.0.1:{port} msrun scheduler",
    }


@pytest.mark.campaign
def test_horovodrun_and_run_distribute_train_alike(corpus_prefix: Path, tmp_path: Path) -> None:
    """Horovod's variables as horovodrun --gloo -np 2 -H localhost:2 sets them, and a stand-in for
    its package, against two ranks of DDP. A sum of two terms has one order: equal to the last bit.
    """
    pytest.importorskip("torch")
    from tests.torch_gpt2.parallel.test_layouts import HOROVOD

    package = tmp_path / "site" / "horovod" / "torch"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text(HOROVOD)
    words = [str(ROOT / "configs" / "gpt2" / "run_gpt2_tiny.yaml")]
    more = run_words(tmp_path / "theirs", corpus_prefix, train__max_steps=3)
    command = [sys.executable, str(ROOT / "run_gpt2.py"), "--config", *words, "--run_mode", "train"]
    theirs = f"""SIZE=2 LOCAL_SIZE=2 CROSS_RANK=0 CROSS_SIZE=1 CONTROLLER=gloo CPU_OPERATIONS=gloo
        GLOO_RENDEZVOUS_ADDR=127.0.0.1 GLOO_RENDEZVOUS_PORT={free_port()}"""
    shared = dict(f"HOROVOD_{each}".split("=") for each in theirs.split())
    shared["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(tmp_path / "site")])
    ranks = [
        subprocess.Popen(
            [*command, *more, "parallel.strategy=horovod"],
            env=clean_environment(**shared, HOROVOD_RANK=rank, HOROVOD_LOCAL_RANK=rank),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ("0", "1")
    ]
    try:
        told = [rank.communicate(timeout=180)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], told
    ours = run_words(tmp_path / "ours", corpus_prefix, train__max_steps=3)
    script = ["bash", str(ROOT / "scripts" / "run_distribute.sh"), "none", *words, "[0,2]", "train"]
    done = subprocess.run(
        [*script, *ours], env=clean_environment(), capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    found, own = (results_of(tmp_path / name) for name in ("theirs", "ours"))
    assert len(found) == 3 and found == own
