"""The commands of the Chinese part of README_zh.md, at a small size on a real novel: from raw text
to texts, on torch, on two processes and on MindSpore with equal losses.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.run_scripts import clean_environment

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    "model.num_layers=1 model.hidden_size=32 model.num_heads=2 model.seq_length=32"
    " model.max_positions=64 model.dropout=0 model.vocab_size=5000 data.stride=24"
    " train.max_epochs=null train.max_steps=6 train.global_batch_size=8 optimizer.warmup_steps=2"
    " optimizer.learning_rate=0.01 device=cpu logging.plot=false logging.tensorboard=false"
)


def commands(heading: str) -> list[str]:
    """The lines of the shell blocks below a heading of README_zh.md."""
    text = (ROOT / "README_zh.md").read_text(encoding="utf-8")
    section = re.split(r"^## ", text, flags=re.M)
    [found] = [part for part in section if part.startswith(heading)]
    blocks = "\n".join(re.findall(r"```shell\n(.*?)```", found, flags=re.S)).replace("\\\n", " ")
    return [line.partition("  #")[0] for line in blocks.splitlines() if line and line[0] != "#"]


def run(command: str, folder: Path) -> str:
    """Run a command as if the project lay in ``folder``, trainings at a small size."""
    if "train.py" in command or "--run_mode train" in command:
        command += f" {TINY}" + (" train.micro_batch_size=4" if "torchrun" in command else "")
    elif "run_gpt2.py" in command:
        command += f" {TINY} predict.max_new_tokens=40"
    else:
        command = command.replace("--length 300", "--length 40")
    torchrun = f"{sys.executable} -m torch.distributed.run --master_port=29631"
    command = command.replace("torchrun", torchrun)
    command = re.sub(r"^python ", f"{sys.executable} ", command)
    command = re.sub(r"\b(tools|compat|configs|run_gpt2\.py)", rf"{ROOT}/\1", command)
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=clean_environment(OMP_NUM_THREADS="1"),
        capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def losses(folder: Path) -> np.ndarray:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return np.array([row["loss"] for row in rows if "loss" in row])


@pytest.mark.long
def test_from_raw_text_to_texts_on_both_backends(tmp_path: Path, shared_data: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("mindspore", reason="MindSpore is not installed")
    file = shared_data / "corpora" / "zh" / "train.json"
    if not file.is_file():
        pytest.skip(f"no test data: {file} is absent; set GPT2_TEST_DATA")
    novel = json.loads(file.read_text(encoding="utf-8"))[:6]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.json").write_text(json.dumps(novel, ensure_ascii=False))
    shown = {command: run(command, tmp_path) for command in commands("中文")}
    first, two, mindspore = (losses(tmp_path / name) for name in ("model", "model_2", "model_ms"))
    assert len(first) == 6 and first[-1] < first[0] - 0.2
    assert np.abs(two - first).max() < 1e-5, "two processes sum in another order"
    assert np.abs(mindspore - first).max() < 1e-4
    known = set("".join(novel)) | {*"她 \n"}
    [samples] = [out for command, out in shown.items() if "generate.py" in command]
    texts = re.findall(r"SAMPLE \d =+\n\n(.*?)\n=", samples, flags=re.S)
    assert len(texts) == 2 and all(text.startswith("她") for text in texts)
    assert set("".join(texts)) <= known
    [predicted] = [out for command, out in shown.items() if "--run_mode predict" in command]
    assert "她" in predicted and "\ufffd" not in predicted
