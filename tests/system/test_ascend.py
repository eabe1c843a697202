"""Commands and YAML of docs/ascend.md suit an Ascend 910A and the tutorial."""

import re
import shlex
import shutil
from pathlib import Path

from common.flags import parse
from common.resolve.derive import resolve_mode
from common.run_config import load_config
from tests.pages.blocks import blocks, commands, read
from tools import doctor

ROOT = Path(__file__).resolve().parents[2]
PAGE = "docs/ascend.md"


def lines() -> list[str]:
    """The commands of the page, those for devices too."""
    shells = [block for block in blocks(read(PAGE)) if block.kind in ("bash", "sh")]
    return [command for block in shells for command in commands(block)]


def test_the_first_small_runs_suit_an_ascend_910a() -> None:
    """It has no bfloat16: see ``supports`` of mindformers_gpt2/device.py."""
    small = [line for line in lines() if "configs/gpt2/run_gpt2.yaml" in line]
    assert len(small) == 2
    for line, world_size in zip(small, (1, 8), strict=True):
        words = line.split()
        overrides = [word for word in words if re.match(r"[\w.]+=", word)]
        config = load_config(ROOT / "configs/gpt2/run_gpt2.yaml", overrides)
        config = resolve_mode(config, "train", world_size=world_size)
        found = config.backend, config.device, config.precision.compute
        assert found == ("mindspore", "npu", "float16")
        assert config.loss_scale.initial > 1 and config.train.max_steps == 20
    folders = [word for line in small for word in line.split() if word.startswith("output_dir=")]
    assert len(set(folders)) == 2, "the second does not go on from the first"


def test_pasted_yaml_has_the_layout_of_the_tutorial(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(ROOT / "configs", tmp_path / "configs")).parent
    [block] = [block for block in blocks(read(PAGE)) if block.path]
    assert block.path is not None
    (folder / block.path).write_text(block.text, encoding="utf-8")
    found, preset = (
        resolve_mode(load_config(folder / "configs/gpt2" / name), "train", world_size=32)
        for name in ("own_13b.yaml", "run_gpt2_13b.yaml")
    )
    sizes = found.parallel
    assert (sizes.data_parallel, sizes.model_parallel, sizes.pipeline_stage) == (4, 2, 4)
    assert found.train.global_batch_size == preset.train.global_batch_size == 192
    assert found.data.train == ["/data/wikitext-2.mindrecord"]
    assert found.data.tokenizer is not None and found.data.tokenizer.folder == "/data/gpt2"


def test_the_doctor_is_asked_for_the_device() -> None:
    """A missing driver is an error then."""
    [found] = [line for line in lines() if line.startswith("python tools/doctor.py")]
    assert parse(doctor.Request, shlex.split(found)[2:], None).device == "npu"
