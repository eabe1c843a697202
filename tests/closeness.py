"""Scale of the float32 error of a trained weight between two runs that differ only in the
order of their sums.
"""

from collections.abc import Mapping

import numpy as np

from common.config.schema import RunConfig
from common.weights.initial import initial_rows


def rounding_scales(config: RunConfig, weights: Mapping[str, np.ndarray]) -> dict[str, float]:
    """By name. A weight: its largest entry, to which each update is rounded. A bias: its largest
    entry, or the farthest that its weight has moved from its initial values, if this is more.

    Both gradients are sums over the tokens t: of d_t x_t for a weight and of d_t for a bias, where
    the inputs x_t are of size one. In a bias the terms may cancel: nearly for queries, and wholly
    for keys, which the softmax does not see. The error of a sum is relative to its terms, whatever
    is left of them. n terms of random signs add up to about sqrt(n) |d|. One rounding of such a
    partial sum is at most u = 2^-24 of that, and n of them, of random signs too, add up to sqrt(n)
    u of that: 8.3e-7 for 192 tokens a step.
    """
    scales = {name: float(np.abs(values).max()) for name, values in weights.items()}
    for name in [name for name in weights if name.endswith(".bias")]:
        weight = name.removesuffix("bias") + "weight"
        values = weights[weight]
        moved = np.abs(values - initial_rows(config.model, config.seed, weight, values.shape)).max()
        scales[name] = max(scales[name], float(moved))
    return scales
