"""Name and shape of the parameters of a GPT-2: one table for both backends.

Linear weights are (out, in). q, k and v are separate, so that a contiguous cut over heads is a correct tensor-parallel
shard. The head is tied to ``wte.weight`` and has no parameter of its own.

Initial weights are made with numpy, so that they are the same on every layout and framework. Each block of 128 rows of
a parameter has its own random generator, keyed by (seed, name, block). A shard therefore makes exactly its own rows.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.config.resolved import ResolvedModel
from common.config.values import STATE_PARTS
from common.errors import CheckpointError

EMBEDDING = "wte.weight"
POSITIONS = "wpe.weight"


def parameter_shapes(model: ResolvedModel, layers: int | None = None) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter with the true vocabulary, in the order of the forward pass.

    layers: count only the first ones.
    """
    hidden, ffn, positions = model.hidden_size, model.ffn_hidden_size, model.max_positions
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (model.vocab_size, hidden), POSITIONS: (positions, hidden)}

    def norm(name: str) -> None:
        shapes.update({f"{name}.weight": (hidden,), f"{name}.bias": (hidden,)})

    def linear(name: str, out_features: int, in_features: int) -> None:
        shapes.update({f"{name}.weight": (out_features, in_features), f"{name}.bias": (out_features,)})

    for layer in range(model.num_layers if layers is None else layers):
        norm(f"h.{layer}.ln_1")
        for part in ("q_proj", "k_proj", "v_proj", "c_proj"):
            linear(f"h.{layer}.attn.{part}", hidden, hidden)
        norm(f"h.{layer}.ln_2")
        linear(f"h.{layer}.mlp.c_fc", ffn, hidden)
        linear(f"h.{layer}.mlp.c_proj", hidden, ffn)
    norm("ln_f")
    return shapes


def count_parameters(model: ResolvedModel) -> int:
    """Return the number of parameters with the true vocabulary and the head tied: V h + P h + L (12
    h^2 + 13 h) + 2 h for an MLP of 4 h.
    """
    outside, with_a_block = (
        sum(math.prod(shape) for shape in parameter_shapes(model, layers).values()) for layers in (0, 1)
    )
    return outside + model.num_layers * (with_a_block - outside)


def flops_per_token(model: ResolvedModel) -> float:
    """Return the training FLOPs of one token.

    They are 6 per parameter that multiplies (the position table does not) plus 12 L h T of
    attention. Recomputation is not counted (PaLM, Chowdhery et al. 2022, appendix B).
    """
    positions = (model.max_positions or model.seq_length) * model.hidden_size
    return 6.0 * (count_parameters(model) - positions) + 12.0 * model.num_layers * model.hidden_size * model.seq_length


def decays(name: str) -> bool:
    """Whether weight decay applies: to matrices and embeddings, but not to biases and layer norms."""
    return name.endswith(".weight") and ".ln_" not in f".{name}"


def parameter_of(tensor: str) -> str:
    """Return the parameter to which a tensor of a checkpoint belongs: ``wte.weight`` for ``wte.weight.exp_avg``."""
    return re.sub(rf"\.({'|'.join(STATE_PARTS)})$", "", tensor)


def check_tensors(
    path: Path,
    found: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    partial: Mapping[str, int] | None = None,
) -> None:
    """Raise CheckpointError with every tensor that is missing, unexpected, of another shape or
    incomplete. partial: elements present of each incomplete tensor.
    """
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
            "Use another checkpoint: a rank's part is lost"
            if partial
            else "Give the model section that the checkpoint was trained with"
            + (", or save it without what a GPT-2 has not" if found.keys() > expected.keys() else "")
        )
        raise CheckpointError(f"{path}: does not fit the model: {shown}. {remedy}")


ROWS_PER_BLOCK = 128


def initial_rows(
    model: ResolvedModel,
    seed: int,
    name: str,
    shape: tuple[int, ...],
    start: int = 0,
    stop: int | None = None,
    columns: tuple[int, int] | None = None,
) -> NDArray[np.float32]:
    """Return rows ``start`` to ``stop`` of parameter ``name``, whose whole shape is ``shape``. ``columns``: first and
    end of the columns to return.

    Biases are 0 and layer-norm gains 1. Weights are normal with deviation ``initializer_range``, and
    ``initializer_range / sqrt(2 x num_layers)`` for projections back into the residual stream (Radford et al. 2019,
    section 2.3). Rows of the embedding beyond the vocabulary are 0, and stay 0, since their logits are masked.
    """
    stop = shape[0] if stop is None else stop
    width = slice(*columns) if columns else slice(None)
    if name.endswith(".bias"):
        return np.zeros((stop - start, *shape[1:]), np.float32)
    if ".ln_" in f".{name}":
        return np.ones((stop - start, *shape[1:]), np.float32)
    deviation = np.float32(model.initializer_range)
    if name.endswith("c_proj.weight"):
        deviation = np.float32(model.initializer_range / math.sqrt(2 * model.num_layers))
    rows = np.empty((stop - start, len(range(*width.indices(shape[1])))), np.float32)
    for block in range(start // ROWS_PER_BLOCK, -(-stop // ROWS_PER_BLOCK)):
        first = block * ROWS_PER_BLOCK
        digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=16).digest()
        generator = np.random.Generator(np.random.Philox(key=np.frombuffer(digest, dtype="<u8")))
        made = generator.standard_normal((ROWS_PER_BLOCK, *shape[1:]), np.float32)
        here = slice(max(first, start), min(first + ROWS_PER_BLOCK, stop))
        rows[here.start - start : here.stop - start] = made[here.start - first : here.stop - first, width] * deviation
    if name == EMBEDDING and stop > model.vocab_size:
        rows[max(model.vocab_size - start, 0) :] = 0.0
    return rows
