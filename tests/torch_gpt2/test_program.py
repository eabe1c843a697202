"""Programs of torch.export against transformers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GPT2LMHeadModel

from common.config.schema import PredictConfig
from common.errors import ConfigError
from common.generation.generate import ExportedDecoder, generate
from common.generation.logit_rules import LogitRules
from common.generation.prompts import Prompt
from common.systems.hugging_face.weights import open_hugging_face
from tests.reference import hugging_face_model
from tests.torch_gpt2.test_predict import continued_by_transformers
from tests.twins import random_model
from torch_gpt2.export import FILE, ProgramModel, write_program

VOCABULARY, POSITIONS = 131, 40
TOLERANCE = 2e-5
"""Two programs add float32 in other orders: 4e-6 was seen, of logits up to 6."""


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[GPT2LMHeadModel, Path]:
    """transformers' model of random weights, and its folder."""
    model = random_model(seq_length=POSITIONS, vocab_size=VOCABULARY, ffn_hidden_size=96)
    net = hugging_face_model(model.config, dict(model.named_parameters()))
    folder = tmp_path_factory.mktemp("hf")
    net.save_pretrained(folder)
    return net, folder


_STRANGER = """
import json, sys, torch
program = torch.export.load(sys.argv[1]).module()
assert not [name for name in sys.modules if name.startswith(("common", "torch_gpt2"))]
answers = []
for rows in json.loads(sys.argv[2]):
    ids = torch.tensor(rows)
    past = (torch.ones(len(ids), 0, dtype=torch.long), *[torch.zeros(len(ids), 4, 0, 8)] * 4)
    parts = []
    for place in range(ids.shape[1]):  # a token at a time
        logits, past = program(ids[:, [place]], torch.ones(len(ids), 1, dtype=torch.long), past)
        parts.append(logits)
    whole, _ = program(ids, torch.ones_like(ids), tuple(each[:, :0] if each.dim() == 2
                       else each[:, :, :0] for each in past))
    answers.append([torch.cat(parts, 1).tolist(), whole.tolist()])
print(json.dumps(answers))
"""


@pytest.mark.long
def test_plain_torch_runs_it(oracle: tuple[GPT2LMHeadModel, Path], tmp_path: Path) -> None:
    """In a process without this project, for other batches and lengths than the traced ones, up to all positions."""
    net, source = oracle
    weights = open_hugging_face(source)
    write_program(tmp_path, weights, cache=True)
    texts = [np.random.default_rng(0).integers(0, VOCABULARY, shape) for shape in ((1, 1), (3, 7), (1, POSITIONS))]
    words = [sys.executable, "-c", _STRANGER, FILE, json.dumps([ids.tolist() for ids in texts])]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for ids, found in zip(texts, json.loads(done.stdout), strict=True):
        with torch.no_grad():
            expected = net(torch.from_numpy(ids)).logits.numpy()
        for logits in found:
            assert np.abs(np.array(logits) - expected).max() < TOLERANCE


def test_greedy_tokens_without_a_cache_equal_those_of_transformers(
    oracle: tuple[GPT2LMHeadModel, Path], tmp_path: Path
) -> None:
    """Rows of different lengths, the longer one up to the last position; with a cache:
    tests/gpt2_toolkit. A damaged file is one message.
    """
    net, source = oracle
    weights = open_hugging_face(source)
    model = weights.model
    write_program(tmp_path, weights, cache=False)
    decoder = ExportedDecoder(ProgramModel(tmp_path / FILE, model), rows=2)
    random = np.random.default_rng(1)
    prompts = [
        Prompt(text="", ids=random.integers(0, VOCABULARY, length).tolist(), new_tokens=new)
        for length, new in ((5, 20), (32, 8))
    ]
    rules = LogitRules(PredictConfig(stop_at_end_of_text=False), ends=(0,))
    for each in generate(decoder, prompts, rules, seed=0):
        [expected], _ = continued_by_transformers(net, [each.prompt.ids], each.prompt.new_tokens, [], 0)
        assert each.tokens == expected
    content = (tmp_path / FILE).read_bytes()
    for damaged in (b"", content[:100], content[:-1]):
        (tmp_path / FILE).write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"torch .* cannot open it .* export it again"):
            ProgramModel(tmp_path / FILE, model)
