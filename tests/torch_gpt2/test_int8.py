"""Weights of 8 bits: the folder as plain safetensors reads it, the products against numpy's, the
model against transformers' with rounded inputs, and what is refused.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch.nn import functional as F

import torch_gpt2.int8
from common.backends import make_run
from common.config.schema import PredictConfig
from common.conversion.convert import convert
from common.errors import CheckpointError, ConfigError
from common.generation.generate import generate
from common.generation.logit_rules import LogitRules
from common.generation.prompts import Prompt
from common.parallel.run import Run
from common.quantization import to_integers
from common.systems.own_folder import write_project
from common.training.export import export
from common.training.opened_checkpoint import Checkpoint
from common.training.start import where_to_start
from common.weights.pieces import LayerScheme
from tests.common.systems.tiny_weights import as_weights, random_arrays
from tests.reference import hugging_face_model
from tests.tiny import tiny_config
from torch_gpt2.device import select_device
from torch_gpt2.int8 import Int8Linear, load_model
from torch_gpt2.model import GPT2
from torch_gpt2.predict import Decoder


def config_at(folder: Path, **more: Any) -> Run:
    return tiny_config(folder, model__seq_length=24, **more)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model in float32 and in 8 bits."""
    root = tmp_path_factory.mktemp("int8")
    model = config_at(root).model
    arrays = {name: array * np.float32(0.3) for name, array in random_arrays(model).items()}
    (root / "float32").mkdir()
    write_project(root / "float32", as_weights(model, arrays), None)
    convert(root / "float32", root / "int8", target_format="torch_gpt2", dtype="int8")
    return {"float32": root / "float32", "int8": root / "int8"}


def integer_model(folder: Path) -> GPT2:
    model = load_model(config_at(folder), select_device("cpu"), Checkpoint(folder))
    assert any(isinstance(module, Int8Linear) for module in model.modules())
    return model


@pytest.mark.parametrize(("exact", "width"), [(True, 40), (True, 4096), (False, 40)])
@pytest.mark.parametrize("input_scale", [None, 0.02])
def test_a_product_is_that_of_integers_in_numpy(
    monkeypatch: pytest.MonkeyPatch, input_scale: float | None, exact: bool, width: int
) -> None:
    """Bit for bit, with inputs beyond the scale. float32 holds sums below 2^24: those of 40 products, not of 4096."""
    if exact and not torch_gpt2.int8.multiplies_integers():
        pytest.skip("this processor has no exact product of 8 bits")
    if not exact:
        monkeypatch.setattr(torch_gpt2.int8, "multiplies_integers", lambda: False)
    rng = np.random.default_rng(1)
    mean = 8.0 if width > 40 else 0.0  # equal signs make large sums
    w, x = (rng.normal(mean, 1, shape).astype(np.float32) for shape in ((24, width), (2, 3, width)))
    x[0, 0] = 0.0
    x[1, 1] *= 1e3
    bias = rng.normal(0, 1, 24).astype(np.float32)
    stored, scales = to_integers("w", w, LayerScheme())
    tensors = map(torch.from_numpy, (stored, scales, bias))
    layer = Int8Linear(*tensors, input_scale)
    largest = np.abs(x).max(-1, keepdims=True) / np.float32(127)
    scale = np.float32(input_scale) if input_scale else largest.clip(np.finfo(np.float32).tiny)
    integers = np.rint(x * (np.float32(1) / scale)).clip(-128, 127).astype(np.int64)
    sums = integers @ stored.T.astype(np.int64)
    assert (np.abs(sums).max() < 2**24) == (width == 40)
    expected = sums.astype(np.float32) * (scale * scales) + bias
    np.testing.assert_array_equal(layer(torch.from_numpy(x)).numpy(), expected)


