"""docs/ascend.md as it is written: its files are made, its commands run as far as a machine without
Ascend can; both languages give the same ones.
"""

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import run_gpt2
from common.config.load import load_config
from common.resolve.derive import resolve_mode
from tests.cluster_tables import write_tutorial_table
from tests.system.test_readme import commands
from tools import doctor, hccl_tools, launch, merge_hccl

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("docs/ascend.md", "docs/ascend_zh.md")
NEEDS_THE_MACHINE = ("npu-smi", "cat /etc/hccn.conf", "hccn_tool", "pip install")
OF_A_DRIVER = 'python tools/hccl_tools.py --device_num "[0,8)" --server_ip 10.155.111.140'
PROGRAMS: dict[tuple[str, str], Callable[[list[str]], int]] = {
    ("python", "tools/hccl_tools.py"): hccl_tools.main,
    ("python", "tools/merge_hccl.py"): merge_hccl.main,
    ("python", "run_gpt2.py"): run_gpt2.main,
    ("bash", "scripts/run_distribute.sh"): lambda words: launch.main(["distribute", *words]),
    ("bash", "scripts/run_standalone.sh"): lambda words: launch.main(["standalone", *words]),
}


def lines() -> list[str]:
    """Those of the page, its loop written out."""
    found = "\n".join(commands(PAGES[0]))
    loop = re.compile(r"for (\w+) in (.*?); do\n(.*?)\ndone", re.S)
    return loop.sub(
        lambda each: "\n".join(each[3].replace(f"${each[1]}", value) for value in each[2].split()),
        found,
    ).splitlines()


def yaml_blocks(page: str) -> list[tuple[str, str]]:
    """The path in the first line, and the text below it without comments."""
    blocks = re.findall(
        r"```yaml\n# (\S+)\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.S
    )
    return [(path, re.sub(r" *#.*", "", text)) for path, text in blocks]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the page finds in the repository, where it may write."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    shutil.copytree(ROOT / "docs" / "examples", tmp_path / "docs" / "examples")
    monkeypatch.chdir(tmp_path)
    for name in (
        "DETACH",
        "RANK_TABLE_FILE",
        "MASTER_PORT",
        "RANK_ID",
        "RANK_SIZE",
        "RANK",
        "WORLD_SIZE",
        "HCCL_CONNECT_TIMEOUT",
    ):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_both_languages_give_the_same_commands_and_files() -> None:
    assert commands(PAGES[1]) == commands(PAGES[0])
    assert yaml_blocks(PAGES[1]) == yaml_blocks(PAGES[0]) != []


def test_every_command_runs_as_far_as_it_can(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for path, text in yaml_blocks(PAGES[0]):
        (folder / path).write_text(text, encoding="utf-8")
    shown = {}
    for line in lines():
        if line.startswith(NEEDS_THE_MACHINE):
            continue
        words = shlex.split(line)
        if words[:2] == ["python", "tools/doctor.py"]:
            assert doctor.parse_arguments(words[2:]).device == "npu", (
                "so that what is missing is an error"
            )
            continue
        if line == OF_A_DRIVER:  # the file that it would read
            words += ["--hccn_conf", "docs/examples/hccn_140.conf"]
        words = words[1:] if words[0] == "DRY_RUN=1" else words
        monkeypatch.setenv("DRY_RUN", "1")  # obeyed by what starts ranks
        assert PROGRAMS[words[0], words[1]](words[2:]) == 0, f"{line}\n{capsys.readouterr().err}"
        shown[line] = capsys.readouterr().out
    made, tutorials = folder / "hccl_4s_32p.json", write_tutorial_table(folder / "tutorial.json")
    assert json.loads(made.read_text()) == json.loads(tutorials.read_text())
    of_32 = [line for line in shown if "own_13b.yaml" in line and " train 32" in line]
    assert [[int(rank) for rank in re.findall(r"^RANK_ID=(\d+) ", shown[line],
    flags=re.M)] for line in of_32] == [
        # the first is the look at what it will get
        list(range(first, first + 8)) for first in (0, 0, 8, 16, 24)
    ]  # fmt: skip
    four = [line for line in of_32 if line.startswith("bash")]
    assert [line.split('"')[1] for line in four] == ["[0,8]", "[8,16]", "[16,24]", "[24,32]"]
    assert [line.split()[-1] for line in four] == ["logging.style=mindformers"] * 4
    assert "A step may take" in next(
        text for line, text in shown.items() if "--run_mode plan" in line
    )


def test_the_first_small_runs_suit_an_ascend_910a() -> None:
    """It has no bfloat16: see ``supports`` of mindformers_gpt2/device.py."""
    small = [line for line in lines() if "configs/gpt2/run_gpt2.yaml" in line]
    assert len(small) == 2
    for line, world_size in zip(small, (1, 8), strict=True):
        words = line.split()
        overrides = [word for word in words if re.match(r"[\w.]+=", word)]
        config = resolve_mode(
            load_config(ROOT / "configs/gpt2/run_gpt2.yaml", overrides),
            "train",
            world_size=world_size,
        )
        assert (config.backend, config.device, config.precision.compute) == (
            "mindspore",
            "npu",
            "float16",
        )
        assert config.loss_scale.initial > 1 and config.train.max_steps == 20
    folders = [word for line in small for word in line.split() if word.startswith("output_dir=")]
    assert len(set(folders)) == 2, "the second does not go on from the first"


def test_what_is_pasted_is_the_layout_of_the_tutorial(folder: Path) -> None:
    ((path, text),) = yaml_blocks(PAGES[0])
    (folder / path).write_text(text, encoding="utf-8")
    found, preset = (
        resolve_mode(load_config(folder / "configs/gpt2" / name), "train", world_size=32)
        for name in ("own_13b.yaml", "run_gpt2_13b.yaml")
    )
    assert (
        found.parallel.data_parallel,
        found.parallel.model_parallel,
        found.parallel.pipeline_stage,
    ) == (4, 2, 4)
    assert found.train.global_batch_size == preset.train.global_batch_size == 192
    assert found.data.train == ["/data/wikitext-2.mindrecord"]
    assert found.data.tokenizer is not None and found.data.tokenizer.folder == "/data/gpt2"
