"""Certificates of runs that are equal, of runs that differ, and of folders of others."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from common.compare.certificate import certify
from common.config.load import build_config
from common.config.schema import RunConfig
from common.errors import ConfigError


def config(folder: Path) -> RunConfig:
    model = {"num_layers": 1, "hidden_size": 8, "num_heads": 2, "seq_length": 4, "vocab_size": 50}
    return build_config(
        {"output_dir": str(folder), "model": model, "optimizer": {"learning_rate": 0.1}}
    )


class FakeRun:
    """Writes three rows and a checkpoint; ``changes`` change the second run."""

    def __init__(self, weight: float = 1.0, **changes: Any) -> None:
        self.words: list[Sequence[str]] = []
        self.weight, self.changes = weight, changes

    def __call__(self, words: Sequence[str]) -> int:
        self.words.append(words)
        folder = Path(words[0].removeprefix("output_dir="))
        again = len(self.words) == 2
        checkpoint = folder / "checkpoints" / "step_00000003"
        checkpoint.mkdir(parents=True)
        rows = [
            {"step": step, "loss": 1.0 / step, "grad_norm": 2.0, "sample_hash": f"h{step}"}
            for step in (1, 2, 3)
        ]
        if again:
            rows[1] |= self.changes
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        weight = np.full(2, self.weight if again else 1.0, np.float32)
        save_file({"w": weight}, checkpoint / "model.safetensors")
        (checkpoint / "manifest.json").write_text("{}")
        return 0


def test_equal_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = FakeRun()
    assert certify(config(tmp_path), 3, run) == 0
    assert certify(config(tmp_path), 3, FakeRun()) == 0, "an earlier certificate is replaced"
    record = json.loads((tmp_path / "certificate.json").read_text())
    assert record["equal"] and record["steps"] == 3 and record["sample_hash"] == "h3"
    assert list(record["files"]) == ["model.safetensors"]
    assert "train.exit_interval=3" in run.words[0] and run.words[0][1:] == run.words[1][1:]
    assert "3 steps made twice are equal bit for bit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (FakeRun(loss=0.5000000000000001), "step 2: loss 0.5 and 0.5000000000000001"),
        (FakeRun(sample_hash="x"), "step 2: sample_hash 'h2' and 'x'"),
        (FakeRun(weight=1.0 + 2**-23), "model.safetensors of the checkpoint after step 3"),
    ],
)
def test_the_first_difference_is_named(tmp_path: Path, run: FakeRun, expected: str) -> None:
    assert certify(config(tmp_path), 3, run) == 1
    assert json.loads((tmp_path / "certificate.json").read_text())["first_difference"] == expected


def test_a_run_that_fails_gives_its_exit_code(tmp_path: Path) -> None:
    assert certify(config(tmp_path), 3, lambda words: 7) == 7
    assert not (tmp_path / "certificate.json").exists()


def test_a_folder_of_another_kind_stays(tmp_path: Path) -> None:
    (tmp_path / "certificate").mkdir()
    (tmp_path / "certificate" / "letter.txt").write_text("dear")
    with pytest.raises(ConfigError, match=r"letter\.txt, which no certificate wrote"):
        certify(config(tmp_path), 3, FakeRun())
