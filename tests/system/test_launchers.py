"""The launchers themselves start a script that asks who it is. mpirun's and srun's variables:
tests/common/cluster/test_environment.py.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common.processes.addresses import free_port

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
    names = re.compile("RANK|WORLD_SIZE|MASTER_|MS_|LOCAL_|DEVICE_ID|SLURM_|OMPI_|PMI")
    environ = {name: value for name, value in os.environ.items() if not names.match(name)}
    environ |= {"GPT2_ROOT": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        words, cwd=folder, env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_torchrun(script: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    port = free_port()
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(port),
        str(script),
    ]
    assert sorted(start(words, tmp_path).splitlines()) == [
        f"0/2 0/2 None 127.0.0.1:{port} torchrun",
        f"1/2 1/2 None 127.0.0.1:{port} torchrun",
    ]


def test_msrun(script: Path, tmp_path: Path) -> None:
    pytest.importorskip("mindspore")
    program = shutil.which("msrun", path=str(Path(sys.executable).parent))
    assert program, "msrun is part of mindspore"
    port = free_port()
    words = [
        program,
        "--worker_num=2",
        "--local_worker_num=2",
        f"--master_port={port}",
        "--log_dir=logs",
        "--join=True",
        str(script),
    ]
    start(words, tmp_path)
    logs = {path.stem: path.read_text().strip() for path in (tmp_path / "logs").glob("*.log")}
    assert logs == {
        "worker_0": f"0/2 0/2 0 127.0.0.1:{port} msrun",
        "worker_1": f"1/2 1/2 1 127.0.0.1:{port} msrun",
        "scheduler": f"0/2 0/1 None 127.0.0.1:{port} msrun scheduler",
    }
