"""Biases, bad words, stop strings, log-probabilities and beam search of whole generations against
transformers on the same weights; groups of beams against a plain loop.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.generation.generate import Continuation
from common.tokenizer.hugging_face import HuggingFaceTokenizer
from tests.reference import hugging_face_model
from tests.torch_gpt2.test_predict import continued, continued_by_transformers
from tests.twins import random_model
from torch_gpt2.model import GPT2

VOCABULARY, NEW = 60, 12
STORY = """The café was full and the queen had not come. The king, who had, drank three cups.
"Where is she?" he said. "In the café, of course!" they all cried, and the king drank a fourth.
"""


@pytest.fixture(scope="module")
def model() -> GPT2:
    return random_model(seq_length=64, vocab_size=VOCABULARY).eval()


@pytest.fixture(scope="module")
def net(model: GPT2) -> Any:
    return hugging_face_model(model.config, dict(model.named_parameters()))


def ours(model: GPT2, rows: list[list[int]], end: int = 0, **more: Any) -> list[Continuation]:
    return continued(model, rows, NEW, ends=(end,), vocab_size=VOCABULARY, **more)


def theirs(net: Any, row: list[int], **settings: Any) -> list[int]:
    found, _ = continued_by_transformers(net, [row], NEW, [0], 0, **settings)
    return found[0]


def strategy_of(beams: int) -> dict[str, Any]:
    return {"strategy": "beam_search", "num_beams": beams} if beams > 1 else {}


@pytest.mark.parametrize("beams", [1, 3])
def test_biases_and_bad_words_equal_transformers(model: GPT2, net: Any, beams: int) -> None:
    """Words of one to three tokens of those that are generated without them."""
    random, changed = np.random.default_rng(0), 0
    strategy = strategy_of(beams)
    for case in range(12):
        row = random.integers(0, VOCABULARY, 1 + case % 8).tolist()
        free = ours(model, [row], **strategy)[0].tokens
        at, size = random.integers(0, 7, 2), 1 + case % 3
        word, banned = (free[place : place + size] or [3 + place] for place in at)
        bias = float(random.choice([-8.0, -0.5, 4.0]))
        rules: dict[tuple[int, ...], float] = {tuple(word): bias, tuple(banned): -np.inf}
        shared = {"repetition_penalty": 1.0 + case % 2 * 0.3, "min_new_tokens": case % 4}
        found = ours(model, [row], biases=rules, **strategy, **shared)[0].tokens
        lists: dict[str, Any] = {} if word == banned else {"sequence_bias": [[word, bias]]}
        expected = theirs(net, row, num_beams=beams, bad_words_ids=[banned], **shared, **lists)
        assert found == expected[: len(found)] and expected[len(found) :] in ([], [0]), case
        changed += found != free
    assert changed > 7  # else the rules were not looked at


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> tuple[HuggingFaceTokenizer, Any]:
    """A byte-level BPE of 60 ids over few letters and one of two bytes, ours and transformers'."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    options = {"vocab_size": VOCABULARY, "special_tokens": ["<|endoftext|>"], "show_progress": False}
    made.train_from_iterator([STORY], trainers.BpeTrainer(**options))
    file: Path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(file))
    own = HuggingFaceTokenizer(file, "HuggingFaceTokenizer")
    assert own.vocab_size == VOCABULARY
    return own, PreTrainedTokenizerFast(tokenizer_file=str(file))


