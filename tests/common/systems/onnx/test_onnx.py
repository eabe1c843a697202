"""ONNX folders against transformers, in serving and in Hugging Face's optimum too, and their
quantized weights against the numbers that they stand for.
"""

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from common.config.schema import PredictConfig
from common.errors import ConfigError
from common.generation.generate import ExportedDecoder, generate
from common.generation.logit_rules import LogitRules
from common.generation.prompts import Prompt
from common.systems.hugging_face.weights import open_hugging_face
from common.systems.onnx.folder import DATA_FILE, GRAPH_FILE, OnnxModel, OnnxSlots, logits, write_onnx
from common.systems.onnx.model import BLOCK, quantize_blocks
from common.systems.weights import Weight, Weights
from tests.mixed_load import prompts, run
from tests.peers import peer_python
from tools.convert_weight import main

VOCABULARY, POSITIONS, HEADS = 131, 40, 4
TOLERANCE = 2e-5
"""Two programs add float32 in other orders: 4e-6 was seen, of logits up to 6."""


Oracle = tuple[GPT2LMHeadModel, Path]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """transformers' model with weights that differ from their initial ones, and its folder."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_head=HEADS, n_embd=64, n_inner=96, vocab_size=VOCABULARY,
        n_positions=POSITIONS, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    net = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(3).add_(torch.randn_like(parameter) * 0.02)
        net.transformer.wte.weight[2, 32:] = 0  # a block without a scale
    folder = tmp_path_factory.mktemp("hf")
    net.save_pretrained(folder)
    return net, folder


def write(
    folder: Path,
    source: Path,
    dtype: str = "float32",
    change: Callable[[Weights], Weights] = lambda weights: weights,
    **options: bool,
) -> Path:
    folder.mkdir()
    weights = open_hugging_face(source)
    write_onnx(folder, change(weights), dtype, **options)
    return folder


def logits_of(net: GPT2LMHeadModel, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return net(torch.from_numpy(ids)).logits.numpy()


def random_ids(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCABULARY, shape)


@pytest.mark.parametrize("cache", [True, False])
def test_logits_and_greedy_tokens_equal_those_of_transformers(oracle: Oracle, tmp_path: Path, cache: bool) -> None:
    net, source = oracle
    folder = write(tmp_path / "onnx", source, cache=cache)
    onnx.checker.check_model(str(folder / GRAPH_FILE), full_check=True)
    for shape in ((1, 1), (3, 9), (2, POSITIONS)):
        ids = random_ids(*shape)
        assert np.abs(logits(folder, None, ids) - logits_of(net, ids)).max() < TOLERANCE
    decoder = ExportedDecoder(OnnxModel(folder / GRAPH_FILE, POSITIONS), rows=2)
    prompts = [Prompt(text="", ids=list(map(int, random_ids(n))), new_tokens=12) for n in (5, 11)]
    rules = LogitRules(PredictConfig(stop_at_end_of_text=False), ends=(0,))
    for each in generate(decoder, prompts, rules, seed=0):
        ids = torch.tensor([each.prompt.ids])
        expected = net.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert each.tokens == expected[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("activation", ["gelu", "quick_gelu"])
def test_other_activations(oracle: Oracle, tmp_path: Path, activation: str) -> None:
    net = GPT2LMHeadModel(GPT2Config(**oracle[0].config.to_dict() | {"activation_function": activation})).eval()
    net.load_state_dict(oracle[0].state_dict())
    net.save_pretrained(tmp_path / "hf")
    folder, ids = write(tmp_path / "onnx", tmp_path / "hf"), random_ids(3, 9)
    assert np.abs(logits(folder, None, ids) - logits_of(net, ids)).max() < TOLERANCE
    assert np.abs(logits_of(oracle[0], ids) - logits_of(net, ids)).max() > 10 * TOLERANCE


def dequantized(weight: np.ndarray, bits: int) -> np.ndarray:
    """The definition of the format, an element at a time. Each is near the weight: the end of the
    range opposite to the largest of a block, which is exact, lacks half a step.
    """
    integers, scales = quantize_blocks(weight, bits)
    meant = np.empty_like(weight)
    for row, column in np.ndindex(*weight.shape):
        block, place = divmod(column, BLOCK)
        if bits == 8:
            integer = int(integers[row, block, place])
        else:
            integer = int(integers[row, block, place // 2]) >> 4 * (place % 2) & 15
        meant[row, column] = (integer - 2 ** (bits - 1)) * scales[row, block]
    steps = np.abs(scales).repeat(BLOCK, 1) * (1 + 1e-5)
    assert (np.abs(meant - weight) <= steps).all()
    assert (np.abs(meant - weight) <= steps / 2).mean() > 0.95
    largest, rows = np.abs(weight).argmax(1), np.arange(len(weight))
    assert np.allclose(meant[rows, largest], weight[rows, largest], rtol=1e-6)
    return meant


@pytest.mark.parametrize("dtype", ["int8", "int4", "float16"])
def test_smaller_weights_compute_what_they_stand_for(oracle: Oracle, tmp_path: Path, dtype: str) -> None:
    """The graph of small weights equals the float32 graph of the values that these have. Rounding
    of activations is switched off for it. The same weights are the same bytes.
    """
    small = write(tmp_path / "small", oracle[1], dtype)
    again = write(tmp_path / "again", oracle[1], dtype)
    for name in (GRAPH_FILE, DATA_FILE):
        assert (small / name).read_bytes() == (again / name).read_bytes()
    graph = onnx.load(small / GRAPH_FILE, load_external_data=False)
    for node in graph.graph.node:
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                assert attribute.i == 4
                attribute.i = 0

    def meant_by(weight: Weight) -> np.ndarray:
        matrix = weight.load()
        if dtype == "float16":
            return matrix.astype(np.float16).astype(np.float32)
        return dequantized(np.ascontiguousarray(matrix), int(dtype[3:]))

    def rough(weights: Weights) -> Weights:
        small = {
            name: replace(weight, load=partial(meant_by, weight))
            for name, weight in weights.tensors.items()
            if len(weight.shape) == 2 and (dtype == "float16" or name != "wpe.weight")
        }
        return replace(weights, tensors=weights.tensors | small)

    meant = write(tmp_path / "meant", oracle[1], change=rough)
    ids = random_ids(2, 11)
    expected, rounded = logits(meant, None, ids), logits(small, None, ids)
    (small / GRAPH_FILE).write_bytes(graph.SerializeToString())
    assert np.abs(logits(small, None, ids) - expected).max() < TOLERANCE
    assert np.abs(rounded - expected).max() < 0.05 * np.abs(expected).max()
    sizes = [(folder / DATA_FILE).stat().st_size for folder in (small, meant)]
    assert sizes[0] < {"float16": 0.6, "int8": 0.4, "int4": 0.3}[dtype] * sizes[1]


def test_bad_input(oracle: Oracle, tmp_path: Path, capsys: Any) -> None:
    folder = write(tmp_path / "onnx", oracle[1])
    to_hf, to_onnx = ["--to", "hf", "--input", str(folder)], ["--to", "onnx", "--input", str(oracle[1])]
    for words, message in (
        (to_hf, "--from onnx: this format is written only"),
        ([*to_onnx, "--dtype", "bfloat16"], "onnx holds float32, float16, int8, int4"),
    ):
        assert main([*words, "--output", str(tmp_path / "x")]) == 2
        assert message in capsys.readouterr().err

    def odd(weights: Weights) -> Weights:
        return replace(weights, model=weights.model.model_copy(update={"hidden_size": 48}))

    with pytest.raises(ConfigError, match="blocks of 32"):
        write(tmp_path / "odd", oracle[1], "int8", odd)
    plain = write(tmp_path / "plain", oracle[1], cache=False)
    with pytest.raises(ConfigError, match=r"export\.cache=true"):
        OnnxSlots(OnnxModel(plain / GRAPH_FILE, POSITIONS), 2)
    (folder / DATA_FILE).write_bytes(b"")
    with pytest.raises(ConfigError, match=r"onnxruntime .* cannot open it"):
        OnnxModel(folder / GRAPH_FILE, POSITIONS)


@pytest.mark.parametrize("window", [None, 20])
def test_a_mixed_load_is_transformers(oracle: Oracle, tmp_path: Path, window: int | None) -> None:
    """24 sequences in four slots; each token is transformers' after the same context."""
    net, source = oracle
    model = OnnxModel(write(tmp_path / "onnx", source) / GRAPH_FILE, POSITIONS)
    given = prompts(VOCABULARY, None if window else POSITIONS)
    found, engine = run(OnnxSlots(model, 4), given, window)
    for prompt, tokens in zip(given, found, strict=True):
        ids = prompt.ids + tokens
        if window is None:
            with torch.no_grad():
                best = net(torch.tensor([ids])).logits[0].argmax(-1).tolist()
            assert tokens == best[len(prompt.ids) - 1 : -1]
        for end in range(len(prompt.ids), len(ids)) if window else ():
            context = np.array([ids[:end][1 - window :]])
            assert ids[end] == logits_of(net, context)[0, -1].argmax()
        assert len(tokens) == prompt.new_tokens
    assert (engine.counts["reused_prompt_tokens"] > 100) == (window is None)


