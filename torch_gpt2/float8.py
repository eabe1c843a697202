"""Linear layers of the blocks in float8, by torchao's training with dynamic scales.

Each product takes its inputs divided by their largest value: of the tensor (tensorwise) or of each
row (rowwise). Weights keep their names and types, and so do checkpoints.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from common.parallel.run import Run
from torch_gpt2.model import GPT2, Linear

EMULATED = False
"""Compute with the numbers of float8 and kernels of float32, for tests without a GPU."""


def convert_linear_layers(model: GPT2, config: Run) -> None:
    """Replace the linear layers of a part of the model, if the run asks for float8.

    The head is not a linear layer: it is the token table, in the type of the computation.
    """
    if config.precision.float8 == "none":
        return
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    recipe = Float8LinearConfig.from_recipe_name(config.precision.float8)

    def is_of_block(module: Any, name: str) -> bool:
        return isinstance(module, Linear)

    convert_to_float8_training(model, config=replace(recipe, emulate=EMULATED), module_filter_fn=is_of_block)
