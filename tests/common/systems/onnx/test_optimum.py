"""Hugging Face's optimum opens our ONNX folder and generates what transformers does."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from common.systems.hugging_face.weights import open_hugging_face
from common.systems.onnx.folder import write_onnx
from tests.peers import peer_python
from tools.convert_weight import main as convert

PEER = ("optimum-onnx==0.1.0", "transformers==4.57.6")
"""The last release, and the last transformers that it takes: not those of this environment."""
NEW = 12
CASES: dict[str, dict[str, object]] = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 3, "length_penalty": 0.5},
}

_SCRIPT = """
import json, sys
import torch
from optimum.onnxruntime import ORTModelForCausalLM

asked = json.loads(sys.argv[1])
found = {}
for kind, folder in asked["folders"].items():
    model = ORTModelForCausalLM.from_pretrained(folder, use_cache=kind == "cache")
    ids, mask = torch.tensor(asked["ids"]), torch.tensor(asked["mask"])
    with torch.no_grad():
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    found[kind] = {"logits": logits.tolist()}
    for name, options in asked["cases"].items():
        rows = model.generate(ids, attention_mask=mask, **asked["options"], **options)
        found[kind][name] = rows[:, ids.shape[1]:].tolist()
json.dump(found, sys.stdout)
"""


@pytest.mark.campaign
def test_optimum_generates_what_transformers_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_head=4, n_embd=64, vocab_size=131, n_positions=40, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    net = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(4).add_(torch.randn_like(parameter) * 0.02)
    net.save_pretrained(tmp_path / "hf")
    folders = {"cache": tmp_path / "cache", "no cache": tmp_path / "plain"}
    words = ["--to", "onnx", "--input", str(tmp_path / "hf"), "--output", str(folders["cache"])]
    assert convert(words) == 0
    folders["no cache"].mkdir()
    with open_hugging_face(tmp_path / "hf") as weights:
        write_onnx(folders["no cache"], weights, "float32", cache=False)
    (folders["no cache"] / "config.json").write_bytes(
        (folders["cache"] / "config.json").read_bytes()
    )
    ids = np.random.default_rng(0).integers(1, 131, (3, 9))
    mask = np.ones_like(ids)
    mask[0, :4] = mask[2, :1] = 0  # padding on the left
    options = {"max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0}
    asked = {
        "folders": {kind: str(folder) for kind, folder in folders.items()},
        "ids": ids.tolist(), "mask": mask.tolist(), "options": options, "cases": CASES,
    }  # fmt: skip
    command = [peer_python("optimum", *PEER), "-c", _SCRIPT, json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    given = {"attention_mask": torch.from_numpy(mask)}
    with torch.no_grad():
        positions = (given["attention_mask"].cumsum(1) - 1).clamp(min=0)
        logits = net(torch.from_numpy(ids), position_ids=positions, **given).logits.numpy()
    for kind, found in json.loads(done.stdout).items():
        difference = np.abs(np.array(found["logits"]) - logits)[mask == 1].max()
        print(f"optimum, {kind}: logits differ by {difference:.2g} of {np.abs(logits).max():.3g}")
        assert difference < 2e-5
        for name, case in CASES.items():
            expected = net.generate(torch.from_numpy(ids), **given, **options, **case)
            assert found[name] == expected[:, ids.shape[1] :].tolist(), (kind, name)