# ---- Hugging Face's optimum ----

PEER = ("optimum-onnx==0.1.0", "transformers==4.57.6")
"""The last release, and the last transformers that it takes: not those of this environment."""
_SCRIPT = """
import json, sys
import torch
from optimum.onnxruntime import ORTModelForCausalLM

asked = json.loads(sys.argv[1])
model = ORTModelForCausalLM.from_pretrained(asked["folder"], use_cache=asked["cache"])
ids, mask = torch.tensor(asked["ids"]), torch.tensor(asked["mask"])
with torch.no_grad():
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
rows = [model.generate(ids, attention_mask=mask, **case) for case in asked["cases"]]
json.dump({"logits": logits.tolist(), "rows": [each.tolist() for each in rows]}, sys.stdout)
"""


@pytest.mark.campaign
@pytest.mark.parametrize("cache", [True, False])
def test_optimum_generates_what_transformers_does(oracle: Oracle, tmp_path: Path, cache: bool) -> None:
    net, source = oracle
    folder = tmp_path / "onnx"
    assert main(["--to", "onnx", "--input", str(source), "--output", str(folder)]) == 0
    if not cache:
        weights = open_hugging_face(source)
        write_onnx(folder, weights, "float32", cache=False)
    ids = np.random.default_rng(0).integers(1, VOCABULARY, (3, 9))
    mask = np.ones_like(ids)
    mask[0, :4] = mask[2, :1] = 0  # padding on the left
    case = {"max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0, "do_sample": False}
    cases: list[dict[str, Any]] = [case, case | {"num_beams": 3, "length_penalty": 0.5}]
    asked = {"folder": str(folder), "cache": cache, "cases": cases}
    asked |= {"ids": ids.tolist(), "mask": mask.tolist()}
    command = [peer_python("optimum", *PEER), "-c", _SCRIPT, json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found, given = json.loads(done.stdout), {"attention_mask": torch.from_numpy(mask)}
    with torch.no_grad():
        positions = (given["attention_mask"].cumsum(1) - 1).clamp(min=0)
        expected = net(torch.from_numpy(ids), position_ids=positions, **given).logits.numpy()
    assert np.abs(np.array(found["logits"]) - expected)[mask == 1].max() < TOLERANCE
    for rows, each in zip(found["rows"], cases, strict=True):
        assert rows == net.generate(torch.from_numpy(ids), **given, **each).tolist()
