"""A parameter server and Horovod at two ranks against one process, with and without mixed
precision; what they refuse.

Horovod itself is seldom installed: a stand-in with the functions that its manual documents sums
over gloo.
"""

from pathlib import Path
from typing import Any

import pytest

from common.config.load import build_config
from common.errors import ConfigError
from common.inputs import make_run
from common.training.metrics import read_metrics
from tests.config_overrides import changed
from tests.ranks import run_ranks
from torch_gpt2.train import train

# float32 sums of the same terms in another order
TOLERANCE = 1e-6
# in bfloat16 from the second step on: a weight that differs in its last bit may round the other way
ROUNDING = 2.0**-9

NUMERICS: dict[str, dict[str, Any]] = {
    "plain": {"optimizer__clip_grad": 0.0},
    "clipped": {"optimizer__clip_grad": 1.3},  # acts on some steps
    "bf16": {"precision": "bf16"},
    "fp16 that overflows": {
        "precision": "fp16",
        "loss_scale": {"initial": 2.0**26, "window": 3},
        "optimizer__clip_grad": 0.0,
    },
}

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


def tree(folder: Path, corpus: Path, **changes: Any) -> dict[str, Any]:
    return changed(
        {
            "output_dir": str(folder),
            "device": "cpu",
            "model": {
                "num_layers": 2,
                "hidden_size": 32,
                "num_heads": 2,
                "seq_length": 16,
                "vocab_size": 101,
            },
            "train": {"max_steps": 10, "micro_batch_size": 2, "global_batch_size": 12},
            "optimizer": {
                "name": "sgd",
                "learning_rate": 0.3,
                "momentum": 0.9,
                "schedule": "constant",
            },
            "data": {"train": str(corpus), "split": "90,10,0"},
            "validation": {"max_samples": 10},
            "logging": {"tensorboard": False, "plot": False},
        },
        changes,
    )


def train_here(job: dict[str, Any]) -> None:
    train(*make_run(build_config(job)))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, corpus_prefix: Path) -> Path:
    """one, parameter_server and horovod / NUMERICS; a parameter server in two parts as well."""
    folder = tmp_path_factory.mktemp("strategies")
    package = folder / "packages" / "horovod"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "torch.py").write_text(HOROVOD)
    for name, changes in NUMERICS.items():
        train_here(tree(folder / "one" / name, corpus_prefix, **changes))
    jobs = [
        tree(folder / strategy / name, corpus_prefix, parallel__strategy=strategy, **changes)
        for strategy in ("parameter_server", "horovod")
        for name, changes in NUMERICS.items()
    ]
    jobs += [
        tree(
            folder / "halves",
            corpus_prefix,
            parallel__strategy="parameter_server",
            train__max_steps=steps,
            **NUMERICS["clipped"],
        )
        for steps in (5, 10)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder / "packages"))
        run_ranks(2, jobs)
    return folder


@pytest.mark.parametrize("name", list(NUMERICS))
@pytest.mark.parametrize("strategy", ["parameter_server", "horovod"])
def test_equal_to_one_process(runs: Path, strategy: str, name: str) -> None:
    one, many = (read_metrics(runs / kind / name / "metrics.jsonl") for kind in ("one", strategy))
    assert len(one) == 11  # 10 steps and a validation
    for key in ("step", "sample_hash", "learning_rate", "loss_scale", "skipped"):
        assert [row.get(key) for row in many] == [row.get(key) for row in one], key
    for key in ("loss", "grad_norm", "validation_loss"):
        for number, (row, wanted) in enumerate(zip(many, one, strict=True)):
            tolerance = ROUNDING if name == "bf16" and number else TOLERANCE
            # a norm that overflowed is null
            assert row.get(key) == (
                wanted.get(key) and pytest.approx(wanted[key], rel=tolerance)
            ), (key, row["step"])


def test_a_parameter_server_resumes_with_the_same_bits(runs: Path) -> None:
    rows = [
        [
            (row["step"], row["loss"], row["grad_norm"])
            for row in read_metrics(folder / "metrics.jsonl")
            if "loss" in row
        ]
        for folder in (runs / "parameter_server" / "clipped", runs / "halves")
    ]
    assert rows[0] == rows[1]


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (
            "parameter_server",
            "parallel.strategy=parameter_server in one process needs several devices, found 1",
        ),
        ("horovod", "parallel.strategy=horovod: the package is not installed"),
    ],
)
def test_refused_where_it_cannot_run(
    tmp_path: Path, corpus_prefix: Path, strategy: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        train_here(tree(tmp_path / "run", corpus_prefix, parallel__strategy=strategy))
    assert message in str(caught.value)
