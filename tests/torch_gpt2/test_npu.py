"""device=npu on a simulated NPU (tests/simulated_npu), and torch_npu where it cannot be loaded. No
figure here speaks of Ascend's own.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel

from common.config.load import build_config
from common.inputs import make_run
from common.parallel.packing import KEYS
from common.resolve.derive import resolve_config
from common.training.metrics import read_metrics
from tests.config_overrides import changed
from tests.ranks import ROOT, run_ranks
from torch_gpt2.train import train

# float32 sums of the same terms in another order, as over gloo
TOLERANCE = 1e-6

PLAIN = {"optimizer__clip_grad": 0.0}
CLIPPED = {"optimizer__clip_grad": 2.0}  # the norms lie between 2.3 and 1.4: acts on some steps
VARIANTS: dict[str, dict[str, Any]] = {
    "sgd": PLAIN,
    "sgd with clip": CLIPPED,
    "bf16 weights": {"precision": {"parameters": "bfloat16", "compute": "bfloat16"}, **PLAIN},
    "fp16 that overflows": {
        "precision": "fp16",
        "loss_scale": {"initial": 2.0**20, "window": 3},
        **PLAIN,
    },
    "tensor parallel": {"parallel__model_parallel": 2, **PLAIN},
    "sequence parallel": {
        "parallel__model_parallel": 2,
        "parallel__sequence_parallel": True,
        **CLIPPED,
    },
    "pipeline parallel": {
        "parallel__pipeline_stage": 2,
        "train__offload_activations": True,
        "train__recompute": "full",
        **CLIPPED,
    },
    "state split (ZeRO 1)": {"parallel__zero_stage": 1, **CLIPPED},
    "everything split (ZeRO 3)": {
        "parallel__zero_stage": 3,
        "train__offload_activations": True,
        **CLIPPED,
    },
    "documents kept apart": {
        "parallel__pipeline_stage": 2,
        **dict.fromkeys(map("data__{}".format, KEYS), True),
        "data__eod_id": 3,  # occurs among the random tokens
        **CLIPPED,
    },
    "adamw, gradients split (ZeRO 2)": {
        "parallel__zero_stage": 2,
        "optimizer": {"learning_rate": 0.01, "schedule": "constant", "clip_grad": 2.0},
    },
}
NATIVE = tuple(VARIANTS)
if find_spec("deepspeed"):  # its ZeRO-3 does not end its first step on this device
    VARIANTS |= {
        "DeepSpeed": {"engine": "deepspeed", **CLIPPED},
        "DeepSpeed ZeRO 2": {"engine": "deepspeed", "parallel__zero_stage": 2, **CLIPPED},
        "DeepSpeed pipeline": {
            "engine": "deepspeed",
            "parallel__zero_stage": 1,
            "parallel__pipeline_stage": 2,
            **PLAIN,
        },
    }


def tree(folder: Path, corpus: Path, **changes: Any) -> dict[str, Any]:
    return changed(
        {
            "output_dir": str(folder),
            "device": "npu",
            "model": {
                "num_layers": 2,
                "hidden_size": 32,
                "num_heads": 2,
                "seq_length": 16,
                "vocab_size": 101,
            },
            "train": {"max_steps": 8, "micro_batch_size": 2, "global_batch_size": 8},
            "optimizer": {
                "name": "sgd",
                "learning_rate": 0.1,
                "momentum": 0.9,
                "schedule": "constant",
            },
            "data": {"train": str(corpus), "split": "90,10,0"},
            "validation": {"max_samples": 8, "interval": 4},
            "logging": {"tensorboard": False, "plot": False},
        },
        changes,
    )


def test_everything_on_one_npu(npu_variables: dict[str, str], tmp_path: Path) -> None:
    """npu_checks.py in a process of its own: a device once registered stays, and would be there for
    other tests.
    """
    checks = str(Path(__file__).with_name("npu_checks.py"))
    words = ["-q", "-x", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'npu'}", checks]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=ROOT,
        env=os.environ | npu_variables,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory, corpus_prefix: Path, npu_variables: dict[str, str]
) -> Path:
    """Every variant on two NPUs, and on one CPU in one process: folder / device / variant."""
    folder = tmp_path_factory.mktemp("npus")
    variables = npu_variables | {"ASCEND_HOME_PATH": str(folder)}  # DeepSpeed asks where CANN is
    run_ranks(
        2,
        [tree(folder / "npu" / name, corpus_prefix, **VARIANTS[name]) for name in VARIANTS],
        variables=variables,
        watched="host_waits",
    )
    with sdpa_kernel(SDPBackend.MATH):  # the simulated NPU's only one
        for name, changes in VARIANTS.items():
            alone = {
                key: value
                for key, value in changes.items()
                if not key.startswith(("parallel__", "engine", "train__offload"))
            }
            train(
                *make_run(
                    resolve_config(
                        build_config(
                            tree(folder / "cpu" / name, corpus_prefix, device="cpu", **alone)
                        )
                    )
                )
            )
    return folder


@pytest.mark.long
@pytest.mark.parametrize("name", list(VARIANTS))
def test_two_ranks_over_hccl_equal_one_process(runs: Path, name: str) -> None:
    one, two = (read_metrics(runs / device / name / "metrics.jsonl") for device in ("cpu", "npu"))
    assert len(one) == 10  # 8 steps and 2 validations
    for key in (
        "step",
        "sample_hash",
        "consumed_samples",
        "learning_rate",
        "loss_scale",
        "skipped",
        "validation_tokens",
    ):
        assert [row.get(key) for row in two] == [row.get(key) for row in one], key
    if VARIANTS[name].get("optimizer__clip_grad"):
        clipped = [row["grad_norm"] > 2.0 for row in two if "loss" in row]
        assert any(clipped) and not all(clipped)
    for key in ("loss", "grad_norm", "validation_loss"):
        # a norm that overflowed is null
        assert [row.get(key) for row in two] == [
            value and pytest.approx(value, rel=TOLERANCE) for value in (row.get(key) for row in one)
        ]


@pytest.mark.long
@pytest.mark.parametrize("name", NATIVE)
def test_no_step_waits_for_the_host(runs: Path, name: str) -> None:
    """Nothing is read, copied with waiting, or sent between hosts. Step 1 fills memory, steps 4 and
    8 end with validations. Adam's kernel asks once a step whether the step counts.
    """
    for rank in range(2):
        before, *steps = json.loads((runs / "npu" / name / f"watched_{rank}.json").read_text())
        asked = [
            sum(found.pop(key) for key in list(found) if "torch_gpt2/device_step.py" in key)
            for found in steps
        ]
        assert asked == [int(name.startswith("adamw"))] * 8
        assert [number for number, found in enumerate(steps, 1) if found] in ([4, 8], [1, 4, 8])
        assert before  # the counter sees the start of the run


@pytest.fixture
def without_cann(tmp_path: Path) -> dict[str, str]:
    """torch_npu as pip leaves it on a machine without CANN: torch loads it by itself, and it finds
    no libraries.
    """
    package = tmp_path / "site" / "torch_npu"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "raise ImportError('libhccl.so: cannot open shared object file: No such file or"
        " directory')\n"
    )
    record = tmp_path / "site" / "torch_npu-2.13.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-npu\nVersion: 2.13.0\n")
    (record / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ASCEND_", "TORCH_DEVICE_BACKEND"))
    }
    return kept | {"PYTHONPATH": str(tmp_path / "site")}


def test_torch_npu_without_cann_is_left_alone(
    without_cann: dict[str, str], tmp_path: Path, corpus_prefix: Path
) -> None:
    alone = subprocess.run(
        [sys.executable, "-c", "import torch"],
        env=without_cann,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (
        alone.returncode == 1 and "Failed to load the backend extension: torch_npu" in alone.stderr
    ), "there is a trap"
    (tmp_path / "run.yaml").write_text(
        str(tree(tmp_path / "out", corpus_prefix, train__max_steps=2))
    )
    program = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from run_gpt2 import main
attempted = []
def find_spec(name, *rest):
    if name == "torch_npu":
        attempted.append(name)
sys.meta_path.insert(0, type("Watch", (), {{"find_spec": find_spec}}))
for number, words in enumerate(sys.argv[1:]):
    device, _, cann = words.partition(" ")
    os.environ |= {{"ASCEND_HOME_PATH": cann}} if cann else {{}}
    words = ["--config", {str(tmp_path / "run.yaml")!r}, "--run_mode", "train"]
    words += [f"device={{device}}", f"output_dir={tmp_path}/{{number}}"]
    print("code", main(words), "attempted" if attempted else "untouched", flush=True)
"""
    words = [sys.executable, "-c", program, "cpu", "auto", "npu", "auto /usr/local/Ascend/latest"]
    done = subprocess.run(words, env=without_cann, capture_output=True, text=True, timeout=120)
    codes = [line for line in done.stdout.splitlines() if line.startswith("code")]
    assert codes == [
        "code 0 untouched",
        "code 0 untouched",
        "code 2 attempted",
        "code 0 attempted",
    ], done.stdout + done.stderr
    reason = (
        "device=npu: torch_npu cannot be loaded (libhccl.so: cannot open shared object file:"
        " No such file or directory)"
    )
    assert f"error: {reason}; source CANN's set_env.sh first" in done.stderr
    assert f"device=auto is the CPU here; {reason}" in done.stdout
