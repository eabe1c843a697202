"""Build an ONNX graph node by node, with its weights in a file beside it.

Weights are written as soon as they are given, so that a model of any size needs the memory of one
tensor. Large ones start at page boundaries, where onnxruntime maps them instead of copying them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from common.tensor_files.checksummed import ChecksummedFile

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
        place = {"location": self._location, "offset": self._data.position, "length": array.nbytes}
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
        self, operator: str, inputs: Sequence[str], outputs: str | Sequence[str], *, domain: str = "", **attributes: Any
    ) -> str:
        """Add an operator and return the name of its first output."""
        names = [outputs] if isinstance(outputs, str) else list(outputs)
        node = helper.make_node(operator, inputs, names, name=f"{names[0]}/{operator}", domain=domain, **attributes)
        self._nodes.append(node)
        self._domains.add(domain)
        return names[0]

    def model(self, name: str, opset: int) -> bytes:
        """Return the graph as the bytes of its file."""
        graph = helper.make_graph(self._nodes, name, self._inputs, self._outputs, self._initializers)
        opsets = [helper.make_opsetid(domain, opset if domain == "" else 1) for domain in sorted(self._domains)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION, producer_name=_PRODUCER)
        content: bytes = model.SerializeToString(deterministic=True)
        return content
