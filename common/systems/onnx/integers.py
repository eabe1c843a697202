"""ONNX operators for layers whose weights are integers with given scales. The graph computes what
``predict`` computes with them.

Inputs and weights go through QuantizeLinear and DequantizeLinear. Runtimes fuse these with the
product into a product of integers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from common.quantization.integers import to_integers
from common.systems.onnx.graph import GraphBuilder
from common.weights.quantized import LayerScheme, Scheme

Read = Callable[[str], NDArray[np.float32]]


class IntegerLayers:
    def __init__(self, graph: GraphBuilder, read: Read, scheme: Scheme) -> None:
        """Begin with a graph. read: returns a parameter by its name."""
        self._graph = graph
        self._read = read
        self._scheme = scheme

    def has(self, *layers: str) -> bool:
        """Tell whether one of these layers has integer weights."""
        return any(f"{layer}.weight" in self._scheme for layer in layers)

    def gather(self, name: str, ids: str) -> str:
        """Return rows of a table. The file keeps its integers, which ``head`` uses too."""
        graph, layer = self._graph, self._scheme[f"{name}.weight"]
        table = to_integers(name, self._read(f"{name}.weight"), layer)
        integers = graph.weight(f"{name}.integers", table.integers)
        scales = graph.weight(f"{name}.scales", table.scales)
        rows = graph.node("Gather", [integers, ids], f"{name}.rows")
        rows = graph.node("Cast", [rows], f"{name}.floats", to=TensorProto.FLOAT)
        factors = graph.node("Gather", [scales, ids], f"{name}.factors")
        factors = graph.node("Unsqueeze", [factors, graph.constant("last", [-1])], f"{name}.each")
        return graph.node("Mul", [rows, factors], f"{name}.out")

    def head(self, name: str, x: str) -> str:
        """Return the logits of x (tokens, width), by the table that ``gather`` has written."""
        table = self._graph.node("Transpose", [f"{name}.integers"], f"{name}.turned", perm=[1, 0])
        return self._multiply("logits", x, table, f"{name}.scales", self._scheme[f"{name}.weight"])

    def linear(self, layers: Sequence[str], name: str, x: str) -> str:
        """Return x W^T + b of layers with one input, with their outputs side by side."""
        graph = self._graph
        schemes = [self._scheme.get(f"{layer}.weight") for layer in layers]
        first = schemes[0]
        if any(not _can_join(first, other) for other in schemes):
            outputs = [self.linear([layer], f"{layer}.alone", x) for layer in layers]
            return graph.node("Concat", outputs, f"{name}.out", axis=-1)
        bias = np.concatenate([self._read(f"{layer}.bias") for layer in layers])
        weights = [self._read(f"{layer}.weight") for layer in layers]
        if first is None:
            weight = graph.weight(f"{name}.weight", np.concatenate(weights).T)
            product = graph.node("MatMul", [x, weight], f"{name}.product")
        else:
            parts = [
                to_integers(layer, weight, scheme)
                for layer, weight, scheme in zip(layers, weights, schemes, strict=True)
                if scheme is not None
            ]
            integers = np.concatenate([part.integers for part in parts]).T
            scales = np.concatenate([part.scales for part in parts])
            weight = graph.weight(f"{name}.integers", integers)
            factors = graph.weight(f"{name}.scales", scales)
            product = self._multiply(name, x, weight, factors, first)
        return graph.node("Add", [product, graph.weight(f"{name}.bias", bias)], f"{name}.out")

    def _multiply(self, name: str, x: str, weight: str, scales: str, scheme: LayerScheme) -> str:
        """Return the product of x and integers (in, out) with scales (out,)."""
        graph = self._graph
        weight = graph.node("DequantizeLinear", [weight, scales], f"{name}.weight", axis=1)
        if scheme.input_scale is not None:
            scale = np.array(scheme.input_scale, np.float32)
            x = self._round(name, x, graph.weight(f"{name}.input_scale", scale))
            return graph.node("MatMul", [x, weight], f"{name}.product")
        # A token's scale differs from a tensor's: the input is divided by it before, and
        # multiplied after.
        sizes = graph.node("Abs", [x], f"{name}.sizes")
        most = graph.node("ReduceMax", [sizes, graph.constant("last", [-1])], f"{name}.most")
        step = graph.node("Div", [most, self._float("largest", 127)], f"{name}.step")
        tiny = self._float("tiny", float(np.finfo(np.float32).tiny))
        step = graph.node("Max", [step, tiny], f"{name}.scale")
        x = graph.node("Div", [x, step], f"{name}.ratio")
        x = self._round(name, x, self._float("one_step", 1))
        sums = graph.node("MatMul", [x, weight], f"{name}.sums")
        return graph.node("Mul", [sums, step], f"{name}.product")

    def _round(self, name: str, x: str, scale: str) -> str:
        pair = [scale, self._graph.constant("zero_int8", 0, np.int8)]
        integers = self._graph.node("QuantizeLinear", [x, *pair], f"{name}.rounded")
        return self._graph.node("DequantizeLinear", [integers, *pair], f"{name}.input")

    def _float(self, name: str, value: float) -> str:
        return self._graph.constant(name, value, np.float32)


def _can_join(one: LayerScheme | None, other: LayerScheme | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.input_scale == other.input_scale
