"""MindSpore's slots say what torch's decoder says of the same weights, one sequence at a time."""

from typing import Any

import numpy as np
import pytest

from common.config.schema import PredictConfig
from common.generation.generate import Continuation, generate
from common.generation.logit_rules import LogitRules
from common.generation.prompts import Prompt
from common.generation.stop_strings import GrowingText
from common.serving.completion_task import CompletionJob, Limits, Piece
from common.serving.engine import Engine

pytest.importorskip("mindspore", reason="MindSpore is not installed: pip install '.[mindspore]'")

from tests.parity.test_predict import POSITIONS, VOCABULARY, decoders

__all__ = ["decoders"]


class NoText:
    def push(self, ids: Any, final: bool = False) -> str:
        return ""


@pytest.mark.parametrize("window", [None, 12])
def test_a_mixed_load_is_what_torch_generates(
    decoders: dict[str, Any],
    window: int | None,
) -> None:
    """Ten prompts in three slots, of which the first begin alike; seeds of their own, and the
    log-probabilities of the prompts' tokens.
    """
    from mindformers_gpt2.predict import Slots

    random = np.random.default_rng(6)
    common = random.integers(0, VOCABULARY, 17).tolist()
    prompts = []
    for number in range(10):
        own = random.integers(0, VOCABULARY, random.integers(1, 5)).tolist()
        ids = common + own[:2] if number < 5 else own
        new = int(random.integers(1, 6 if window is None else 20))
        prompts.append(Prompt(text="", ids=ids, new_tokens=new))
    settings = PredictConfig.model_validate({"strategy": "sampling", "top_k": 20, "logprobs": 1})
    options: dict[str, Any] = {"ends": (7,), "vocab_size": VOCABULARY}
    expected = list(
        generate(decoders["torch 1"], prompts, settings, seed=5, window=window, **options)
    )
    one = decoders["mindspore 4"]
    engine = Engine(Slots(one._model, one_device(), 3), queue_limit=10)
    pieces: list[Piece] = []
    jobs = [
        CompletionJob(
            Continuation(
                prompt=prompt,
                index=index,
                number=0,
                generator=np.random.default_rng((5, index, 0)),
                growing=GrowingText(NoText()),
            ),
            choice=index,
            settings=settings,
            rules=LogitRules(settings, ends=(7,)),
            limits=Limits(window=window, **options),
            scores_prompt=index % 2 == 0,
            emit=pieces.append,
        )
        for index, prompt in enumerate(prompts)
    ]
    engine.submit(jobs)
    while engine.turn():
        pass
    assert [job.sequence.tokens for job in jobs] == [each.tokens for each in expected]
    assert (engine.counts.reused_tokens > 0) == (window is None)
    for job, each in zip(jobs, expected, strict=True):
        found = [token.logprob for token in job.sequence.scored[: len(each.scored)]]
        assert found == pytest.approx([token.logprob for token in each.scored], abs=1e-4)
    for piece in pieces:
        if piece.is_first and window is None:
            is_scored = len(piece.scored) > len(prompts[piece.choice].ids)
            assert is_scored == (piece.choice % 2 == 0)
    assert max(len(prompt.ids) + prompt.new_tokens for prompt in prompts) <= POSITIONS or window


def one_device() -> Any:
    from mindformers_gpt2.device import select_device

    return select_device("cpu")
