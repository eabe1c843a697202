"""Documents that share a window on MindSpore: torch's losses and gradients for each key, and what
leaks from one document to another.
"""

import os
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("GLOG_v", "3")
ms = pytest.importorskip(
    "mindspore", reason="MindSpore is not installed: pip install '.[mindspore]'"
)
torch = pytest.importorskip("torch")

import mindformers_gpt2.data  # noqa: E402
import mindformers_gpt2.device  # noqa: E402
import mindformers_gpt2.model  # noqa: E402
from tests.packed_corpus import FLAGS  # noqa: E402
from tests.torch_gpt2.test_packing import documents, make_config, make_model, windows  # noqa: E402
from tests.twins import mindspore_twin  # noqa: E402
from torch_gpt2.data import split  # noqa: E402


def make_twin(one: Any, **changes: Any) -> Any:
    return mindspore_twin(make_config(backend="mindspore", **changes), one)


KEYS = [key for key in FLAGS if key != "data__eod_id"]
CASES: dict[str, dict[str, Any]] = {
    "all": {},
    **{only: {key: key == only for key in KEYS} for only in KEYS},
    "targets": {**dict.fromkeys(KEYS, False), "data__eod_mask_loss": "targets"},
    "recomputed": {"train__recompute": "full"},
}


@pytest.mark.parametrize(
    ("name", "mode"), [*((name, "graph") for name in CASES), ("all", "pynative")]
)
def test_losses_and_gradients_are_torchs(name: str, mode: str) -> None:
    """float32: 1e-6 of the loss, 1e-5 of the gradients, as without the keys."""
    one = make_model(make_config(**CASES[name]))
    other = make_twin(one, **CASES[name])
    ids, targets = split(windows(), one.packing)
    loss = one.loss_sum(ids, targets)
    loss.backward()
    tokens = windows().int().numpy()
    try:
        ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
        parameters = list(other.get_parameters())
        function = ms.value_and_grad(other.loss_sum, None, ms.ParameterTuple(tuple(parameters)))
        found, gradients = (ms.jit(function) if mode == "graph" else function)(
            *mindformers_gpt2.data.inputs_and_targets(tokens, one.packing)
        )
    finally:
        ms.set_context(mode=ms.GRAPH_MODE)
    assert float(found.asnumpy()) == pytest.approx(loss.item(), rel=1e-6)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        wanted = one.get_parameter(parameter.name).grad.numpy()
        largest = max(1.0, np.abs(wanted).max())
        np.testing.assert_allclose(
            gradient.asnumpy(), wanted, rtol=0, atol=1e-5 * largest, err_msg=parameter.name
        )


def test_nothing_leaks_between_documents() -> None:
    """Other tokens in one document leave all bits of the others, and losses of the others have no
    gradient there.
    """
    one = make_model(make_config())
    other = make_twin(one)
    tokens = windows().int().numpy()
    changed = tokens.copy()
    changed[0, 6:11] = 99 - tokens[0, 6:11] % 80
    ids, targets = mindformers_gpt2.data.inputs_and_targets(tokens, one.packing)
    new_ids, _ = mindformers_gpt2.data.inputs_and_targets(changed, one.packing)
    run = ms.jit(other.construct)
    before, after = (run(each, None, each).asnumpy() for each in (ids, new_ids))
    others = np.ones(before.shape[:2], bool)
    others[0, 6:12] = False
    np.testing.assert_array_equal(before[others], after[others])
    assert not np.isclose(before[0, 7:12], after[0, 7:12]).all(-1).any()

    embedded = other.begin(ids, None, ids)

    def loss(x: Any, wanted: Any) -> Any:
        return other.loss_of(other.ln_f(other.blocks(x, None, ids)), wanted)

    gradient = ms.jit(ms.grad(loss))
    for row, part in documents(torch.from_numpy(ids.asnumpy())):
        wanted = np.full(targets.shape, -1, np.int32)
        wanted[row, part] = targets.asnumpy()[row, part]
        slope = gradient(embedded, ms.Tensor(wanted)).asnumpy()
        reached = np.abs(slope).sum(-1) > 0
        inside = np.zeros_like(reached)
        inside[row, part] = True
        assert not (reached & ~inside).any()
        assert reached[row, part][0] == (wanted[row, part] >= 0).any()
