"""tools/study.py as a user starts it. What a kill does to it: tests/gpt2_study/test_running.py."""

import subprocess
import sys
from pathlib import Path

import pytest

from gpt2_study.results import State, read_study
from tests.run_scripts import ROOT, pids_with

STUDY = f"""title: One rank and two hosts
base: {ROOT}/configs/gpt2/run_gpt2_tiny.yaml
settings:
  device: cpu
  runtime.threads: 1
  model: {{num_layers: 2, hidden_size: 32, num_heads: 2, seq_length: 16, vocab_size: 128}}
  train: {{global_batch_size: 4, micro_batch_size: null}}
  data: {{train: DATA, tokenizer: null}}
axes:
  cell:
    alone: {{}}
    two_hosts: {{ranks: 2, hosts: 2}}
    refused: {{ranks: 3}}
warmup_steps: 1
measured_steps: 3
trace: false
repeats: 1
time_limit: 300
same_losses: {{along: [cell]}}
"""


@pytest.mark.long
def test_a_study_runs_and_every_cell_computes_the_same(tmp_path: Path, corpus_prefix: Path) -> None:
    file, folder = tmp_path / "hosts.yaml", tmp_path / "out"
    file.write_text(STUDY.replace("DATA", str(corpus_prefix)))
    command = [sys.executable, str(ROOT / "tools" / "study.py"), "--config", str(file)]
    done = subprocess.run([*command, "--output_dir", str(folder)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "alone 1/1: finished" in done.stdout
    assert "\r" not in done.stdout + done.stderr  # no bar where there is no terminal
    found = {cell.cell.id: cell.repeats for cell in read_study(folder).cells}
    states = {name: [each.state for each in repeats] for name, repeats in found.items()}
    assert states == {"alone": [State.FINISHED], "two_hosts": [State.FINISHED], "refused": [State.REFUSED]}
    one, two = (found[name][0].measured for name in ("alone", "two_hosts"))
    assert one is not None and two is not None
    assert len(one.loss) == 4 and one.loss == pytest.approx(two.loss, rel=1e-6)
    # AdamW hides a wrong gradient scale, the norms do not
    assert one.gradient_norm == pytest.approx(two.gradient_norm, rel=1e-6)
    assert one.sample_hash == two.sample_hash and len(one.step_seconds) == 3
    assert not (folder / "cells" / "alone" / "repeat_1" / "checkpoints").exists()
    assert pids_with(str(folder)) == []
