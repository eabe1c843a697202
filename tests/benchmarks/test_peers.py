"""Peers of a study compute what the toolkit computes, from the same weights on the same batches."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from benchmarks.peers.frame import main
from benchmarks.peers.nanogpt_style import NanoGPTStyle
from common.config.load import build_config, save_config
from common.training.metrics import read_metrics
from run_gpt2 import main as run_gpt2
from tests.ranks import ROOT, end_ranks, free_port, rank_environment
from tests.tiny import tiny_run

# float32 sums of the same terms in another order: within 2e-6 of the losses over six steps.
# torch's clip adds squares in float32 on a CPU, so norms are further apart.
LOSSES, NORMS = 2e-6, 1e-4


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    """Restore the environment: a peer sets torch's variables, as its process ends with it."""
    with mock.patch.dict(os.environ):
        yield


def make_config(folder: Path, corpus: Path) -> Path:
    """Three micro batches a rank, a clip that acts on every step, no dropout."""
    adamw = {"learning_rate": 0.01, "weight_decay": 0.1, "epsilon": 1e-4, "warmup_steps": 2}
    sizes = {"model__initializer_range": 0.1, "model__dropout": 0.0, "validation__max_samples": 4}
    steps = {"train__max_steps": 6, "train__global_batch_size": 12}
    path = folder / "peer.yaml"
    save_config(build_config(tiny_run(folder, corpus, optimizer=adamw, **sizes, **steps)), path)
    return path


def words_of(path: Path, folder: Path) -> list[str]:
    return ["--config", str(path), "--run_mode", "train", f"output_dir={folder}"]


def assert_same(folder: Path, reference: Path) -> None:
    theirs, ours = (read_metrics(each / "metrics.jsonl") for each in (folder, reference))
    assert len(theirs) == len(ours) == 7
    for their, our in zip(theirs, ours, strict=True):
        if "validation_loss" in our:
            assert their["validation_loss"] == pytest.approx(our["validation_loss"], rel=LOSSES)
            continue
        for name in ("step", "learning_rate", "sample_hash", "consumed_samples"):
            assert their[name] == our[name]
        assert their["loss"] == pytest.approx(our["loss"], rel=LOSSES)
        assert their["grad_norm"] == pytest.approx(our["grad_norm"], rel=NORMS)


def test_nanogpt_style(tmp_path: Path, corpus_prefix: Path) -> None:
    path = make_config(tmp_path, corpus_prefix)
    assert run_gpt2(words_of(path, tmp_path / "ours")) == 0
    assert main(NanoGPTStyle, words_of(path, tmp_path / "peer")) == 0
    assert_same(tmp_path / "peer", tmp_path / "ours")
    assert not (tmp_path / "peer" / "checkpoints" / "latest").exists()
    assert (tmp_path / "peer" / "memory.json").exists()


def test_features_that_a_peer_lacks(tmp_path, corpus_prefix, capsys) -> None:
    words = words_of(make_config(tmp_path, corpus_prefix), tmp_path / "peer")
    for word, named in (
        ("precision=fp16", "precision.compute=float16"),
        ("optimizer.name=sgd", "optimizer.name=sgd"),
        ("train.recompute=selective", "train.recompute=selective"),
    ):
        assert main(NanoGPTStyle, [*words, word]) == 2
        assert f"error: peer nanogpt_style: {named}: it has" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize(
    ("peer", "package", "words"),
    [
        pytest.param("nanogpt_style", "transformers", [], marks=pytest.mark.campaign),
        pytest.param("deepspeed", "deepspeed", ["parallel.zero_stage=2"], marks=pytest.mark.campaign),
        ("transformers", "accelerate", []),
    ],
)
def test_programs_of_two_ranks(peer, package, words, tmp_path, corpus_prefix) -> None:
    """A file that is called as a package must not hide it; without the package it says so."""
    path = make_config(tmp_path, corpus_prefix)
    is_there = importlib.util.find_spec(package) is not None
    command = [sys.executable, f"benchmarks/peers/{peer}.py", *words_of(path, tmp_path / "peer")]
    port, ranks = free_port(), 1 + is_there
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": ROOT}
    processes = [
        subprocess.Popen([*command, *words], env=rank_environment(rank, ranks, port), **pipes) for rank in range(ranks)
    ]
    codes, texts = end_ranks(processes, seconds=240)
    if not is_there:
        assert codes == [2] and f"the package {package}, which the peer {peer} needs, is not installed" in texts[0]
        return
    assert codes == [0, 0], "\n".join(texts)
    assert run_gpt2(words_of(path, tmp_path / "ours")) == 0
    assert_same(tmp_path / "peer", tmp_path / "ours")
