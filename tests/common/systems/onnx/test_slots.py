"""Sequences that come and go in the batches of a graph, against transformers one at a time."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GPT2LMHeadModel

from common.errors import ConfigError
from common.systems.onnx.folder import GRAPH_FILE, OnnxModel, OnnxSlots
from tests.common.systems.onnx.test_onnx import POSITIONS, VOCABULARY, logits_of, oracle, write
from tests.mixed_load import prompts, run

__all__ = ["oracle"]


@pytest.mark.parametrize("window", [None, 20])
def test_a_mixed_load_is_transformers(
    oracle: tuple[GPT2LMHeadModel, Path], tmp_path: Path, window: int | None
) -> None:
    """24 sequences in four slots; each token is transformers' after the same context."""
    net, source = oracle
    model = OnnxModel(write(tmp_path / "onnx", source) / GRAPH_FILE)
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
    assert (engine.counts.reused_tokens > 100) == (window is None)


def test_a_graph_without_a_cache_is_refused(
    oracle: tuple[GPT2LMHeadModel, Path], tmp_path: Path
) -> None:
    folder = write(tmp_path / "onnx", oracle[1], cache=False)
    with pytest.raises(ConfigError, match=r"export\.cache=true"):
        OnnxSlots(OnnxModel(folder / GRAPH_FILE), 2)