def test_plain_safetensors_reads_the_folder(folders: dict[str, Path], tmp_path: Path) -> None:
    """Read by its documented names. Export writes the same file; converted back it is float32."""
    found, floats = (load_file(folders[kind] / "model.safetensors") for kind in ("int8", "float32"))
    for name, weight in floats.items():
        if f"{name}_scale" not in found:
            assert weight.ndim == 1 or name == "wpe.weight"
            np.testing.assert_array_equal(found[name], weight)
            continue
        integers, scales = found[name], found[f"{name}_scale"]
        assert integers.dtype == np.int8 and (np.abs(integers).max(1) == 127).all()
        np.testing.assert_array_equal(scales, np.abs(weight).max(1) / np.float32(127))
        assert np.abs(integers * scales[:, None] - weight).max() <= scales.max() * 0.5001
    settings = {"export": {"format": "safetensors", "weights": "int8"}}
    load = {"load": str(folders["float32"])}
    run, inputs = make_run(config_at(tmp_path, **settings, checkpoint=load), "export")
    assert inputs.checkpoint is not None
    export(run, inputs.checkpoint)
    written = (tmp_path / "weights" / "model.safetensors").read_bytes()
    assert written == (folders["int8"] / "model.safetensors").read_bytes()
    convert(folders["int8"], tmp_path / "back", target_format="torch_gpt2")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert list(back) == list(floats)
    name = "h.1.mlp.c_fc.weight"
    np.testing.assert_array_equal(back[name], found[name] * found[f"{name}_scale"][:, None])


@torch.no_grad()
def test_the_model_is_transformers_with_rounded_inputs(folders: dict[str, Path]) -> None:
    """Each linear layer's input rounded token by token; 1e-4 of 20 is float32's order of sums."""
    config = config_at(folders["int8"]).model
    values = {name: torch.from_numpy(np.array(array)) for name, array in Checkpoint(folders["int8"]).weights(config)}
    reference = hugging_face_model(config, values)

    def rounded(module: torch.nn.Module, given: tuple[torch.Tensor]) -> torch.Tensor:
        scale = given[0].abs().amax(-1, keepdim=True) / 127
        return (given[0] / scale).round() * scale

    for name, module in reference.named_modules():
        if name.endswith(("c_attn", "c_proj", "c_fc", "lm_head")):
            module.register_forward_pre_hook(rounded)
    ids = torch.from_numpy(np.random.default_rng(2).integers(0, 101, (3, 24)))
    expected = reference(ids).logits
    model = integer_model(folders["int8"])
    assert (model.logits(model(ids)) - expected).abs().max() < 1e-4
    assert model.head is not None
    for targets in (ids, ids.masked_fill(ids % 3 == 0, -1)):
        loss = F.cross_entropy(expected.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")
        assert abs(model.loss_sum(ids, targets) / loss - 1) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 3])
def test_generation_takes_the_tokens_of_whole_passes(folders: dict[str, Path], rows: int) -> None:
    model = integer_model(folders["int8"])
    prompts = [[5, 17, 50], [9], [1, 2, 3, 4, 5, 6]][:rows]
    given = [Prompt(text="", ids=ids, new_tokens=8) for ids in prompts]
    for _ in range(2):  # the integers are held once, packed
        decoder = Decoder(model, select_device("cpu"), rows)
        found = list(generate(decoder, given, LogitRules(PredictConfig(), ends=()), seed=0))
        for prompt, each in zip(prompts, found, strict=True):
            ids = list(prompt)
            for _ in range(8):
                ids.append(int(model.logits(model(torch.tensor([ids])))[0, -1].argmax()))
            assert each.tokens == ids[len(prompt) :]
    held = (model.h[0].attn.c_proj, model.h[0].mlp.c_fc, model.h[0].mlp.c_proj, model.head)
    assert torch_gpt2.int8.multiplies_integers() is not any(each.weight.numel() for each in held)


def test_training_and_what_is_no_number_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    for key in ("resume", "init_from"):
        config = config_at(tmp_path, checkpoint={key: str(folders["int8"])})
        with pytest.raises(ConfigError, match=rf"checkpoint.{key}=.*have 8 bits.*--to torch_gpt2"):
            where_to_start(config, None)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="w: holds numbers that are not finite"):
        to_integers("w", np.array([[1.0, np.nan]], np.float32), LayerScheme())
