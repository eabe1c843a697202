"""The commands of docs/ascend.md that need no Ascend, in its order; both languages give the same ones."""

from pathlib import Path

import pytest

from tests.cluster_tables import write_tutorial_table
from tests.system.test_readme import commands, shell

ROOT = Path(__file__).resolve().parents[2]
NEEDS_ASCEND = (
    "npu-smi",
    "cat /etc/hccn.conf",
    "hccn_tool",
    "pip install",
    "python tools/doctor.py",
    "python tools/hccl_tools.py --device_num",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The repository's files by links, so that tables are written beside them."""
    for path in ROOT.iterdir():
        if path.name in ("common", "configs", "mindformers_gpt2", "scripts", "tools", "torch_gpt2", "run_gpt2.py"):
            (tmp_path / path.name).symlink_to(path)
    return tmp_path


def test_commands_that_need_no_ascend(folder: Path) -> None:
    found = commands("docs/ascend.md")
    assert commands("docs/ascend_zh.md") == found
    run = [line for line in found if not line.startswith((*NEEDS_ASCEND, "bash scripts/run_distribute.sh"))]
    assert len(run) == 4
    for server in range(4):
        address = f"10.155.111.{140 + server}"
        text = write_tutorial_table(folder / "table.json", servers=1).read_text().replace("10.155.111.140", address)
        for network in range(1, 5):
            for host in (1, 0):
                text = text.replace(f'"192.{network}.27.{6 + host}"', f'"192.{network}.27.{6 + 2 * server + host}"')
        (folder / f"hccl_8p_01234567_{address}.json").write_text(text)
    shown = {}
    for line in run:
        done = shell(line, folder)
        assert done.returncode == 0, f"{line}\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}"
        shown[line.split(" ")[0]] = done.stdout
    assert "RANK_ID=7" in shown["DRY_RUN=1"] and "RANK_ID=8" not in shown["DRY_RUN=1"]
    four = [line for line in found if line.startswith("bash scripts/run_distribute.sh")]
    assert [line.split('"')[1] for line in four] == ["[0,8]", "[8,16]", "[16,24]", "[24,32]"]
    assert [line.split()[-1] for line in four] == ["logging.style=mindformers"] * 4
