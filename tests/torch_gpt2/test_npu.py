"""device=npu on a simulated NPU (tests/simulated_npu), device=cuda in eager mode on an H100 that
computes nothing (tests/fake_cuda), and torch_npu where it cannot be loaded. No figure here speaks
of Ascend's own.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.layouts import NPU, NPU_CLIP, chosen_rows
from tests.ranks import ROOT, run_ranks
from tests.tiny import rows_of, some_but_not_all, tiny_run, train_here


@pytest.mark.parametrize("device", ["npu", "cuda"])
def test_everything_on_one_device(
    device: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """npu_checks.py and cuda_checks.py in processes of their own: a device once registered stays,
    and would be there for other tests.
    """
    variables = request.getfixturevalue(f"{device}_variables")
    checks = str(Path(__file__).with_name(f"{device}_checks.py"))
    words = ["-q", "-x", "-p", "no:cacheprovider", f"--basetemp={tmp_path / device}", checks]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )
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
    (folder / "ds_config.json").write_text("{}")
    variables = npu_variables | {"ASCEND_HOME_PATH": str(folder)}  # DeepSpeed asks where CANN is
    rows = chosen_rows(request)
    run_ranks(
        2,
        [NPU.case(folder, corpus_prefix, *row) for row in rows],
        variables=variables,
        watched="host_waits",
    )
    with sdpa_kernel(SDPBackend.MATH):  # the simulated NPU's only one
        for numerics in dict.fromkeys(numerics for _, numerics in rows):
            alone = NPU.case(folder, corpus_prefix, "one", numerics)
            train_here({key: alone[key] for key in alone if key != "ranks"} | {"device": "cpu"})
    return folder


CASES = [
    case
    for case in NPU.cases()
    if find_spec("deepspeed") or not str(case.values[0]).startswith("deepspeed")
]


@pytest.mark.long
@pytest.mark.parametrize(("layout", "numerics"), CASES)
def test_two_ranks_over_hccl_equal_one_process(runs: Path, layout: str, numerics: str) -> None:
    """And no step waits for the host: nothing is read, copied with waiting, or sent between hosts.
    Step 1 fills memory, steps 4 and 8 end with validations. Adam's kernel asks once a step whether
    the step counts. DeepSpeed's steps of two micro batches read the loss and the norm, and sum the
    loss between hosts.
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
        asked = [
            sum(found.pop(key) for key in list(found) if "torch_gpt2/device_step.py" in key)
            for found in steps
        ]
        assert asked == [int(numerics == "adamw")] * 8
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
    of_npus = ("ASCEND_", "TORCH_DEVICE_BACKEND")
    kept = {name: each for name, each in os.environ.items() if not name.startswith(of_npus)}
    return kept | {"PYTHONPATH": str(tmp_path / "site")}


def test_torch_npu_without_cann_is_left_alone(
    without_cann: dict[str, str], tmp_path: Path, corpus_prefix: Path
) -> None:
    options = {"env": without_cann, "capture_output": True, "text": True, "timeout": 120}
    alone = subprocess.run([sys.executable, "-c", "import torch"], **options)
    assert alone.returncode == 1, "there is a trap"
    assert "Failed to load the backend extension: torch_npu" in alone.stderr
    tree = tiny_run(tmp_path / "out", corpus_prefix, train__max_steps=2)
    (tmp_path / "run.yaml").write_text(str(tree))
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
    done = subprocess.run(words, **options)
    codes = [line for line in done.stdout.splitlines() if line.startswith("code")]
    ends = ["code 0 untouched", "code 0 untouched", "code 2 attempted", "code 0 attempted"]
    assert codes == ends, done.stdout + done.stderr
    reason = (
        "device=npu: torch_npu cannot be loaded (libhccl.so: cannot open shared object file:"
        " No such file or directory)"
    )
    assert f"error: {reason}; source CANN's set_env.sh first" in done.stderr
    assert f"device=auto is the CPU here; {reason}" in done.stdout
