"""The parameters of a GPT-2 by name and shape: one table for both backends, and what other formats call them.

Linear weights are (out, in). q, k and v are separate, so that a contiguous cut over heads is a correct tensor-parallel shard.
The head is tied to ``wte.weight`` and has no parameter of its own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.config.schema import ModelConfig
from common.errors import CheckpointError
from common.tensor_files.arrays import copy_in_bands

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
    outside, with_a_block = (
        sum(math.prod(shape) for shape in parameter_shapes(model.model_copy(update={"num_layers": layers})).values()) for layers in (0, 1)
    )
    return outside + model.num_layers * (with_a_block - outside)


def decays(name: str) -> bool:
    """True for matrices and embeddings, which weight decay shrinks; False for biases and layer norms."""
    return name.endswith(".weight") and ".ln_" not in f".{name}"


def parameter_of(tensor: str) -> str:
    """The parameter to which a tensor of a checkpoint belongs: ``wte.weight`` of ``wte.weight.exp_avg``."""
    return re.sub(r"\.(exp_avg|exp_avg_sq|momentum_buffer)$", "", tensor)


class Fusion(StrEnum):
    """The order of the rows of a tensor that holds query, key and value together."""

    BLOCKS = "all of q, all of k, all of v"
    """Hugging Face, OpenAI, and Megatron-LM's checkpoint version 0."""
    OUTPUTS = "q, k and v of each output in turn"
    """Megatron-LM's checkpoint version 1."""
    HEADS = "q, k and v of each head in turn"
    """Megatron-LM's checkpoint versions 2 and 3, Megatron-Core, PaddleFleetX."""


