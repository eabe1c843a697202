"""tools/compare_runs.py runs configurations and names planted faults, on both backends.

pytest -m campaign tests/system/test_first_divergence.py
"""

import csv
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.run_scripts import ROOT, clean_environment

pytestmark = pytest.mark.campaign

BACKENDS = ("torch", "mindspore")
CONFIG = """
output_dir: unused
device: cpu
precision: float32
model:
  {{num_layers: 3, hidden_size: 32, num_heads: 2, seq_length: 16, vocab_size: 101,
   dropout: {dropout}}}
train: {{max_steps: 20, micro_batch_size: 2, global_batch_size: 4}}
optimizer: {{name: adamw, learning_rate: 1.0e-2, decay_steps: 1000}}
data: {{train: {corpus}, split: "100,0,0", tokenizer: null}}
logging: {{tensorboard: false, plot: false}}
"""
START = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
"""
END = """
import run_gpt2
from common.training.stop import end_process
end_process(run_gpt2.main())
"""
PARTS = """
import torch_gpt2.engine as engine, torch_gpt2.model as model
build = engine.build_parts
def build_parts(*given):
    parts = build(*given)
    plant(parts[0])
    return parts
engine.build_parts = build_parts
"""
"""Hands a model that an engine has built to ``plant``."""
LAYER = {
    "torch": f"""{PARTS}
class Scaled(model.MLP):
    def forward(self, x):
        return 1.001 * super().forward(x)
def plant(built):
    built.h[2].mlp.__class__ = Scaled
""",
    "mindspore": f"""{PARTS.replace("torch_gpt2", "mindformers_gpt2")}
class Scaled(model.MLP):
    def construct(self, x):
        return 1.001 * self.c_proj(self.gelu(self.c_fc(x)))
def plant(built):
    built.h[2].mlp.__class__ = Scaled
""",
}
GRADIENT = {
    "torch": f"""{PARTS}
def plant(built):
    built.get_parameter("h.1.mlp.c_fc.weight").register_hook(lambda slope: 1.5 * slope)
""",
    "mindspore": """
import mindformers_gpt2.engine as engine
accumulate = engine.Engine._accumulate_gradients
def scaled(self, tokens):
    loss, *gradients = accumulate(self, tokens)
    place = list(self.master.tensors).index("h.1.mlp.c_fc.weight")
    gradients[place] = gradients[place] * 1.5
    return (loss, *gradients)
engine.Engine._accumulate_gradients = scaled
""",
}
SEED = {
    "torch": """
import torch_gpt2.base_engine as base
offset = base.seed_offset
base.seed_offset = lambda *given: offset(*given) + 7 * (os.environ["RANK"] == "1")
""",
    "mindspore": """
import mindformers_gpt2.engine as engine
keys = engine.own_dropout_keys
def other(*given):
    found = keys(*given)
    return found + 7 if os.environ["RANK"] == "1" else found
