"""Fields of transformers' GPT2Config that decide what a GPT-2 computes and that are fixed here."""

from __future__ import annotations

from typing import Any

FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
    "scale_attn_weights": (True,),
    "add_cross_attention": (False,),
    "scale_attn_by_inverse_layer_idx": (False,),
    # the other order and type give the same function, with other roundings
    "reorder_and_upcast_attn": (False, True),
    "tie_word_embeddings": (True,),
}
"""Values that our model computes, by field. The first is the default, except in old files. Source:
transformers 4.57, models/gpt2/configuration_gpt2.py, modeling_gpt2.py and activations.py.
"""


def other_function(name: str) -> str:
    """Return why any other value of a field of ``FIXED`` is refused."""
    if name == "model_type":
        return "this is another model; the models here are GPT-2"
    return f"our model is GPT-2 with {name}={FIXED[name][0]!r} only, so it would compute otherwise"
