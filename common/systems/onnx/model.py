"""GPT-2 as an ONNX graph, with the inputs and outputs of Hugging Face's optimum.

    input_ids (batch, length), attention_mask (batch, past + length), position_ids (batch, length)
    past_key_values.L.key and .value (batch, heads, past, head size)
        -> logits (batch, length, vocabulary), present.L.key and .value

Weights of 8 and 4 bits in blocks need two operators of onnxruntime (domain com.microsoft). All
others are standard operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from common.quantization import to_integers
from common.systems.weights import Weights
from common.tensor_files.checksummed import ChecksummedFile
from common.weights.pieces import LayerScheme, Scheme

_PAGE = 4096
_IR_VERSION = 10
_PRODUCER = "gpt2-toolkit"


BLOCK = 32
"""Number of neighbouring weights of a row that share a scale."""
_ROWS = 4096
"""Number of rows that are quantized at once, which bounds the memory."""


def quantize_blocks(weight: NDArray[np.float32], bits: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Return (rows, columns) as integers (rows, blocks, BLOCK * bits / 8) and scales (rows, blocks).

    A weight is scale * (integer - 2^(bits - 1)). The weight of a block that is largest in size
    becomes the integer 0 exactly, so the scale carries its sign. bits: 8, or 4 with two integers
    a byte, the first in the low half.
    """
    rows, columns = weight.shape
    blocks, half = columns // BLOCK, 2 ** (bits - 1)
    integers = np.empty((rows, blocks, BLOCK * bits // 8), np.uint8)
    scales = np.empty((rows, blocks), np.float32)
    for first in range(0, rows, _ROWS):
        part = slice(first, first + _ROWS)
        block = weight[part].reshape(-1, blocks, BLOCK)
        places = np.abs(block).argmax(-1)[..., None]
        scale = (np.take_along_axis(block, places, -1)[..., 0] / -half).astype(np.float32)
        inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
        rounded = (np.rint(block * inverse[..., None]) + half).clip(0, 2 * half - 1).astype(np.uint8)
        integers[part] = rounded if bits == 8 else rounded[..., ::2] | (rounded[..., 1::2] << 4)
        scales[part] = scale
    return integers, scales


OPSET = 20
BITS = {"int8": 8, "int4": 4}
"""Bits of the types of weights that are quantized in blocks."""
_MICROSOFT = "com.microsoft"
_FULL_INTEGER = 4
"""accuracy_level of MatMulNBits at which its input is rounded to 8 bits too."""


class GPT2Graph:
    """Graph of one model, built in the order of its computation.

    Weights are written as soon as they are read, so that a model of any size needs the memory of one tensor. Large
    ones start at page boundaries, where onnxruntime maps them instead of copying them.
    """

    def __init__(
        self, weights: Weights, dtype: str, data: ChecksummedFile, location: str, *, cache: bool, scheme: Scheme | None
    ) -> None:
        """dtype: type of the weights: float32, float16, int8 or int4. data: open file for the weights. location: its
        name, relative to the graph's file. cache: whether the graph takes and returns keys and values, so that a step
        computes only its new token. scheme: weights that are integers with given scales; all others have ``dtype``.
        """
        self._data, self._location = data, location
        self._model, self._tensors, self._dtype, self._cache = weights.model, weights.tensors, dtype, cache
        self._scheme = scheme or {}
        self._head_size = weights.model.hidden_size // weights.model.num_heads
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: dict[str, TensorProto] = {}
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []

    def write(self) -> bytes:
        """Write the weights; return the graph's file. OSError is left to the caller."""
        total = "past + length" if self._cache else "length"
        for name, length in (("input_ids", "length"), ("attention_mask", total), ("position_ids", "length")):
            self._inputs.append(helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", length]))
        shape: list[int | str | None] = ["batch", "length", self._model.vocab_size]
        self._outputs.append(helper.make_tensor_value_info("logits", TensorProto.FLOAT, shape))
        self._write_mask()
        x = self._node(
            "Add", [self._embed(), self._gather("wpe", self._read("wpe.weight"), "position_ids")], "embeddings"
        )
        for layer in range(self._model.num_layers):
            name = f"h.{layer}"
            y = self._attend(name, layer, self._write_norm(f"{name}.ln_1", x))
            y = self._write_linear([f"{name}.attn.c_proj"], y)
            x = self._node("Add", [x, y], f"{name}.attn.sum")
            y = self._write_linear([f"{name}.mlp.c_fc"], self._write_norm(f"{name}.ln_2", x))
            y = self._activate(f"{name}.mlp.gelu", y)
            y = self._write_linear([f"{name}.mlp.c_proj"], y)
            x = self._node("Add", [x, y], f"{name}.mlp.sum")
        self._write_head(self._write_norm("ln_f", x))
        graph = helper.make_graph(self._nodes, "gpt2", self._inputs, self._outputs, list(self._initializers.values()))
        domains = sorted({"", *(node.domain for node in self._nodes)})
        opsets = [helper.make_opsetid(domain, 1 if domain else OPSET) for domain in domains]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION, producer_name=_PRODUCER)
        content: bytes = model.SerializeToString(deterministic=True)
        return content

    def _read(self, name: str) -> NDArray[np.float32]:
        return self._tensors[name].load_as("float32")

    def _weight(self, name: str, array: NDArray[Any]) -> str:
        """Write an array to the file of weights."""
        array = np.ascontiguousarray(array)
        if array.nbytes >= _PAGE:
            self._data.write(bytes(-self._data.position % _PAGE))
        tensor = self._initializers[name] = TensorProto(
            name=name,
            dims=array.shape,
            data_type=helper.np_dtype_to_tensor_dtype(array.dtype),
            data_location=TensorProto.EXTERNAL,
        )
        place = {"location": self._location, "offset": self._data.position, "length": array.nbytes}
        for key, value in place.items():
            tensor.external_data.add(key=key, value=str(value))
        self._data.write(array.data.cast("B"))
        return name

    def _constant(self, name: str, value: Any, dtype: type[np.generic] = np.int64) -> str:
        """Return the name of a small constant, which is stored once."""
        if name not in self._initializers:
            self._initializers[name] = onnx.numpy_helper.from_array(np.array(value, dtype), name)
        return name

    def _node(self, operator: str, inputs: Sequence[str], *outputs: str, domain: str = "", **attributes: Any) -> str:
        """Add an operator and return the name of its first output."""
        name = f"{outputs[0]}/{operator}"
        self._nodes.append(helper.make_node(operator, inputs, outputs, name=name, domain=domain, **attributes))
        return outputs[0]

    def _write_mask(self) -> None:
        """Write ``mask`` (batch, 1, length, total): 0 where a token may attend, else a large
        negative number. Minus infinity would make rows of padding NaN.
        """
        one, zero = self._constant("one", 1), self._constant("zero", 0)
        for name, source in (("new", "input_ids"), ("all", "attention_mask")):
            self._node("Shape", [source], f"{name}_shape", start=1, end=2)
            self._node("Squeeze", [f"{name}_shape"], name)
        self._node("Sub", ["all", "new"], "past")
        self._node("Range", [zero, "all", one], "key_places")
        self._node("Range", ["past", "all", one], "new_places")
        self._node("Unsqueeze", ["new_places", self._constant("axis_1", [1])], "query_places")
        self._node("LessOrEqual", ["key_places", "query_places"], "causal")
        self._node("Cast", ["attention_mask"], "is_text", to=TensorProto.BOOL)
        self._node("Unsqueeze", ["is_text", self._constant("axes_1_2", [1, 2])], "visible")
        self._node("And", ["causal", "visible"], "may_look")
        hidden = self._constant("hidden", np.finfo(np.float32).min / 2, np.float32)
        self._node("Where", ["may_look", self._constant("nothing", 0, np.float32), hidden], "mask")

    def _embed(self) -> str:
        ids, table = "input_ids", self._read("wte.weight")
        if layer := self._scheme.get("wte.weight"):  # integers, which the head uses too
            whole, factors = to_integers("wte", table, layer)
            integers, scales = self._weight("wte.integers", whole), self._weight("wte.scales", factors)
            rows = self._node("Gather", [integers, ids], "wte.rows")
            rows = self._node("Cast", [rows], "wte.floats", to=TensorProto.FLOAT)
            each = self._node("Gather", [scales, ids], "wte.factors")
            each = self._node("Unsqueeze", [each, self._constant("last", [-1])], "wte.each")
            return self._node("Mul", [rows, each], "wte.out")
        if bits := BITS.get(self._dtype):
            integers, scales = self._write_quantized("wte", table, bits)
            sizes = {"gather_axis": 0, "quantize_axis": 1, "block_size": BLOCK, "bits": bits}
            inputs = [integers, ids, scales]
            return self._node("GatherBlockQuantized", inputs, "wte.out", domain=_MICROSOFT, **sizes)
        return self._gather("wte", table, ids)

    def _gather(self, name: str, table: NDArray[np.float32], ids: str) -> str:
        stored = self._weight(f"{name}.weight", self._stored(table))
        return self._widen(self._node("Gather", [stored, ids], f"{name}.rows"))

    def _attend(self, name: str, layer: int, x: str) -> str:
        """Return the heads (batch, heads, length, head size) of q, k and v, computed by one product."""
        model, size = self._model, self._head_size
        parts = [f"{name}.attn.{part}" for part in ("q_proj", "k_proj", "v_proj")]
        whole = self._write_linear(parts, x)
        widths = self._constant("widths", [model.hidden_size] * 3)
        self._node("Split", [whole, widths], *(f"{part}.out" for part in parts), axis=-1)
        to_heads = self._constant("to_heads", [0, 0, model.num_heads, size])
        q, k, v = (
            self._node(
                "Transpose",
                [self._node("Reshape", [f"{part}.out", to_heads], f"{part}.split")],
                f"{part}.heads",
                perm=[0, 2, 1, 3],
            )
            for part in parts
        )
        if self._cache:
            k, v = self._remember(layer, "key", k), self._remember(layer, "value", v)
        prefix = f"{name}.attn"
        scale = self._constant("scale", size**-0.5, np.float32)
        q = self._node("Mul", [q, scale], f"{prefix}.scaled")
        k = self._node("Transpose", [k], f"{prefix}.turned", perm=[0, 1, 3, 2])
        scores = self._node("MatMul", [q, k], f"{prefix}.scores")
        scores = self._node("Add", [scores, "mask"], f"{prefix}.masked")
        shares = self._node("Softmax", [scores], f"{prefix}.shares", axis=-1)
        y = self._node("MatMul", [shares, v], f"{prefix}.mixed")
        y = self._node("Transpose", [y], f"{prefix}.by_token", perm=[0, 2, 1, 3])
        return self._node("Reshape", [y, self._constant("from_heads", [0, 0, model.hidden_size])], f"{prefix}.y")

    def _remember(self, layer: int, word: str, new: str) -> str:
        past, present = f"past_key_values.{layer}.{word}", f"present.{layer}.{word}"
        for values, name, length in ((self._inputs, past, "past"), (self._outputs, present, "past + length")):
            shape: list[int | str | None] = ["batch", self._model.num_heads, length, self._head_size]
            values.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
        return self._node("Concat", [past, new], present, axis=2)

    def _write_norm(self, name: str, x: str) -> str:
        weight, bias = (self._weight(f"{name}.{part}", self._read(f"{name}.{part}")) for part in ("weight", "bias"))
        epsilon = self._model.layer_norm_epsilon
        return self._node("LayerNormalization", [x, weight, bias], f"{name}.out", axis=-1, epsilon=epsilon)

    def _activate(self, name: str, x: str) -> str:
        kind = self._model.activation
        if kind != "quick_gelu":
            return self._node("Gelu", [x], name, approximate="tanh" if kind == "gelu_new" else "none")
        scaled = self._node("Mul", [x, self._constant("quick", 1.702, np.float32)], f"{name}.scaled")
        return self._node("Mul", [x, self._node("Sigmoid", [scaled], f"{name}.share")], name)

    def _write_linear(self, names: list[str], x: str, name: str = "") -> str:
        """Return x W^T + b of one layer, or of several with their outputs side by side.

        name: start of the names of nodes; by default the layer's, or c_attn.
        """
        name = name or (names[0] if len(names) == 1 else names[0].rpartition(".")[0] + ".c_attn")
        schemes = [self._scheme.get(f"{part}.weight") for part in names]
        first = schemes[0]
        # layers whose inputs are rounded otherwise cannot share a product
        if len({"not at all" if scheme is None else scheme.input_scale for scheme in schemes}) > 1:
            outputs = [self._write_linear([part], x, f"{part}.alone") for part in names]
            return self._node("Concat", outputs, f"{name}.out", axis=-1)
        weights = [self._read(f"{part}.weight") for part in names]
        bias = np.concatenate([self._read(f"{part}.bias") for part in names])
        if first is not None:
            parts = [
                to_integers(part, weight, self._scheme[f"{part}.weight"])
                for part, weight in zip(names, weights, strict=True)
            ]
            whole, factors = map(np.concatenate, zip(*parts, strict=True))
            integers, scales = self._weight(f"{name}.integers", whole.T), self._weight(f"{name}.scales", factors)
            product = self._multiply(name, x, integers, scales, first)
        elif bits := BITS.get(self._dtype):
            weight = np.concatenate(weights)
            integers, scales = self._write_quantized(name, weight, bits)
            inputs = [x, integers, scales, "", "", self._weight(f"{name}.bias", bias)]
            return self._product(inputs, f"{name}.out", weight.shape, bits)
        else:
            stored = self._weight(f"{name}.weight", self._stored(np.concatenate(weights).T))
            product = self._node("MatMul", [x, self._widen(stored)], f"{name}.product")
        return self._node("Add", [product, self._weight(f"{name}.bias", bias)], f"{name}.out")

    def _multiply(self, name: str, x: str, weight: str, scales: str, scheme: LayerScheme) -> str:
        """Return the product of x and integers (in, out) with scales (out,)."""
        weight = self._node("DequantizeLinear", [weight, scales], f"{name}.weight", axis=1)
        if scheme.input_scale is not None:
            scale = np.array(scheme.input_scale, np.float32)
            x = self._round(name, x, self._weight(f"{name}.input_scale", scale))
            return self._node("MatMul", [x, weight], f"{name}.product")
        # A token's scale differs from a tensor's: the input is divided by it before, and
        # multiplied after.
        sizes = self._node("Abs", [x], f"{name}.sizes")
        most = self._node("ReduceMax", [sizes, self._constant("last", [-1])], f"{name}.most")
        largest = self._constant("largest", 127, np.float32)
        step = self._node("Div", [most, largest], f"{name}.step")
        tiny = self._constant("tiny", np.finfo(np.float32).tiny, np.float32)
        step = self._node("Max", [step, tiny], f"{name}.scale")
        x = self._node("Div", [x, step], f"{name}.ratio")
        x = self._round(name, x, self._constant("one_step", 1, np.float32))
        sums = self._node("MatMul", [x, weight], f"{name}.sums")
        return self._node("Mul", [sums, step], f"{name}.product")

    def _round(self, name: str, x: str, scale: str) -> str:
        pair = [scale, self._constant("zero_int8", 0, np.int8)]
        integers = self._node("QuantizeLinear", [x, *pair], f"{name}.rounded")
        return self._node("DequantizeLinear", [integers, *pair], f"{name}.input")

    def _write_head(self, x: str) -> None:
        """Return the logits, by the table of the embedding, which the file holds once."""
        model = self._model
        rows = self._node("Reshape", [x, self._constant("to_rows", [-1, model.hidden_size])], "rows")
        if layer := self._scheme.get("wte.weight"):
            table = self._node("Transpose", ["wte.integers"], "wte.turned", perm=[1, 0])
            logits = self._multiply("logits", rows, table, "wte.scales", layer)
        elif bits := BITS.get(self._dtype):
            shape = [model.vocab_size, model.hidden_size // BLOCK, BLOCK * bits // 8]
            table = self._node("Reshape", ["wte.integers", self._constant("table_blocks", shape)], "wte.blocks")
            size = (model.vocab_size, model.hidden_size)
            logits = self._product([rows, table, "wte.scales"], "logits.rows", size, bits)
        else:
            table = self._widen("wte.weight")
            logits = self._node("Gemm", [rows, table], "logits.rows", transB=1)
        self._node("Shape", [x], "batch_and_length", start=0, end=2)
        width = self._constant("vocabulary", [model.vocab_size])
        shape_of_logits = self._node("Concat", ["batch_and_length", width], "logits.shape", axis=0)
        self._node("Reshape", [logits, shape_of_logits], "logits")

    def _product(self, inputs: list[str], output: str, shape: tuple[int, ...], bits: int) -> str:
        sizes = {"N": shape[0], "K": shape[1], "bits": bits, "block_size": BLOCK}
        return self._node("MatMulNBits", inputs, output, domain=_MICROSOFT, accuracy_level=_FULL_INTEGER, **sizes)

    def _write_quantized(self, name: str, weight: NDArray[np.float32], bits: int) -> tuple[str, str]:
        integers, scales = quantize_blocks(weight, bits)
        if name == "wte":  # GatherBlockQuantized takes a table with flat rows
            integers = integers.reshape(len(integers), -1)
        return (self._weight(f"{name}.integers", integers), self._weight(f"{name}.scales", scales))

    def _stored(self, weight: NDArray[np.float32]) -> NDArray[Any]:
        return weight.astype(np.float16) if self._dtype == "float16" else weight

    def _widen(self, name: str) -> str:
        if self._dtype != "float16":
            return name
        return self._node("Cast", [name], f"{name}.float32", to=TensorProto.FLOAT)
