"""msrun itself starts a script that asks who it is. The variables of other launchers:
tests/common/cluster/test_environment.py. torchrun trains in test_restarts.py.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common.processes.addresses import free_port
from tests.run_scripts import ROOT, clean_environment

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


def test_msrun(tmp_path: Path) -> None:
    pytest.importorskip("mindspore")
    program = shutil.which("msrun", path=str(Path(sys.executable).parent))
    assert program, "msrun is part of mindspore"
    (tmp_path / "who.py").write_text(WHO)
    port = free_port()
    words = ["--worker_num=2", "--local_worker_num=2", "--log_dir=logs", "--join=True"]
    done = subprocess.run(
        [program, *words, f"--master_port={port}", "who.py"], cwd=tmp_path, capture_output=True,
        env=clean_environment(GPT2_ROOT=str(ROOT)), text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    logs = {path.stem: path.read_text().strip() for path in (tmp_path / "logs").glob("*.log")}
    assert logs == {
        "worker_0": f"0/2 0/2 0 127.0.0.1:{port} msrun",
        "worker_1": f"1/2 1/2 1 127.0.0.1:{port} msrun",
        "scheduler": f"0/2 0/1 None 127.0.0.1:{port} msrun scheduler",
    }
