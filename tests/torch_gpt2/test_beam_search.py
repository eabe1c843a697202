"""Beam search against transformers, and groups of beams against a plain loop."""

from functools import partial

import numpy as np
import pytest
import torch

from tests.reference import hugging_face_model
from tests.torch_gpt2.test_predict import continued, continued_by_transformers
from tests.twins import random_model
from torch_gpt2.model import GPT2

VOCABULARY, PADDING = 40, 0


@pytest.fixture(scope="module")
def model() -> GPT2:
    return random_model(seq_length=64, vocab_size=VOCABULARY).eval()


ours = partial(continued, strategy="beam_search")


def test_150_random_cases_equal_transformers(model: GPT2) -> None:
    net = hugging_face_model(model.config, dict(model.named_parameters()))
    random = np.random.default_rng(0)
    ended = 0
    for case in range(150):
        beams = int(random.integers(2, 7))
        end = int(
            random.choice([19, 26, 0, int(random.integers(VOCABULARY))])
        )  # the first are usual
        ends = [end, *{7, 30, 33}.difference({end})][: 1 + case % 3]
        new_tokens = int(random.integers(1, 14))
        settings = {
            "num_beams": beams,
            "length_penalty": float(random.choice([-1.0, 0.0, 0.6, 1.0, 2.0])),
            "early_stopping": [True, False, "never"][int(random.integers(3))],
            "repetition_penalty": float(random.choice([1.0, 1.0, 1.3])),
        }
        if settings["repetition_penalty"] != 1.0:
            lengths = [int(random.integers(1, 9))]  # padding would count as a repetition
        else:
            lengths = random.integers(1, 9, int(random.integers(1, 4))).tolist()
        least = int(random.choice([0, 0, min(3, new_tokens)]))
        returned = int(random.integers(1, beams + 1))
        rows = [random.integers(0, VOCABULARY, length).tolist() for length in lengths]
        settings["min_new_tokens"] = least
        found = ours(model, rows, new_tokens, ends=ends, num_sequences=returned, **settings)
        tokens, said = continued_by_transformers(
            net, rows, new_tokens, ends, PADDING, num_return_sequences=returned, **settings
        )
        scores = said.sequences_scores.tolist()
        mine = [[*each.tokens, each.end] if each.end is not None else each.tokens for each in found]
        assert mine == tokens, (case, settings)
        assert np.allclose([each.score for each in found], scores, atol=1e-4), (case, settings)
        ended += sum(each.finish_reason == "end_of_text" for each in found)
    assert ended > 80  # else the end of a sequence was not looked at


def plain_loop(
    model: GPT2, prompt: list[int], groups: int, size: int, rate: float, new_tokens: int
) -> list[list[int]]:
    """Groups of beams without an end, by their definition: whole sequences, no caches."""
    beams: list[list[tuple[float, list[int]]]] = [[(0.0, [])] for _ in range(groups)]
    for _ in range(new_tokens):
        chosen: list[int] = []
        for group in range(groups):
            candidates = []
            for score, tokens in beams[group]:
                ids = torch.tensor([prompt + tokens])
                with torch.no_grad():
                    logits = model.logits(model(ids))[0, -1].double()
                for token, value in enumerate(logits.log_softmax(-1).tolist()):
                    cost = rate * chosen.count(token)
                    candidates.append((score + value - cost, [*tokens, token]))
            beams[group] = sorted(candidates, key=lambda each: -each[0])[:size]
            chosen += [tokens[-1] for _, tokens in beams[group]]
    finished = [(score / new_tokens, tokens) for group in beams for score, tokens in group]
    return [tokens for _, tokens in sorted(finished, key=lambda each: -each[0])]


@pytest.mark.parametrize(
    ("groups", "size", "prompt"),
    [(2, 2, [3, 1, 4]), (3, 1, [3, 1, 4]), (3, 2, [14, 14, 29]), (2, 4, [15, 25, 26, 11])],
)
def test_groups_avoid_each_others_tokens(
    model: GPT2, groups: int, size: int, prompt: list[int]
) -> None:
    beams = {"num_beams": groups * size, "num_beam_groups": groups}
    found = ours(
        model, [prompt], 8, num_sequences=groups * size, diversity_rate=1.5,
        stop_at_end_of_text=False, **beams,
    )  # fmt: skip
    assert [each.tokens for each in found] == plain_loop(model, prompt, groups, size, 1.5, 8)
    assert len({each.tokens[0] for each in found}) > 1