engine.own_dropout_keys = other
""",
}


def compare(
    folder: Path, corpus: Path, backend: str, *words: str, fault: str = "", dropout: float = 0.0
) -> tuple[int, str]:
    """Compare a configuration with itself, the second time run by a program with a fault."""
    if backend == "mindspore" and not importlib.util.find_spec("mindspore"):
        pytest.skip("MindSpore is not installed")
    config, program = folder / "tiny.yaml", folder / "fault.py"
    config.write_text(CONFIG.format(corpus=corpus, dropout=dropout))
    program.write_text(START + fault + END)
    command = [
        sys.executable, str(ROOT / "tools" / "compare_runs.py"), str(config), str(config),
        "--program_b", str(program), "--set_a", f"backend={backend}",
        "--steps", "2", "--layers", "--output", str(folder / "out"), *words,
    ]  # fmt: skip
    if not any(word.startswith("backend=") for word in words):
        command += ["--set_b", f"backend={backend}"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=clean_environment(), timeout=900, check=False
    )
    print(done.stdout, done.stderr)
    return done.returncode, done.stdout + done.stderr


def rows_that_differ(folder: Path) -> list[tuple[str, str]]:
    """Section and name of each row beyond the tolerance, from layers.tsv."""
    with (folder / "out" / "layers.tsv").open() as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    assert len(rows) == 137, "tokens, 49 weights, 18 outputs, 17 + 52 gradients"
    return [(row["section"], row["name"]) for row in rows if row["first place"] != "-"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_scaled_layer_and_a_scaled_gradient_are_named(
    tmp_path: Path, corpus_prefix: Path, backend: str
) -> None:
    code, text = compare(tmp_path, corpus_prefix, backend, fault=LAYER[backend])
    assert code == 1 and "first difference: h.2.mlp, forward" in text
    assert "the loss differs from step 1" in text and "relative 0.001" in text
    assert rows_that_differ(tmp_path)[0] == ("forward", "h.2.mlp")
    code, text = compare(tmp_path, corpus_prefix, backend, fault=GRADIENT[backend])
    assert code == 1 and "first difference: gradient of h.1.mlp.c_fc.weight, backward" in text
    assert "the gradient norm differs from step 1" in text
    assert rows_that_differ(tmp_path) == [("gradients", "h.1.mlp.c_fc.weight")]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_seed_of_one_rank_is_found(tmp_path: Path, corpus_prefix: Path, backend: str) -> None:
    """Rank 1 has the samples 2 and 3 of the batch of four; its dropout begins at the embeddings."""
    words = ("--ranks_a", "2", "--ranks_b", "2")
    code, text = compare(tmp_path, corpus_prefix, backend, *words, fault=SEED[backend], dropout=0.1)
    assert code == 1 and "the loss differs from step 1" in text
    assert "first difference: embeddings, forward (from sample 2 of the batch on" in text
    assert "which rank 1 of A and rank 1 of B read" in text


def test_two_frameworks_have_no_difference(tmp_path: Path, corpus_prefix: Path) -> None:
    """From weights of the first run's second step, made by torch."""
    words = ("--set_b", "backend=mindspore", "--step", "3")
    code, text = compare(tmp_path, corpus_prefix, "torch", *words)
    assert code == 0 and "tolerance 0.0001: no difference" in text
    assert rows_that_differ(tmp_path) == []


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["model_parallel=2", "pipeline_stage=3", "zero_stage=1"])
def test_layouts_record_the_same_tensors(
    tmp_path: Path, corpus_prefix: Path, backend: str, layout: str
) -> None:
    ranks = "3" if "pipeline" in layout else "2"
    words = ("--set_b", f"parallel.{layout}", "--ranks_b", ranks, "--step", "1")
    _, text = compare(tmp_path, corpus_prefix, backend, *words)
    assert "no difference" in text and "not compared" not in text
    assert rows_that_differ(tmp_path) == []


def train_run(folder: Path, corpus: Path, backend: str, fault: str = "") -> Path:
    """Train two steps by SGD, with a checkpoint of each, and return the run folder."""
    if backend == "mindspore" and not importlib.util.find_spec("mindspore"):
        pytest.skip("MindSpore is not installed")
    config, program = folder.with_suffix(".yaml"), folder.with_suffix(".py")
    config.write_text(CONFIG.format(corpus=corpus, dropout=0.0))
    program.write_text(START + fault + END)
    words = (
        f"backend={backend}", f"output_dir={folder}", "train.max_steps=2", "checkpoint.interval=1",
        "optimizer.name=sgd", "optimizer.clip_grad=0", "optimizer.warmup_steps=0",
    )  # fmt: skip
    subprocess.run(
        [sys.executable, str(program), "--config", str(config), "--run_mode", "train", *words],
        env=clean_environment(), check=True, capture_output=True, timeout=300,
    )  # fmt: skip
    return folder


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_run_has_its_own_weights(tmp_path: Path, corpus_prefix: Path, backend: str) -> None:
    """One gradient of B was too large, so that after a step of SGD one weight differs. From the
    weights of A, or beside a whole run, nothing differs.
    """
    one = train_run(tmp_path / "one", corpus_prefix, "torch")
    whole = train_run(tmp_path / "whole", corpus_prefix, backend)
    faulty = train_run(tmp_path / "faulty", corpus_prefix, backend, GRADIENT[backend])
    for other, words in ((faulty, ["--own_weights"]), (faulty, []), (whole, ["--own_weights"])):
        done = subprocess.run(
            [
                sys.executable, str(ROOT / "tools" / "compare_runs.py"), str(one), str(other),
                "--layers", "--step", "2", "--output", str(tmp_path / "out"), *words,
            ],
            env=clean_environment(), capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        print(done.stdout, done.stderr)
        found = rows_that_differ(tmp_path)
        if other == faulty and words:
            assert "first difference: weight h.1.mlp.c_fc.weight before the step" in done.stdout
            weights = [name for section, name in found if section == "weights"]
            assert weights == ["h.1.mlp.c_fc.weight"]
        else:
            assert found == []
