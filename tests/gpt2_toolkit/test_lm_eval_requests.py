"""Requests of the harness before a model sees them, without the harness. Long inputs
lose their beginning, a continuation keeps its place, settings that are not known are refused.
``test_lm_eval.py`` has the harness itself.
"""

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from common.errors import ConfigError


class Recorder:
    """A model of 8 positions whose words are numbers; it keeps what it is asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.tokenizer = SimpleNamespace(eod_id=0)

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def score_ids(self, rows: list[list[int]], starts: list[int]) -> list[Any]:
        self.asked += zip(rows, starts, strict=True)
        return [SimpleNamespace(logprob=-float(sum(row)), is_greedy=True) for row in rows]

    def generate(self, prompts: list[list[int]], **settings: Any) -> list[Any]:
        self.asked.append((prompts, settings))
        return [SimpleNamespace(text=f"{prompt[-1]}.{prompt[0]}") for prompt in prompts]


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The adapter around a Recorder; names of the harness that it imports are stand-ins."""
    if "lm_eval" not in sys.modules:
        names: dict[str, dict[str, Any]] = {
            "lm_eval": {},
            "lm_eval.api": {},
            "lm_eval.api.model": {"TemplateLM": object},
            "lm_eval.api.registry": {"register_model": lambda name: lambda kind: kind},
            "lm_eval.models": {},
            "lm_eval.models.utils": {
                "handle_stop_sequences": lambda until, eos: until,
                "normalize_gen_kwargs": lambda given, count: {
                    "until": [], "max_gen_toks": count, "do_sample": False, **given
                },
                "postprocess_generated_text": lambda text, stops, end: text.partition(stops[0])[0],
            },
            "lm_eval.utils": {"get_rolling_token_windows": None, "make_disjoint_window": None},
        }  # fmt: skip
        for name, members in names.items():
            module = ModuleType(name)
            module.__dict__.update(members)
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.delitem(sys.modules, "gpt2_toolkit.lm_eval", raising=False)
    kind = importlib.import_module("gpt2_toolkit.lm_eval").HarnessModel
    monkeypatch.delitem(sys.modules, "gpt2_toolkit.lm_eval")
    found = kind.__new__(kind)
    found.model, found.max_length, found.max_gen_toks = Recorder(), 8, 3
    found.cache_hook = SimpleNamespace(add_partial=lambda *_: None)
    return found


def test_long_inputs_lose_their_beginning(adapter: Any) -> None:
    pairs = [([1, 2], [3]), (list(range(1, 12)), [12, 13]), ([1], list(range(2, 10)))]
    found = adapter._loglikelihood_tokens([(("a", "b"), *pair) for pair in pairs])
    # 8 inputs, and the last target, which is not an input
    assert adapter.model.asked == [
        ([1, 2, 3], 2), ([5, 6, 7, 8, 9, 10, 11, 12, 13], 7), ([1, 2, 3, 4, 5, 6, 7, 8, 9], 1)
    ]  # fmt: skip
    assert [value for value, _ in found] == [-6.0, -81.0, -45.0]
    with pytest.raises(ConfigError, match="a continuation of 9 tokens, and the model sees 8"):
        adapter._loglikelihood_tokens([(("a", "b"), [1], [2] * 9)])


def test_prompts_leave_room_for_what_follows(adapter: Any) -> None:
    greedy, drawn = {"until": ["."]}, {"until": ["."], "do_sample": True, "temperature": 0.5}
    asked = [("1 2", greedy), ("9 9", drawn), ("1 2 3 4 5 6 7", greedy), ("", greedy)]
    found = adapter.generate_until([SimpleNamespace(args=each) for each in asked])
    assert adapter.model.asked == [
        ([[1, 2], [3, 4, 5, 6, 7], [0]], {"max_new_tokens": 3}),
        ([[9, 9]], {"max_new_tokens": 3, "strategy": "sampling", "temperature": 0.5}),
    ]
    assert found == ["2", "9", "7", "0"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"max_gen_toks": 8}, "max_gen_toks=8 leaves no place"), ({"min_p": 1}, "min_p: not known")],
)
def test_wishes_that_cannot_be_met(adapter: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        adapter.generate_until([SimpleNamespace(args=("1", settings))])
