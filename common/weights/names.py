"""The parameters of a GPT-2 by name and shape: one table for both backends.

Linear weights are (out, in). q, k and v are separate, so that a contiguous cut over heads is a correct tensor-parallel shard.
The head is tied to ``wte.weight`` and has no parameter of its own.
"""

from __future__ import annotations

import re

from common.config.schema import ModelConfig

EMBEDDING = "wte.weight"


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape with the true vocabulary, in the order of the forward pass. Needs a resolved config."""
    hidden, ffn, positions = model.hidden_size, model.ffn_hidden_size, model.max_positions
    assert ffn is not None and positions is not None, "resolve_config fills these in"
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (model.vocab_size, hidden), "wpe.weight": (positions, hidden)}

    def norm(name: str) -> None:
        shapes.update({f"{name}.weight": (hidden,), f"{name}.bias": (hidden,)})

    def linear(name: str, out_features: int, in_features: int) -> None:
        shapes.update({f"{name}.weight": (out_features, in_features), f"{name}.bias": (out_features,)})

    for layer in range(model.num_layers):
        norm(f"h.{layer}.ln_1")
        for part in ("q_proj", "k_proj", "v_proj", "c_proj"):
            linear(f"h.{layer}.attn.{part}", hidden, hidden)
        norm(f"h.{layer}.ln_2")
        linear(f"h.{layer}.mlp.c_fc", ffn, hidden)
        linear(f"h.{layer}.mlp.c_proj", hidden, ffn)
    norm("ln_f")
    return shapes


def count_parameters(model: ModelConfig) -> int:
    """Parameters with the true vocabulary and the head tied: V h + P h + L (12 h^2 + 13 h) + 2 h for an MLP of 4 h."""
    total = 0
    for shape in parameter_shapes(model).values():
        size = 1
        for dim in shape:
            size *= dim
        total += size
    return total


def decays(name: str) -> bool:
    """True for matrices and embeddings, which weight decay shrinks; False for biases and layer norms."""
    return name.endswith(".weight") and ".ln_" not in f".{name}"


def parameter_of(tensor: str) -> str:
    """The parameter to which a tensor of a checkpoint belongs: ``wte.weight`` of ``wte.weight.exp_avg``."""
    return re.sub(r"\.(exp_avg|exp_avg_sq|momentum_buffer)$", "", tensor)