@dataclass(frozen=True, kw_only=True)
class NameRow:
    """A tensor of another format, and the parameters that it is made of: one, or query, key and value."""

    ours: tuple[str, ...]
    theirs: str
    transposed: bool = False
    """It is (in, out)."""
    fusion: Fusion = Fusion.BLOCKS

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """Of their tensor, from those of ours; these may be a tensor-parallel rank's."""
        first, *rest = shapes[self.ours[0]]
        fused = (len(self.ours) * first, *rest)
        return fused[::-1] if self.transposed else fused

    def pack(self, parts: Sequence[NDArray[Any]], heads: int) -> NDArray[Any]:
        """Their tensor from ours, which hold ``heads`` heads; a view where one will do."""
        if len(parts) == 1:
            return parts[0].T if self.transposed else parts[0]
        fused: NDArray[Any] = np.empty((len(parts) * parts[0].shape[0], *parts[0].shape[1:]), parts[0].dtype)
        for place, part in zip(self._apart(fused, heads), parts, strict=True):
            copy_in_bands(place, part.reshape(place.shape))
        return fused.T if self.transposed else fused

    def unpack(self, theirs: NDArray[Any], heads: int) -> list[NDArray[Any]]:
        """The inverse of ``pack``: views where these will do."""
        return [self.part(theirs, heads, number) for number in range(len(self.ours))]

    def part(self, theirs: NDArray[Any], heads: int, number: int) -> NDArray[Any]:
        """One of ``unpack``, alone."""
        fused = theirs.T if self.transposed else theirs
        if len(self.ours) == 1:
            return fused
        part: NDArray[Any] = self._apart(fused, heads)[number].reshape(-1, *fused.shape[1:])
        return part

    def _apart(self, fused: NDArray[Any], heads: int) -> NDArray[Any]:
        """A view of it as query, key and value, each (heads, outputs of one, ...)."""
        axis = {Fusion.BLOCKS: 0, Fusion.HEADS: 1, Fusion.OUTPUTS: 2}[self.fusion]
        sizes = [heads, fused.shape[0] // (len(self.ours) * heads)]
        sizes.insert(axis, len(self.ours))
        return np.moveaxis(fused.reshape(*sizes, *fused.shape[1:]), axis, 0)


@dataclass(frozen=True, kw_only=True)
class NameMap:
    """What another format calls the parameters. {layer} is a block's number."""

    outside: tuple[NameRow, ...]
    layer: tuple[NameRow, ...]
    head: str | None = None
    """A copy of the embedding, which is the head."""
    ignored: str = r"(?!)"
    """Of names, as a regular expression: what holds no parameter."""

    def rows(self, layers: int) -> list[NameRow]:
        """One for each of their tensors."""
        blocks = (
            replace(row, ours=tuple(name.format(layer=layer) for name in row.ours), theirs=row.theirs.format(layer=layer))
            for layer in range(layers)
            for row in self.layer
        )
        return [*self.outside, *blocks]

    def ignores(self, theirs: str) -> bool:
        return re.fullmatch(self.ignored, theirs) is not None

    def fused(self, fusion: Fusion) -> NameMap:
        """The same names with another order of query, key and value."""
        return replace(self, layer=tuple(replace(row, fusion=fusion) if len(row.ours) > 1 else row for row in self.layer))


def _linear(ours: str, theirs: str, *, transposed: bool = False) -> tuple[NameRow, NameRow]:
    return _both((ours,), theirs, transposed=transposed)


def _both(ours: tuple[str, ...], theirs: str, *, transposed: bool = False, fusion: Fusion = Fusion.BLOCKS) -> tuple[NameRow, NameRow]:
    """Weight and bias of linear layers."""
    weight, bias = (tuple(f"{name}.{kind}" for name in ours) for kind in ("weight", "bias"))
    return (
        NameRow(ours=weight, theirs=f"{theirs}.weight", transposed=transposed, fusion=fusion),
        NameRow(ours=bias, theirs=f"{theirs}.bias", fusion=fusion),
    )


def _norm(ours: str, weight: str, bias: str) -> tuple[NameRow, NameRow]:
    return NameRow(ours=(f"{ours}.weight",), theirs=weight), NameRow(ours=(f"{ours}.bias",), theirs=bias)


_BLOCK = "h.{layer}."
_QKV = tuple(f"{_BLOCK}attn.{part}_proj" for part in "qkv")


def _hugging_face(prefix: str) -> NameMap:
    """Its Conv1D weights are (in, out)."""
    block = prefix + _BLOCK
    return NameMap(
        outside=(
            NameRow(ours=(EMBEDDING,), theirs=f"{prefix}wte.weight"),
            NameRow(ours=("wpe.weight",), theirs=f"{prefix}wpe.weight"),
            *_linear("ln_f", f"{prefix}ln_f"),
        ),
        layer=(
            *_linear(f"{_BLOCK}ln_1", f"{block}ln_1"),
            *_both(_QKV, f"{block}attn.c_attn", transposed=True),
            *_linear(f"{_BLOCK}attn.c_proj", f"{block}attn.c_proj", transposed=True),
            *_linear(f"{_BLOCK}ln_2", f"{block}ln_2"),
            *_linear(f"{_BLOCK}mlp.c_fc", f"{block}mlp.c_fc", transposed=True),
            *_linear(f"{_BLOCK}mlp.c_proj", f"{block}mlp.c_proj", transposed=True),
        ),
        head="lm_head.weight",
        ignored=re.escape(prefix) + r"h\.\d+\.attn\.(masked_)?bias",  # causal masks of old files
    )


def _openai() -> NameMap:
    """Weights of convolutions of width 1, (1, in, out), whose first axis readers drop."""

    def row(ours: str | tuple[str, ...], theirs: str, *, transposed: bool = False) -> NameRow:
        return NameRow(ours=(ours,) if isinstance(ours, str) else ours, theirs=f"model/{theirs}", transposed=transposed)

    def linear(ours: tuple[str, ...], theirs: str) -> tuple[NameRow, NameRow]:
        weight, bias = (tuple(f"{name}.{kind}" for name in ours) for kind in ("weight", "bias"))
        return row(weight, f"{theirs}/w", transposed=True), row(bias, f"{theirs}/b")

    def norm(ours: str, theirs: str) -> tuple[NameRow, NameRow]:
        return row(f"{ours}.weight", f"{theirs}/g"), row(f"{ours}.bias", f"{theirs}/b")

    return NameMap(
        outside=(row(EMBEDDING, "wte"), row("wpe.weight", "wpe"), *norm("ln_f", "ln_f")),
        layer=(
            *norm(f"{_BLOCK}ln_1", "h{layer}/ln_1"),
            *linear(_QKV, "h{layer}/attn/c_attn"),
            *linear((f"{_BLOCK}attn.c_proj",), "h{layer}/attn/c_proj"),
            *norm(f"{_BLOCK}ln_2", "h{layer}/ln_2"),
            *linear((f"{_BLOCK}mlp.c_fc",), "h{layer}/mlp/c_fc"),
            *linear((f"{_BLOCK}mlp.c_proj",), "h{layer}/mlp/c_proj"),
        ),
    )


def _mindformers(block: str, norm: str) -> NameMap:
    """Query, key and value are (out, in), all other linear weights (in, out)."""

    def named(ours: str, theirs: str) -> tuple[NameRow, NameRow]:
        return _norm(ours, f"{theirs}.gamma", f"{theirs}.beta")

    return NameMap(
        outside=(
            NameRow(ours=(EMBEDDING,), theirs="backbone.embedding.word_embedding.embedding_table"),
            NameRow(ours=("wpe.weight",), theirs="backbone.embedding.position_embedding.embedding_table"),
            *named("ln_f", norm),
        ),
        layer=(
            *named(f"{_BLOCK}ln_1", f"{block}layernorm1"),
            *(row for number, ours in enumerate(_QKV, 1) for row in _linear(ours, f"{block}attention.dense{number}")),
            *_linear(f"{_BLOCK}attn.c_proj", f"{block}attention.projection", transposed=True),
            *named(f"{_BLOCK}ln_2", f"{block}layernorm2"),
            *_linear(f"{_BLOCK}mlp.c_fc", f"{block}output.mapping", transposed=True),
            *_linear(f"{_BLOCK}mlp.c_proj", f"{block}output.projection", transposed=True),
        ),
        ignored=r"backbone\.blocks\.\d+\.attention\.(masked_)?beta",
    )


def _megatron(encoder: str, attention: str, fusion: Fusion) -> NameMap:
    block = f"language_model.{encoder}.layers.{{layer}}."
    return NameMap(
        outside=(
            NameRow(ours=(EMBEDDING,), theirs="language_model.embedding.word_embeddings.weight"),
            NameRow(ours=("wpe.weight",), theirs="language_model.embedding.position_embeddings.weight"),
            *_linear("ln_f", f"language_model.{encoder}.final_layernorm"),
        ),
        layer=(
            *_linear(f"{_BLOCK}ln_1", f"{block}input_layernorm"),
            *_both(_QKV, f"{block}{attention}.query_key_value", fusion=fusion),
            *_linear(f"{_BLOCK}attn.c_proj", f"{block}{attention}.dense"),
            *_linear(f"{_BLOCK}ln_2", f"{block}post_attention_layernorm"),
            *_linear(f"{_BLOCK}mlp.c_fc", f"{block}mlp.dense_h_to_4h"),
            *_linear(f"{_BLOCK}mlp.c_proj", f"{block}mlp.dense_4h_to_h"),
        ),
        head="word_embeddings_for_head.weight",
    )


def _megatron_core(norms: tuple[tuple[str, str], tuple[str, str]]) -> NameMap:
    """norms: weight and bias of the two in a block, which some kernels hold themselves."""
    block = "decoder.layers.{layer}."
    first, second = (_norm(f"{_BLOCK}ln_{number}", block + weight, block + bias) for number, (weight, bias) in enumerate(norms, 1))
    return NameMap(
        outside=(
            NameRow(ours=(EMBEDDING,), theirs="embedding.word_embeddings.weight"),
            NameRow(ours=("wpe.weight",), theirs="embedding.position_embeddings.weight"),
            *_linear("ln_f", "decoder.final_layernorm"),
        ),
        layer=(
            *first,
            *_linear(f"{_BLOCK}attn.c_proj", f"{block}self_attention.linear_proj"),  # as its modules are made, which its optimizer counts
            *_both(_QKV, f"{block}self_attention.linear_qkv", fusion=Fusion.HEADS),
            *second,
            *_linear(f"{_BLOCK}mlp.c_fc", f"{block}mlp.linear_fc1"),
            *_linear(f"{_BLOCK}mlp.c_proj", f"{block}mlp.linear_fc2"),
        ),
        head="output_layer.weight",
        ignored=r".*\._extra_state",
    )


def _fleetx(*, fused: bool) -> NameMap:
    """Paddle's linear weights are (in, out); ``fuse_attn_qkv`` joins query, key and value."""
    block = "gpt.decoder.layers.{layer}."
    separate = (
        row for ours, part in zip(_QKV, "qkv", strict=True) for row in _linear(ours, f"{block}self_attn.{part}_proj", transposed=True)
    )
    return NameMap(
        outside=(
            NameRow(ours=(EMBEDDING,), theirs="gpt.embeddings.word_embeddings.weight"),
            NameRow(ours=("wpe.weight",), theirs="gpt.embeddings.position_embeddings.weight"),
            *_linear("ln_f", "gpt.decoder.norm"),
        ),
        layer=(
            *_linear(f"{_BLOCK}ln_1", f"{block}norm1"),
            *(_both(_QKV, f"{block}self_attn.qkv_proj", transposed=True, fusion=Fusion.HEADS) if fused else separate),
            *_linear(f"{_BLOCK}attn.c_proj", f"{block}self_attn.out_proj", transposed=True),
            *_linear(f"{_BLOCK}ln_2", f"{block}norm2"),
            *_linear(f"{_BLOCK}mlp.c_fc", f"{block}linear1", transposed=True),
            *_linear(f"{_BLOCK}mlp.c_proj", f"{block}linear2", transposed=True),
        ),
    )


_LOCAL = (("input_layernorm.weight", "input_layernorm.bias"), ("pre_mlp_layernorm.weight", "pre_mlp_layernorm.bias"))
_FUSED = tuple((f"{part}.layer_norm_weight", f"{part}.layer_norm_bias") for part in ("self_attention.linear_qkv", "mlp.linear_fc1"))

NAME_MAPS: dict[str, tuple[NameMap, ...]] = {
    "hf": (_hugging_face("transformer."), _hugging_face("")),
    "openai": (_openai(),),
    "mindformers": (_mindformers("backbone.blocks.{layer}.", "backbone.layernorm"),),
    "mindformers_r0.3": (_mindformers("gpt2.backbone.transformer.encoder.blocks.{layer}.", "gpt2.backbone.layernorm"),),
    "megatron": tuple(
        _megatron(encoder, attention, Fusion.HEADS) for encoder, attention in (("encoder", "self_attention"), ("transformer", "attention"))
    ),
    "megatron_core": (_megatron_core(_LOCAL), _megatron_core((_FUSED[0], _FUSED[1]))),
    "fleetx": (_fleetx(fused=True), _fleetx(fused=False)),
}
"""By format: the form that is written, and others that are read."""


def check_tensors(
    path: Path, found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], partial: Mapping[str, int] | None = None
) -> None:
    """Raise CheckpointError listing every tensor that is missing, unexpected, of another shape, or ``partial``: how many elements are
    there of those that are not whole."""
    partial = partial or {}
    faults = [f"missing {name} {list(shape)}" for name, shape in expected.items() if name not in found]
    faults += [f"unexpected {name} {list(shape)}" for name, shape in found.items() if name not in expected]
    faults += [f"of {name} {list(expected[name])} only {there} elements are there" for name, there in partial.items()]
    faults += [
        f"{name} is {list(found[name])}, the model's is {list(shape)}"
        for name, shape in expected.items()
        if name in found and name not in partial and found[name] != shape
    ]
    if faults:
        shown = "; ".join(faults[:6]) + (f"; and {len(faults) - 6} more" if len(faults) > 6 else "")
        remedy = (
            "Use another checkpoint: a rank's part is lost" if partial else "Give the model section that the checkpoint was trained with"
        )
        raise CheckpointError(f"{path}: does not fit the model: {shown}. {remedy}")
