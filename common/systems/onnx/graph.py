"""Build an ONNX graph node by node, with its weights in a file beside it.

Weights are written as soon as they are given, so that a model of any size needs the memory of one
tensor. Large ones start at page boundaries, where onnxruntime maps them instead of copying them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from common.quantization.integers import to_integers
from common.tensor_files.checksummed import ChecksummedFile
from common.weights.quantized import LayerScheme, Scheme

_PAGE = 4096
_IR_VERSION = 10
_PRODUCER = "gpt2-toolkit"


class GraphBuilder:
    """Graph that is built in the order of its computation."""

    def __init__(self, data: ChecksummedFile, location: str) -> None:
        """Begin an empty graph. data: open file for the weights. location: its name, relative to
        the graph's file.
        """
        self._data = data
        self._location = location
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: list[TensorProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._constants: set[str] = set()
        self._domains: set[str] = {""}

    def input(self, name: str, dtype: int, shape: Sequence[int | str]) -> str:
        """Declare an input. A size given as a word may vary from call to call."""
        self._inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def output(self, name: str, dtype: int, shape: Sequence[int | str]) -> None:
        self._outputs.append(helper.make_tensor_value_info(name, dtype, shape))

    def weight(self, name: str, array: NDArray[Any]) -> str:
        """Write an array to the file of weights. OSError is left to the caller."""
        array = np.ascontiguousarray(array)
        if array.nbytes >= _PAGE:
            self._data.write(bytes(-self._data.position % _PAGE))
        tensor = TensorProto(
            name=name,
            dims=array.shape,
            data_type=helper.np_dtype_to_tensor_dtype(array.dtype),
            data_location=TensorProto.EXTERNAL,
        )
        place = {
            "location": self._location,
            "offset": self._data.position,
            "length": array.nbytes,
        }
        for key, value in place.items():
            tensor.external_data.add(key=key, value=str(value))
        self._data.write(array.data.cast("B"))
        self._initializers.append(tensor)
        return name

    def constant(self, name: str, value: Any, dtype: type[np.generic] = np.int64) -> str:
        """Return the name of a small constant, which is stored once."""
        if name not in self._constants:
            self._constants.add(name)
            self._initializers.append(onnx.numpy_helper.from_array(np.array(value, dtype), name))
        return name

    def node(
        self,
        operator: str,
        inputs: Sequence[str],
        outputs: str | Sequence[str],
        *,
        domain: str = "",
        **attributes: Any,
    ) -> str:
        """Add an operator and return the name of its first output."""
        names = [outputs] if isinstance(outputs, str) else list(outputs)
        node = helper.make_node(
            operator, inputs, names, name=f"{names[0]}/{operator}", domain=domain, **attributes
        )
        self._nodes.append(node)
        self._domains.add(domain)
        return names[0]

    def model(self, name: str, opset: int) -> bytes:
        """Return the graph as the bytes of its file."""
        graph = helper.make_graph(
            self._nodes, name, self._inputs, self._outputs, self._initializers
        )
        opsets = [
            helper.make_opsetid(domain, opset if domain == "" else 1)
            for domain in sorted(self._domains)
        ]
        model = helper.make_model(
            graph, opset_imports=opsets, ir_version=_IR_VERSION, producer_name=_PRODUCER
        )
        content: bytes = model.SerializeToString(deterministic=True)
        return content


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
