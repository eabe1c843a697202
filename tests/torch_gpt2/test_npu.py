"""device=npu on a simulated NPU (tests/simulated_npu), device=cuda in eager mode on an H100 that computes nothing
(tests/fake_cuda), and torch_npu where it cannot be loaded. No figure here speaks of Ascend's own.
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

from tests.layouts import NPU, NPU_CLIP, chosen_rows
from tests.ranks import ROOT, run_ranks
from tests.tiny import rows_of, some_but_not_all, tiny_run, train_here


@pytest.mark.parametrize("device", ["npu", pytest.param("cuda", marks=pytest.mark.long)])
def test_everything_on_one_device(device: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """In processes of their own: a device once registered stays, and would be there for other tests."""
    variables = request.getfixturevalue(f"{device}_variables")
    checks = str(Path(__file__).with_name(f"{device}_checks.py"))
    words = [sys.executable, *f"-m pytest -q -x -p no:cacheprovider --basetemp={tmp_path / device}".split(), checks]
    done = subprocess.run(words, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory,
    corpus_prefix: Path,
    npu_variables: dict[str, str],
    request: pytest.FixtureRequest,
) -> Path:
    """folder / layout / numerics on two NPUs; "one" is one process on the CPU."""
    folder = tmp_path_factory.mktemp("npus")
    for name in ("ds_zero.json", "ds_whole.json"):
        (folder / name).write_text("{}")
    variables = npu_variables | {"ASCEND_HOME_PATH": str(folder)}  # DeepSpeed asks where CANN is
    rows = chosen_rows(request)
    jobs = [NPU.case(folder, corpus_prefix, *row) for row in rows]
    run_ranks(2, jobs, variables=variables, watched="host_waits")
    with sdpa_kernel(SDPBackend.MATH):  # the simulated NPU's only one
        for numerics in dict.fromkeys(numerics for _, numerics in rows):
            alone = NPU.case(folder, corpus_prefix, "one", numerics)
            train_here({key: alone[key] for key in alone if key != "ranks"} | {"device": "cpu"})
    return folder


CASES = [case for case in NPU.cases() if find_spec("deepspeed") or not str(case.values[0]).startswith("deepspeed")]


@pytest.mark.long
@pytest.mark.parametrize(("layout", "numerics"), CASES)
def test_two_ranks_over_hccl_equal_one_process(runs: Path, layout: str, numerics: str) -> None:
    """And no step waits for the host: nothing is read, copied with waiting, or sent between hosts. Step 1 fills memory,
    steps 4 and 8 end with validations. Adam's kernel asks once a step whether the step counts. DeepSpeed's steps of two
    micro batches read the loss and the norm, and sum the loss between hosts.
    """
    NPU.hold(runs, layout, numerics)
    rows = rows_of(runs / layout / numerics)
    assert len(rows) == 8
    if NPU.numerics[numerics].get("optimizer__clip_grad"):
        assert some_but_not_all([row["grad_norm"] > NPU_CLIP for row in rows])
    for rank in range(2):
        note = runs / layout / numerics / f"watched_{rank}.json"
        before, *steps = json.loads(note.read_text())
        if layout.startswith("deepspeed"):
            assert layout != "deepspeed" or sum(steps[1].values()) == 3
            continue
        of_adam = "torch_gpt2/optimizer.py"
        asked = [sum(found.pop(key) for key in [*found] if of_adam in key) for found in steps]
        assert asked == [int(numerics == "adamw")] * 8
        assert [number for number, found in enumerate(steps, 1) if found] in ([4, 8], [1, 4, 8])
        assert before  # the counter sees the start of the run


PROGRAM = """
import os, sys
from run_gpt2 import main
attempted = []
find_spec = lambda name, *rest: attempted.append(name) if name == "torch_npu" else None
sys.meta_path.insert(0, type("Watch", (), {"find_spec": staticmethod(find_spec)}))
config, *runs = sys.argv[1:]
for words in runs:
    device, _, os.environ["ASCEND_HOME_PATH"] = words.partition(" ")
    folder = f"output_dir={config}.{device}"
    code = main(["--config", config, "--run_mode", "train", f"device={device}", folder])
    print("code", code, "attempted" if attempted else "untouched", flush=True)
"""


def test_torch_npu_without_cann_is_left_alone(tmp_path: Path, corpus_prefix: Path) -> None:
    """As pip leaves it on a machine without CANN: torch loads it by itself, and it finds no libraries."""
    fault = "libhccl.so: cannot open shared object file: No such file or directory"
    record = tmp_path / "torch_npu-2.13.0.dist-info"
    record.mkdir()
    (tmp_path / "torch_npu.py").write_text(f"raise ImportError({fault!r})\n")
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-npu\nVersion: 2.13.0\n")
    (record / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    of_npus = ("ASCEND_", "TORCH_DEVICE_BACKEND")
    kept = {name: each for name, each in os.environ.items() if not name.startswith(of_npus)}
    kept["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(ROOT)])
    options: dict[str, Any] = {"env": kept, "capture_output": True, "text": True, "timeout": 120}
    alone = subprocess.run([sys.executable, "-c", "import torch"], **options)
    assert alone.returncode == 1, "there is a trap"
    assert "Failed to load the backend extension: torch_npu" in alone.stderr
    config = tmp_path / "run.yaml"
    config.write_text(str(tiny_run(tmp_path / "out", corpus_prefix, train__max_steps=2)))
    words = [sys.executable, "-c", PROGRAM, str(config), "cpu", "auto", "npu", "auto /usr/local"]
    done = subprocess.run(words, **options)
    codes = [line for line in done.stdout.splitlines() if line.startswith("code")]
    ends = ["code 0 untouched", "code 0 untouched", "code 2 attempted", "code 0 attempted"]
    assert codes == ends, done.stdout + done.stderr
    reason = f"device=npu: torch_npu cannot be loaded ({fault})"
    assert f"error: {reason}; source CANN's set_env.sh first" in done.stderr
    assert f"device=auto is the CPU here; {reason}" in done.stdout
