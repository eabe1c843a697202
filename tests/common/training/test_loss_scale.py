"""The loss scale against Megatron's."""

import numpy as np
import pytest

from common.config.schema import LossScaleConfig
from common.training.loss_scale import LossScale, clip_factor


@pytest.mark.parametrize("hysteresis", [1, 2, 4])
def test_hysteresis_is_megatrons(hysteresis: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 random verdicts beside Megatron-Core's scaler, which would make its tensors on CUDA."""
    theirs_of = pytest.importorskip("megatron.core.optimizer.grad_scaler").DynamicGradScaler
    torch = pytest.importorskip("torch")
    make = torch.tensor
    with monkeypatch.context() as patch:
        patch.setattr(torch, "tensor", lambda values, dtype, device: make(values, dtype=dtype))
        theirs = theirs_of(2.0**8, 0.25, 2.0, 0.5, 4, hysteresis)
    ours = LossScale(
        LossScaleConfig(
            mode="dynamic", initial=2.0**8, window=4, minimum=0.25, hysteresis=hysteresis
        )
    )
    seen = set()
    for finite in np.random.default_rng(hysteresis).random(300) < 0.75:
        ours.update(bool(finite))
        theirs.update(not finite)
        assert ours.value == theirs.scale.item()
        seen.add(ours.value)
    assert len(seen) > 5


def test_a_scale_that_stays() -> None:
    static = LossScale(LossScaleConfig(mode="static", initial=128.0))
    static.update(False)
    assert static.value == 128.0
    assert LossScale(LossScaleConfig(mode="none")).value == 1.0


def test_the_clip_only_lowers_gradients() -> None:
    assert [clip_factor(norm, 2.0) for norm in (0.0, 1.0, 1.9)] == [1.0] * 3
    assert clip_factor(8.0, 2.0) == pytest.approx(0.25, rel=1e-6)
    assert clip_factor(8.0, 0.0) == 1.0
