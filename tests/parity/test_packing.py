"""Documents that share a window on MindSpore: torch's losses and gradients for each key, and what
leaks from one document to another.
"""

import tests.needs_both  # noqa: F401

# isort: split
from typing import Any

import mindspore as ms
import numpy as np
import pytest

import mindformers_gpt2.data
import mindformers_gpt2.device
import mindformers_gpt2.model
from tests.packed_corpus import FLAGS
from tests.torch_gpt2.test_packing import make_config, make_model, windows
from tests.twins import mindspore_twin
from torch_gpt2.data import split


def make_twin(one: Any, **changes: Any) -> Any:
    return mindspore_twin(make_config(backend="mindspore", **changes), one)


KEYS = [key for key in FLAGS if key != "data__eod_id"]
CASES: dict[str, dict[str, Any]] = {
    "all": {},
    **{only: {key: key == only for key in KEYS} for only in KEYS},
    "targets": {**dict.fromkeys(KEYS, False), "data__eod_mask_loss": "targets"},
    "recomputed": {"train__recompute": "full"},
}


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_torchs(name: str) -> None:
    """float32: 1e-6 of the loss, 1e-5 of the gradients, as without the keys. Two single keys
    operator by operator: each graph takes its compiler seconds.
    """
    alone = ("data__reset_position_ids", "data__eod_mask_loss")
    mode = "pynative" if name in alone else "graph"
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
        np.testing.assert_allclose(gradient.asnumpy(), wanted, rtol=0, atol=1e-5 * largest, err_msg=parameter.name)
