"""Fields of transformers' GPT2Config, which GPT2-Chinese's model_config.json has too."""

from __future__ import annotations

from typing import Any

from common.dialects.rules import Defaults, Fixed, Ignored, MapTo, Table, number, one_of, same


def _only(name: str, *values: Any) -> Table:
    """Return a rule for values that our model computes, of which the first is the default."""
    why = f"our model is GPT-2 with {name}={values[0]!r} only, so it would compute otherwise"
    return {name: Fixed(values, why)}


activation = one_of(
    gelu_new="gelu_new", gelu_pytorch_tanh="gelu_new", gelu_fast="gelu_new", gelu="gelu", quick_gelu="quick_gelu"
)
"""Change of transformers' name into ours; three of them are one function."""
TABLE: Table = {
    "n_ctx": MapTo("model.seq_length"),
    "n_positions": MapTo("model.max_positions"),
    "n_embd": MapTo("model.hidden_size"),
    "n_layer": MapTo("model.num_layers"),
    "n_head": MapTo("model.num_heads"),
    "n_inner": MapTo("model.ffn_hidden_size"),
    "vocab_size": MapTo("model.vocab_size"),
    **same("model", "layer_norm_epsilon initializer_range", change=number),
    "embd_pdrop": MapTo("model.embedding_dropout", number),
    "attn_pdrop": MapTo("model.attention_dropout", number),
    "resid_pdrop": MapTo("model.hidden_dropout", number),
    # transformers 4.57, models/gpt2/configuration_gpt2.py, modeling_gpt2.py and activations.py
    "model_type": Fixed(("gpt2",), "the models here are GPT-2; this is another model"),
    "activation_function": MapTo("model.activation", activation),
    **_only("scale_attn_weights", True),
    **_only("add_cross_attention", False),
    **_only("scale_attn_by_inverse_layer_idx", False),
    # the other order and type give the same function, with other roundings
    **_only("reorder_and_upcast_attn", False, True),
    **_only("tie_word_embeddings", True),
    "pruned_heads.*": Fixed((), "every block has all its heads here; train without it"),
    "*": Ignored("it does not change what GPT-2 computes"),
}
DEFAULTS: Defaults = {
    "activation_function": "gelu_new", "n_ctx": 1024, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12,
    "layer_norm_epsilon": 1e-5, "initializer_range": 0.02,
    "embd_pdrop": 0.1, "attn_pdrop": 0.1, "resid_pdrop": 0.1,
}  # fmt: skip
"""GPT2Config of transformers 2.1.1 (configuration_gpt2.py). Its from_json_file leaves a vocabulary
of -1 where the file has none.
"""
