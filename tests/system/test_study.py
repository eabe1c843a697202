"""tools/study.py as a user starts it: real runs, and what becomes of them when something is
killed.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from common.study.results import State, Study, read_study
from tests.run_scripts import wait_until

ROOT = Path(__file__).resolve().parents[2]
STUDY = """title: One rank and two hosts
base: {root}/configs/gpt2/run_gpt2_tiny.yaml
settings:
  device: cpu
  runtime.threads: 1
  model: {{num_layers: 2, hidden_size: 32, num_heads: 2, seq_length: 16, vocab_size: 128}}
  train: {{global_batch_size: 4, micro_batch_size: null}}
  data: {{train: {data}, tokenizer: null}}
axes:
  cell:
    alone: {{}}
    two_hosts: {{ranks: 2, hosts: 2}}
    refused: {{ranks: 3}}
warmup_steps: 1
measured_steps: {steps}
trace: false
repeats: {repeats}
time_limit: 300
same_losses: {{along: [cell]}}
"""
_PATIENCE = 240.0
ENDED = {"alone": [State.FINISHED], "two_hosts": [State.FINISHED], "refused": [State.REFUSED]}


class Running:
    """A study of the command line, with the processes that belong to it."""

    def __init__(self, folder: Path, data: Path, *, steps: int, repeats: int) -> None:
        self.folder = folder / "out"
        self.config = folder / "hosts.yaml"
        self.config.write_text(STUDY.format(root=ROOT, data=data, steps=steps, repeats=repeats))
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(ROOT / "tools" / "study.py"), "--config", str(self.config)]
        command += ["--output_dir", str(self.folder), *words]
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.started.append(process)
        return process

    def end(self) -> None:
        for process in self.started:
            process.kill()
            process.wait()

    def finish(self, *words: str) -> str:
        """Run to the end. Returns what it wrote."""
        process = self.start(*words)
        output, _ = process.communicate(timeout=_PATIENCE)
        assert process.returncode == 0, output
        return output

    def processes(self, program: str) -> list[psutil.Process]:
        """Return those that run ``program`` for this study."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            ours = any(str(self.folder) in word for word in words)
            if ours and any(word.endswith(program) for word in words[:2]):
                found.append(process)
        return found

    def left(self) -> list[psutil.Process]:
        return [*self.processes("launch.py"), *self.processes("run_gpt2.py")]

    def result(self) -> Study:
        return read_study(self.folder)

    def times(self, cell: str) -> dict[int, float]:
        """Return when the metrics of its repeats were last written."""
        files = (self.folder / "cells" / cell).glob("repeat_*/metrics.jsonl")
        return {int(path.parent.name.rpartition("_")[2]): path.stat().st_mtime for path in files}


@pytest.fixture
def make_study(tmp_path: Path, corpus_prefix: Path) -> Iterator[Callable[..., Running]]:
    """Give a function that makes a study; what the test leaves running is killed."""
    made: list[Running] = []

    def make(**numbers: int) -> Running:
        made.append(Running(tmp_path, corpus_prefix, **numbers))
        return made[-1]

    yield make
    for study in made:
        study.end()


def states(study: Study) -> dict[str, list[State]]:
    return {found.cell.id: [each.state for each in found.repeats] for found in study.cells}


@pytest.mark.long
def test_a_study_runs_and_every_cell_computes_the_same(
    make_study: Callable[..., Running],
) -> None:
    study = make_study(steps=3, repeats=1)
    output = study.finish()
    assert "alone 1/1: finished" in output
    assert "\r" not in output  # no bar where there is no terminal
    result = study.result()
    assert states(result) == ENDED
    one, two = (result.cell(name).repeats[0].measured for name in ("alone", "two_hosts"))
    assert one is not None and two is not None
    assert len(one.loss) == 4 and one.loss == pytest.approx(two.loss, rel=1e-6)
    # AdamW hides a wrong gradient scale, the norms do not
    assert one.gradient_norm == pytest.approx(two.gradient_norm, rel=1e-6)
    assert one.sample_hash == two.sample_hash and len(one.step_seconds) == 3
    assert not (study.folder / "cells" / "alone" / "repeat_1" / "checkpoints").exists()
    assert study.left() == []


@pytest.mark.campaign
@pytest.mark.parametrize("victim", ["study", "launcher", "rank"])
def test_sigkill(make_study: Callable[..., Running], victim: str) -> None:
    """In the second cell: nothing is left, and the first cell is not run again."""
    study = make_study(steps=150, repeats=1)
    process = study.start()
    metrics = study.folder / "cells" / "two_hosts" / "repeat_1" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0, "the second cell")
    before = study.times("alone")
    began = time.monotonic()
    if victim == "study":
        process.kill()
    else:
        program = {"launcher": "launch.py", "rank": "run_gpt2.py"}[victim]
        study.processes(program)[-1].send_signal(signal.SIGKILL)
    if victim == "study":
        process.wait()
        wait_until(lambda: not study.left(), "its processes end", seconds=30.0)
        print(f"{victim}: no process left after {time.monotonic() - began:.1f} s")
        assert states(study.result())["two_hosts"] == []
        study.finish()
    else:
        output, _ = process.communicate(timeout=_PATIENCE)
        assert process.returncode == 0, output
        first = study.result().cell("two_hosts").repeats[0]
        print(f"{victim}: {first.state} after {first.seconds:.1f} s: {first.reason}")
        assert first.state is State.FAILED
        assert {"launcher": "closed its connection", "rank": "signal 9"}[victim] in first.reason
        assert study.left() == []
        kept = study.times("alone")
        study.finish("--redo", "two_hosts")
        assert study.times("alone") == kept
    assert before.items() <= study.times("alone").items()
    assert states(study.result()) == ENDED
    assert study.left() == []
