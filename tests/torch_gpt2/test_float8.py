"""precision=fp8: torchao's products, emulated on the CPU, against a closed form and bf16."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchao", reason="torchao is not installed: pip install '.[fp8]'")

from torch import Tensor  # noqa: E402

from common.checkpoint.folders import find_checkpoint  # noqa: E402
from common.config.load import build_config  # noqa: E402
from common.errors import ConfigError, DeviceError  # noqa: E402
from common.resolve.derive import resolve_config, resolve_mode  # noqa: E402
from common.run_config import load_config  # noqa: E402
from tests import emulated_float8  # noqa: E402
from tests.tiny import rows_of, tiny_run, train_here  # noqa: E402
from torch_gpt2 import float8  # noqa: E402
from torch_gpt2.device import TorchDevice, check_support, select_device  # noqa: E402
from torch_gpt2.model import GPT2  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


@pytest.fixture
def emulated() -> Iterator[None]:
    with emulated_float8.watch():
        yield


def run(folder: Path, corpus: Path, **changes: Any) -> dict[str, Any]:
    wide: dict[str, Any] = {
        "model__hidden_size": 64,
        "model__seq_length": 32,
        "train": {"max_steps": 40, "micro_batch_size": 8},
        "optimizer": {"learning_rate": 0.001},
        "data__split": "100,0,0",
    }
    return tiny_run(folder, corpus, **(wide | changes))


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in rows_of(folder)]


def rounded(x: Tensor, kind: torch.dtype, dim: int | None) -> Tensor:
    """x as float8 holds it, times the scale that was taken out. dim: scales of each row."""
    x = x.double()
    most = x.abs().max() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = LARGEST[kind] / most
    if dim is not None:
        scale = 2.0 ** scale.log2().floor()
    return (x * scale).float().to(kind).double() / scale


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_a_layer_is_the_closed_form(
    scaling: str, emulated: None, tmp_path: Path, corpus_prefix: Path
) -> None:
    precision = {"compute": "bfloat16", "float8": scaling}
    config = resolve_config(build_config(run(tmp_path, corpus_prefix, precision=precision)))
    torch.manual_seed(0)
    model = GPT2(config.model, config.precision, config.vocab_rows)
    names = {name: id(parameter) for name, parameter in model.named_parameters()}
    float8.convert_linear_layers(model, config)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == names
    layer = model.h[0].mlp.c_fc
    x = torch.randn(48, 64).bfloat16().requires_grad_()
    out = layer(x)
    gradient = torch.randn_like(out)
    out.backward(gradient)

    e4m3 = torch.float8_e4m3fn
    of_gradient = torch.float8_e5m2 if scaling == "tensorwise" else e4m3
    rows, columns = (None, None) if scaling == "tensorwise" else (1, 0)
    weight = layer.weight.detach()
    expected = rounded(x.detach(), e4m3, rows) @ rounded(weight, e4m3, rows).T + layer.bias
    to_input = rounded(gradient, of_gradient, rows) @ rounded(weight, e4m3, columns)
    to_weight = rounded(gradient, of_gradient, columns).T @ rounded(x.detach(), e4m3, columns)
    for found, wanted in ((out, expected), (x.grad, to_input), (layer.weight.grad, to_weight)):
        # the result is rounded to bfloat16, the product before the bias too
        bound = 2**-7 * wanted.abs().max()
        assert (found.double() - wanted).abs().max() < bound
    plain = x.detach().double() @ weight.double().T + layer.bias
    assert (expected - plain).abs().max() > 4 * (out.double() - expected).abs().max()


def test_losses_follow_bf16_and_runs_change_precision(
    emulated: None, tmp_path: Path, corpus_prefix: Path
) -> None:
    """Over 40 steps losses differed by 5e-4 (tensorwise) and 6e-4 (rowwise) at most; those of
    float32 and bf16 by 1e-4.
    """
    rowwise = {"compute": "bfloat16", "float8": "rowwise"}
    for name, precision in (("bf16", "bf16"), ("fp8", "fp8"), ("rowwise", rowwise)):
        train_here(run(tmp_path / name, corpus_prefix, precision=precision))
    plain, in_float8, by_row = (losses(tmp_path / name) for name in ("bf16", "fp8", "rowwise"))
    assert len({*plain, *in_float8, *by_row}) > 2 * len(plain), "three runs of one precision"
    assert plain[-1] < plain[0] - 0.5
    for found in (in_float8, by_row):
        assert found == [pytest.approx(loss, rel=2e-3) for loss in plain]

    checkpoint = find_checkpoint(tmp_path / "fp8")
    assert checkpoint is not None
    resumed = {"checkpoint__resume": str(checkpoint), "train__max_steps": 44}
    for name in ("bf16", "fp8"):
        folder = tmp_path / f"resumed {name}"
        train_here(run(folder, corpus_prefix, precision=name, **resumed))
        assert len(losses(folder)) == 4
        assert losses(folder)[0] == pytest.approx(in_float8[-1], rel=0.05)


@pytest.mark.parametrize(
    "words",
    [
        "precision.compute=float16",
        "engine=deepspeed",
        "parallel.strategy=parameter_server parallel.data_parallel=2",
        "quantization.weight_bits=8",
        "parallel.model_parallel=2",
        "parallel.zero_stage=1 parallel.data_parallel=2",
        "model.hidden_size=24 model.num_heads=2",
    ],
)
def test_other_runs_are_refused(words: str) -> None:
    preset = ROOT / "configs" / "gpt2" / "run_gpt2_124m.yaml"
    config = load_config(preset, ["precision=fp8", "device=cpu", *words.split()])
    with pytest.raises(ConfigError, match=r"precision\.float8=tensorwise needs .*precision=bf16"):
        resolve_config(config, world_size=2 if "=2" in words and "parallel" in words else 1)


@pytest.mark.parametrize("mode", ["eval", "predict"])
def test_other_modes_compute_as_in_bf16(mode: str, tmp_path: Path) -> None:
    preset = ROOT / "configs" / "gpt2" / "run_gpt2_124m.yaml"
    config = load_config(preset, ["precision=fp8", "device=cpu", f"output_dir={tmp_path}"])
    precision = resolve_mode(config, mode, world_size=1).precision
    assert (precision.compute, precision.float8) == ("bfloat16", "none")


def test_devices_without_float8_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    by_row = {"compute": "bfloat16", "float8": "rowwise"}
    fp8, rowwise = (
        resolve_config(build_config(run(tmp_path, tmp_path, precision=each)))
        for each in ("fp8", by_row)
    )
    with pytest.raises(DeviceError, match=r"needs a CUDA GPU of compute capability 8\.9"):
        check_support(fp8, select_device("cpu"))
    monkeypatch.setattr(TorchDevice, "capability", property(lambda device: (8, 9)))
    check_support(fp8, select_device("cpu"))
    with pytest.raises(DeviceError, match=r"compute capability 8\.9, and .* 9\.0 or newer"):
        check_support(rowwise, select_device("cpu"))
