"""The model against transformers' with the same random weights, and against itself computed in other ways."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from tests.reference import hugging_face_model, hugging_face_names
from tests.twins import random_model
from torch_gpt2.model import set_recompute

ours = partial(random_model, std=0.1, positions=None, num_layers=3, hidden_size=48, seq_length=24)
DROPOUTS = ("embedding_dropout", "attention_dropout", "hidden_dropout")


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets."""
    batch = torch.randint(0, 101, (2, 25), generator=torch.Generator().manual_seed(1))
    return batch[:, :-1], batch[:, 1:]


FORMULAS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu_new": lambda x: 0.5 * x * (1 + ((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)).tanh()),
    "gelu": lambda x: 0.5 * x * (1 + (x / 2**0.5).erf()),
    "quick_gelu": lambda x: x / (1 + (-1.702 * x).exp()),
}


@pytest.mark.parametrize("activation", FORMULAS)
def test_each_activation_is_its_formula(activation: str) -> None:
    """Hendrycks and Gimpel (arXiv 1606.08415): up to 5e-4 apart near 2, where other tests do not lead."""
    mlp, x = ours(activation=activation).h[0].mlp, torch.linspace(-4, 4, 192)[None, None]
    expected = mlp.c_proj(FORMULAS[activation](x))
    torch.testing.assert_close(mlp.contract(x), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("activation", FORMULAS)
def test_logits_and_every_gradient_equal_transformers(activation: str) -> None:
    model, (ids, targets) = ours(activation=activation), tokens()
    reference = hugging_face_model(model.config, dict(model.named_parameters()))
    expected = reference(ids).logits
    torch.testing.assert_close(model.logits(model(ids)), expected, rtol=0, atol=1e-5)
    loss = model.loss_sum(ids, targets) / targets.numel()
    expected_loss = F.cross_entropy(expected.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss, expected_loss, rtol=0, atol=1e-5)
    loss.backward()
    expected_loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    found = hugging_face_names(gradients, 101)
    wanted = {name: parameter.grad for name, parameter in reference.named_parameters()}
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_attention_written_out_changes_no_gradient() -> None:
    model, results = ours(), []
    for fused in (True, False):
        for block in model.h:
            block.attn.fused = fused
        loss = model.loss_sum(*tokens())
        results.append((loss, torch.autograd.grad(loss, [*model.parameters()])))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_recompute_changes_no_gradient(mode: str, dropout: float) -> None:
    gradients = []
    for recompute in ("none", mode):
        model = ours(**dict.fromkeys(DROPOUTS, dropout)).train()
        set_recompute(model, recompute)
        torch.manual_seed(5)
        loss = model.loss_sum(*tokens())
        gradients.append(torch.autograd.grad(loss, [*model.parameters()]))
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("where", DROPOUTS)
def test_each_dropout_acts_in_training_only(where: str) -> None:
    model, (ids, _) = ours(**{where: 0.5}), tokens()
    torch.manual_seed(0)
    assert not torch.equal(model.train()(ids), model(ids))
    assert torch.equal(model.eval()(ids), model(ids))
    torch.testing.assert_close(model(ids), ours().eval()(ids))
