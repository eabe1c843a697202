"""A checkpoint that was trained with rounded weights and inputs, as integers: in our folder and in
ONNX it equals transformers' model with the same rounding.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.numpy import load_file

from common.checkpoint.manifest import read_manifest, write_manifest
from common.config.schema import QuantizationConfig
from common.conversion.convert import convert
from common.conversion.logits import config_of
from common.errors import UserError
from common.quantization import activation_levels, quantize, quantized_layers, scale_of, weight_levels
from common.systems.onnx.folder import logits
from common.systems.own_folder import write_project
from common.training.opened_checkpoint import Checkpoint
from tests.common.systems.tiny_weights import as_weights, random_arrays
from tests.reference import hugging_face_model
from tests.tiny import tiny_config
from torch_gpt2.device import select_device
from torch_gpt2.int8 import Int8Linear, load_model

MODEL = tiny_config(model__seq_length=24).model
SKIP = ["h.0.attn.k_proj", "h.1.mlp"]
IDS = np.random.default_rng(3).integers(0, 101, (3, 24))
MAXIMUM = 3.0
"""Scales of every layer's input by the moving average: some inputs are beyond it."""


@pytest.fixture(scope="module")
def values() -> dict[str, np.ndarray]:
    return {name: array * np.float32(0.3) for name, array in random_arrays(MODEL).items()}


def checkpoint(folder: Path, values: dict[str, np.ndarray], settings: dict[str, Any], **state: Any) -> Path:
    folder.mkdir()
    write_project(folder, as_weights(MODEL, values), None)
    record = read_manifest(folder)
    record["config"]["quantization"] = settings
    record["engine"]["quantization"] = state
    write_manifest(folder, record)
    return folder


@torch.no_grad()
def fake_quantized_logits(values: dict[str, np.ndarray], config: QuantizationConfig) -> np.ndarray:
    """Logits of transformers' model. Its layer of q, k and v rounds its input where q does; its
    part of k, which is skipped, is put back.
    """
    layers = quantized_layers(config, MODEL.num_layers)
    levels = activation_levels(config.activation_bits)

    def rounded(x: torch.Tensor) -> torch.Tensor:
        array = x.numpy()
        fixed = scale_of(np.float32(MAXIMUM), levels.high)
        of_rows = scale_of(np.abs(array).max(-1, keepdims=True), levels.high)
        scale = of_rows if config.activations == "dynamic" else fixed
        return torch.from_numpy(quantize(array, scale, levels) * scale)

    rough = dict(values)
    for layer in layers:
        weight = values[f"{layer}.weight"]
        of_weights = weight_levels(config.weight_bits)
        axes = 1 if config.weights == "channel_wise_abs_max" else (0, 1)
        scales = scale_of(np.abs(weight).max(axes, keepdims=True), of_weights.high)
        rough[f"{layer}.weight"] = quantize(weight, scales, of_weights) * scales
    model = hugging_face_model(MODEL, {name: torch.from_numpy(a) for name, a in rough.items()})

    def around(name: str, forward: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        y = forward(rounded(x))
        if name.endswith("h.0.attn.c_attn"):
            skipped = slice(MODEL.hidden_size, 2 * MODEL.hidden_size)
            y[..., skipped] = forward(x)[..., skipped]
        return y

    for name, module in model.named_modules():
        if name.removeprefix("transformer.").replace("c_attn", "q_proj") in layers:
            module.forward = partial(around, name, module.forward)  # type: ignore[method-assign]
    found: np.ndarray = model(torch.from_numpy(IDS)).logits.numpy()
    return found


@pytest.mark.parametrize("weights", ["abs_max", "channel_wise_abs_max"])
@pytest.mark.parametrize("activations", ["moving_average_abs_max", "dynamic"])
@torch.no_grad()
def test_integers_equal_what_was_trained(
    tmp_path: Path, values: dict[str, np.ndarray], weights: str, activations: str
) -> None:
    """Sums of 128 products of integers are exact, and those of floats are rounded: 128 x 2^-24 of
    logits up to 10 is 1e-4. No input lies so near to the border of two levels that this moves it.
    """
    settings = {"weights": weights, "activations": activations, "skip": SKIP, "weight_bits": 7}
    config = QuantizationConfig(**settings)
    layers = quantized_layers(config, MODEL.num_layers)
    scales = dict.fromkeys(layers, 2.0 * MAXIMUM)
    source = checkpoint(tmp_path / "run", values, settings, weight=2.0, accumulated=scales)
    expected = fake_quantized_logits(values, config)
    folder = tmp_path / "int8"
    convert(source, folder, target_format="torch_gpt2", dtype="int8")
    found = load_file(folder / "model.safetensors")
    of_8_bits = {name.removesuffix(".weight") for name, x in found.items() if x.dtype == np.int8}
    assert of_8_bits == set(layers)
    assert ("h.0.mlp.c_fc.input_scale" in found) == (activations != "dynamic")
    assert max(np.abs(x).max() for x in found.values() if x.dtype == np.int8) == 63
    model = load_model(config_of(MODEL, folder), select_device("cpu"), Checkpoint(folder))
    assert sum(isinstance(part, Int8Linear) for part in model.modules()) == len(of_8_bits)
    ids = torch.from_numpy(IDS)
    assert np.abs(model.logits(model(ids)).numpy() - expected).max() < 1e-4
    for start in (source, folder):
        target = tmp_path / f"onnx_{start.name}"
        convert(start, target, target_format="onnx", dtype="int8")
        assert np.abs(logits(target, MODEL, IDS) - expected).max() < 1e-4
        graph = onnx.load(target / "model.onnx", load_external_data=False).graph
        assert {node.domain for node in graph.node} == {""}
        assert sum(node.op_type == "QuantizeLinear" for node in graph.node) == 7


@pytest.mark.parametrize(
    ("settings", "state", "message"),
    [
        ({"skip": []}, {}, "holds no scales of activations"),
        ({"activations": "none"}, {}, "activations=none and activation_bits=8"),
        ({"activation_bits": 4}, {}, "activation_bits=4; integers are multiplied"),
        ({"weights": "best"}, {}, "broken manifest"),
    ],
)
def test_types_without_integers_are_refused(
    tmp_path: Path, values: dict[str, np.ndarray], settings: dict[str, Any], state: dict[str, Any], message: str
) -> None:
    source = checkpoint(tmp_path / "run", values, settings, **state)
    with pytest.raises(UserError, match=message):
        convert(source, tmp_path / "int8", target_format="torch_gpt2", dtype="int8")
    assert not (tmp_path / "int8").exists()