@pytest.mark.parametrize("beams", [1, 3])
def test_stop_strings_end_where_transformers_do(
    model: GPT2, net: Any, tokenizers: tuple[HuggingFaceTokenizer, Any], beams: int
) -> None:
    """Stop strings of one to three characters out of what is generated without them. transformers
    returns the tokens up to the end of the stop string, and so do we.
    """
    own, other = tokenizers
    random, stopped = np.random.default_rng(1), 0
    strategy = strategy_of(beams)
    for case in range(12):
        row = [int(random.integers(1, VOCABULARY))]
        text = own.decode(ours(model, [row], stream=own.stream, **strategy)[0].tokens)
        at = int(random.integers(2, len(text) - 3))  # not in the prompt's character, too
        stop = text[at : at + int(random.integers(1, 4))]
        if "\ufffd" in stop:  # no token says this
            continue
        found = ours(model, [row], stream=own.stream, stop=stop, **strategy)[0]
        expected = theirs(net, row, num_beams=beams, stop_strings=[stop], tokenizer=other)
        end = [0] if found.finish_reason == "end_of_text" else []
        assert found.tokens + end == expected, (case, stop)
        found.growing.advance(found.tokens, final=True)
        whole = own.decode(found.tokens)
        stops = found.finish_reason == "stop_string"
        assert stops == (stop in whole) and found.text == whole.partition(stop)[0]
        stopped += stops
    assert stopped >= 5


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"strategy": "sampling", "temperature": 0.5, "top_k": 5, "presence_penalty": 1.0},
        {"strategy": "beam_search", "num_beams": 3, "num_sequences": 3, "repetition_penalty": 1.2},
    ],
)
def test_log_probabilities_are_those_of_the_model_whatever_is_set(
    model: GPT2, net: Any, settings: dict[str, Any]
) -> None:
    """Against transformers' logits over the whole text, float32: within 1e-4 of values to 30."""
    rows = [[5, 6, 7], [8]]
    for each in ours(model, rows, 40, logprobs=4, **settings):
        ids = torch.tensor([each.prompt.ids + each.tokens])
        with torch.no_grad():
            logits = net(ids).logits[0].double()
        expected = logits.log_softmax(-1)[len(each.prompt.ids) - 1 : -1]
        assert [one.id for one in each.scored] == each.tokens
        for one, row in zip(each.scored, expected, strict=True):
            best = row.topk(4)
            assert [token for token, _ in one.top] == best.indices.tolist()
            values = [one.logprob, *(value for _, value in one.top)]
            wanted = [float(row[one.id]), *best.values.tolist()]
            np.testing.assert_allclose(values, wanted, rtol=0, atol=1e-4)


beams_of = partial(continued, strategy="beam_search")
FEW = 40


@pytest.fixture(scope="module")
def narrow() -> GPT2:
    return random_model(seq_length=64, vocab_size=FEW).eval()


def test_150_random_cases_equal_transformers(narrow: GPT2) -> None:
    net = hugging_face_model(narrow.config, dict(narrow.named_parameters()))
    random = np.random.default_rng(0)
    ended = 0
    for case in range(150):
        beams = int(random.integers(2, 7))
        end = int(random.choice([19, 26, 0, int(random.integers(FEW))]))  # the first are usual
        ends = [end, *{7, 30, 33}.difference({end})][: 1 + case % 3]
        new_tokens = int(random.integers(1, 14))
        settings = {
            "num_beams": beams,
            "length_penalty": float(random.choice([-1.0, 0.0, 0.6, 1.0, 2.0])),
            "early_stopping": [True, False, "never"][int(random.integers(3))],
            "repetition_penalty": float(random.choice([1.0, 1.0, 1.3])),
        }
        # padding would count as a repetition
        most = 2 if settings["repetition_penalty"] != 1.0 else 4
        lengths = random.integers(1, 9, int(random.integers(1, most)))
        settings["min_new_tokens"] = int(random.choice([0, 0, min(3, new_tokens)]))
        returned = int(random.integers(1, beams + 1))
        rows = [random.integers(0, FEW, length).tolist() for length in lengths]
        found = beams_of(narrow, rows, new_tokens, ends=ends, num_sequences=returned, **settings)
        tokens, said = continued_by_transformers(
            net, rows, new_tokens, ends, 0, num_return_sequences=returned, **settings
        )
        scores = said.sequences_scores.tolist()
        mine = [[*each.tokens, each.end] if each.end is not None else each.tokens for each in found]
        assert mine == tokens, (case, settings)
        assert np.allclose([each.score for each in found], scores, atol=1e-4), (case, settings)
        ended += sum(each.finish_reason == "end_of_text" for each in found)
    assert ended > 80  # else the end of a sequence was not looked at


def plain_loop(model: GPT2, prompt: list[int], groups: int, size: int, rate: float, new_tokens: int) -> list[list[int]]:
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
    ("groups", "size", "prompt"), [(2, 2, [3, 1, 4]), (3, 1, [3, 1, 4]), (3, 2, [14, 14, 29]), (2, 4, [15, 25, 26, 11])]
)
def test_groups_avoid_each_others_tokens(narrow: GPT2, groups: int, size: int, prompt: list[int]) -> None:
    beams = {"num_beams": groups * size, "num_beam_groups": groups, "num_sequences": groups * size}
    found = beams_of(narrow, [prompt], 8, diversity_rate=1.5, stop_at_end_of_text=False, **beams)
    assert [each.tokens for each in found] == plain_loop(narrow, prompt, groups, size, 1.5, 8)
    assert len({each.tokens[0] for each in found}) > 1
