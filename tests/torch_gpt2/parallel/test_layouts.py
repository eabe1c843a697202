"""Every layout of torch against one process: the rows of tests/layouts.py, in one start of eight ranks."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from common.backends import make_run
from common.config.load import build_config
from common.errors import ConfigError
from common.training.metrics import read_metrics
from tests.layouts import CLIP, STEPS, TOLERANCE, TORCH, chosen_rows, require_seen_faults
from tests.packed_corpus import write_packed_corpus
from tests.ranks import run_ranks
from tests.tiny import params_of, rows_of, some_but_not_all
from torch_gpt2.train import train

pytestmark = pytest.mark.long

HOROVOD = """
import torch.distributed as dist
Sum = dist.ReduceOp.SUM
init = lambda: None
rank = dist.get_rank
size = dist.get_world_size
def broadcast_parameters(params, root_rank):
    for name, tensor in sorted(params.items()):
        dist.broadcast(tensor.data, root_rank)
def grouped_allreduce(tensors, average=None, name=None, compression=None, op=None):
    assert average is None and op is Sum  # Horovod averages unless told otherwise
    copies = [tensor.clone() for tensor in tensors]
    for tensor in copies:
        dist.all_reduce(tensor, op)
    return copies
"""
"""A stand-in with the functions that its manual documents: it is seldom installed."""
# small enough for this model that buckets fill up and ZeRO-3 cuts every parameter
BUCKETS = {"reduce_bucket_size": 2000, "stage3_param_persistence_threshold": 0}
# as the Ascend ModelZoo's scripts do, and ZeRO-2 cannot
WHOLE = {"prescale_gradients": True}
EVALUATED = ("uneven", "dp2 tp2", "zero3 tp2", "dp2 pp2")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, corpus_prefix: Path, request: pytest.FixtureRequest) -> Path:
    """folder / layout / numerics; "one" is one process; folder / layout / eval."""
    folder = tmp_path_factory.mktemp("layouts")
    package = folder / "packages" / "horovod"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "torch.py").write_text(HOROVOD)
    (folder / "ds_zero.json").write_text(json.dumps({"zero_optimization": BUCKETS}))
    (folder / "ds_whole.json").write_text(json.dumps(WHOLE))
    write_packed_corpus(folder)
    reduced = {"precision": {"reduction": "bfloat16"}, "train__max_steps": 1}
    jobs = [TORCH.job(folder / "dp2" / "reduced", corpus_prefix, ranks=2, **reduced)]
    jobs += TORCH.jobs(folder, corpus_prefix, chosen_rows(request))
    if importlib.util.find_spec("deepspeed") is None:
        jobs = [job for job in jobs if job.get("engine") != "deepspeed"]
    load = {"run_mode": "eval", "checkpoint__load": str(folder / "one" / "clip")}
    for (name,) in params_of(request, "name"):
        layout = TORCH.layouts[name]
        changes = {"ranks": layout.ranks} | layout.settings | load
        jobs.append(TORCH.job(folder / name / "eval", corpus_prefix, **changes))
    jobs.sort(key=lambda job: "alone" in job["output_dir"])  # DeepSpeed's group of one rank stays
    variables = {"PYTHONPATH": str(folder / "packages")}
    run_ranks(8, jobs, watched="message_counters", variables=variables, seconds=2.0)
    return folder


@pytest.mark.parametrize(("layout", "numerics"), TORCH.cases())
def test_a_layout_trains_as_one_process(runs: Path, layout: str, numerics: str) -> None:
    if layout.startswith("deepspeed") and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    TORCH.hold(runs, layout, numerics)


@pytest.mark.parametrize("layout", ["one"])
@pytest.mark.parametrize("numerics", ["plain", "clip", "fp16", "O2", "outliers"])
def test_the_numerics_do_what_their_names_say(runs: Path, layout: str, numerics: str) -> None:
    rows = rows_of(runs / layout / numerics)
    skipped = [row["skipped"] for row in rows]
    if numerics == "clip":
        assert some_but_not_all([row["grad_norm"] > CLIP for row in rows])
    elif numerics == "plain":
        assert len(rows) == STEPS and not any(skipped)
        require_seen_faults(runs / layout / numerics)
    else:
        assert some_but_not_all(skipped)
    if numerics == "fp16":
        made = [row["learning_rate"] for row in rows if not row["skipped"]]
        up, down = [0.0, 1 / 3, 2 / 3], [1 - number / 7 for number in range(7)]
        assert made == pytest.approx([0.05 * share for share in (up + down)[: len(made)]])
        assert len(made) > 4, "a warm-up counts updates"


@pytest.mark.parametrize("layout", ["one"])
@pytest.mark.parametrize("numerics", ["clip"])
@pytest.mark.parametrize("name", EVALUATED)
def test_ranks_evaluate_a_checkpoint_together(runs: Path, name: str, layout: str, numerics: str) -> None:
    *_, expected = read_metrics(runs / layout / numerics / "metrics.jsonl")
    found = json.loads((runs / name / "eval" / "evaluation.json").read_text())
    assert found["tokens"] == expected["validation_tokens"]
    assert found["validation_loss"] == pytest.approx(expected["validation_loss"], rel=TOLERANCE)


@pytest.mark.parametrize(("layout", "numerics"), [("dp2", "plain")])
def test_gradients_exchanged_in_bfloat16(runs: Path, layout: str, numerics: str) -> None:
    """Eight bits of mantissa in each gradient; rounding is unbiased, so that the norm moves by much less than 2^-8."""
    rounded, exact = (rows_of(runs / layout / name)[0] for name in ("reduced", numerics))
    assert rounded["loss"] == exact["loss"]
    assert 0 < abs(rounded["grad_norm"] / exact["grad_norm"] - 1) < 2**-8


def watched(run: Path, what: str) -> list[int]:
    """By rank."""
    notes = [run / f"watched_{rank}.json" for rank in range(len(list(run.glob("watched_*"))))]
    return [json.loads(note.read_text())[what] for note in notes]


@pytest.mark.parametrize("numerics", ["clip"])
@pytest.mark.parametrize(
    ("layout", "units"), [("zero1", 5), ("zero2 recomputed", 5), ("zero1 pp2", 3), ("zero3 pp2", 3)]
)
def test_parameters_are_gathered_once_a_step(runs: Path, layout: str, numerics: str, units: int) -> None:
    """Gathers of each block and all others, for ten steps of three micro batches and two validations, of which the
    sixth step uses what the first gathered; a pipeline tries its stages once before.
    """
    once = units * (STEPS + 2 - 1 + layout.endswith("pp2"))
    assert set(watched(runs / layout / numerics, "gathers")) == {once}


@pytest.mark.parametrize("numerics", ["plain"])
@pytest.mark.parametrize(
    ("layout", "most"),
    [
        ("gpipe", [1, 6]),
        ("1f1b", [1, 1]),
        ("pp4", [1, 3 + 1, 2 + 1, 1]),
        ("interleaved", [2 + 1, 4 + 2]),
        ("zero bubble", [2 + 1, 4 + 2]),
        ("zbv", [2, 3 + 1]),
    ],
)
def test_buffers_are_those_of_micro_batches_under_way(runs: Path, layout: str, numerics: str, most: list[int]) -> None:
    """Inputs of stages until their backward passes, and gradients; torch itself has one of each for all six."""
    assert watched(runs / layout / numerics, "received") == most


REFUSED = [
    ("parallel__strategy", "parameter_server", "in one process needs several devices, found 1"),
    ("parallel__strategy", "horovod", "strategy=horovod: the package is not installed"),
    ("engine", "deepspeed", "pip install -c constraints.txt -e '.[deepspeed]'"),
]


@pytest.mark.parametrize(("key", "value", "message"), REFUSED)
def test_refused_where_it_cannot_run(
    corpus_prefix: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: str, message: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    tree = TORCH.job(Path("unused"), corpus_prefix, **{key: value})
    with pytest.raises(ConfigError, match=re.escape(message)):
        train(*make_run(build_config(tree)))
