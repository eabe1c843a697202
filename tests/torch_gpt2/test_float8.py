"""precision=fp8: torchao's products, emulated on the CPU, against a closed form; runs of it, and of
precision.float8_head, against bf16.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchao", reason="torchao is not installed: pip install '.[fp8]'")

from torch import Tensor  # noqa: E402

from common.config.load import build_config  # noqa: E402
from common.errors import DeviceError  # noqa: E402
from common.resolve.derive import resolve_config, resolve_mode  # noqa: E402
from tests import emulated_float8  # noqa: E402
from tests.tiny import rows_of, tiny_run, train_here  # noqa: E402
from torch_gpt2 import quantize  # noqa: E402
from torch_gpt2.device import TorchDevice, check_support, select_device  # noqa: E402
from torch_gpt2.model import GPT2  # noqa: E402

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def run(folder: Path, corpus: Path, **changes: Any) -> dict[str, Any]:
    wide: dict[str, Any] = {"model__hidden_size": 64, "model__seq_length": 32}
    wide |= {"train": {"max_steps": 40, "micro_batch_size": 8}, "data__split": "100,0,0"}
    return tiny_run(folder, corpus, **wide, optimizer={"learning_rate": 0.001}, **changes)


def rounded(x: Tensor, kind: torch.dtype, dim: int | None) -> Tensor:
    """x as float8 holds it, times the scale that was taken out. dim: scales of each row."""
    x = x.double()
    most = x.abs().max() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = LARGEST[kind] / most
    if dim is not None:
        scale = 2.0 ** scale.log2().floor()
    return (x * scale).float().to(kind).double() / scale


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
@emulated_float8.watch()
def test_a_layer_is_the_closed_form(scaling: str, tmp_path: Path, corpus_prefix: Path) -> None:
    precision = {"compute": "bfloat16", "float8": scaling}
    config = resolve_config(build_config(run(tmp_path, corpus_prefix, precision=precision)))
    torch.manual_seed(0)
    model = GPT2(config.model, config.precision, config.vocab_rows)
    names = {name: id(parameter) for name, parameter in model.named_parameters()}
    quantize.convert_linear_layers(model, config)
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


HEAD: dict[str, Any] = {"compute": "bfloat16", "float8_head": True}
ROWWISE: dict[str, Any] = {"compute": "bfloat16", "float8": "rowwise"}
# over 40 steps losses differed by 5e-4, 6e-4, 9e-4 and 1.2e-3 at most; those of float32 by 1e-4
PRECISIONS: dict[str, tuple[Any, float]] = {
    "bf16": ("bf16", 0.0),
    "fp8": ("fp8", 2e-3),
    "rowwise": (ROWWISE, 2e-3),
    "head": (HEAD, 3e-3),
    "head and layers": (HEAD | ROWWISE, 4e-3),
}


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory, corpus_prefix: Path) -> Any:
    """Losses of 40 steps with a precision, or of the four that follow a run of another; each trained once."""
    root = tmp_path_factory.mktemp("float8")

    def train(name: str, after: str = "") -> list[float]:
        target = root / f"{name}{after and ', '}{after}"
        resume = {"checkpoint__resume": str(root / after), "train__max_steps": 44} if after else {}
        if not target.exists():
            with emulated_float8.watch():
                train_here(run(target, corpus_prefix, precision=PRECISIONS[name][0], **resume))
        return [row["loss"] for row in rows_of(target)]

    return train


@pytest.mark.parametrize("name", [name for name in PRECISIONS if name != "bf16"])
def test_losses_follow_bf16(losses: Any, name: str) -> None:
    plain, found = losses("bf16"), losses(name)
    assert len({*plain, *found}) > 1.5 * len(plain), "two runs of one precision"
    assert plain[-1] < plain[0] - 0.5
    assert found == [pytest.approx(loss, rel=PRECISIONS[name][1]) for loss in plain]


@pytest.mark.parametrize(("first", "then"), [("fp8", "bf16"), ("fp8", "fp8"), ("bf16", "head")])
def test_runs_change_precision(losses: Any, first: str, then: str) -> None:
    before, later = losses(first), losses(then, after=first)
    assert len(later) == 4 and later[0] == pytest.approx(before[-1], rel=0.05)


def test_other_modes_compute_as_in_bf16() -> None:
    tree = run(Path("run"), Path("data"), precision=HEAD | ROWWISE)
    for mode in ("eval", "predict"):
        found = resolve_mode(build_config(tree), mode, world_size=1).precision
        assert (found.compute, found.float8, found.float8_head) == ("bfloat16", "none", False)


@pytest.mark.parametrize(
    ("precision", "capability", "message"),
    [
        ("fp8", None, r"needs a CUDA GPU of compute capability 8\.9"),
        ("fp8", (8, 9), None),
        (ROWWISE, (8, 9), r"compute capability 8\.9, and .* 9\.0 or newer"),
        (HEAD, None, r"float8_head=true: .* compute capability 8\.9"),
        (HEAD, (8, 9), None),
    ],
)
def test_devices_without_float8_are_refused(
    monkeypatch: pytest.MonkeyPatch, precision: Any, capability: Any, message: str | None
) -> None:
    config = resolve_config(build_config(run(Path("run"), Path("data"), precision=precision)))
    if capability:
        monkeypatch.setattr(TorchDevice, "capability", property(lambda device: capability))
    with pytest.raises(DeviceError, match=message) if message else nullcontext():
        check_support(config, select_device("cpu"))
