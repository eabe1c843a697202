"""A model of lm-evaluation-harness: ``gpt2_toolkit``, whatever folder and backend it is of.

Importing this module registers the model; ``tools/lm_eval.py`` does so and hands over to the
harness. It needs the extra ``eval``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from common.errors import ConfigError
from common.inference.language_model import LanguageModel
from common.inference.load import load_model
from common.training.data import describe_tokenizer

Pair = tuple[list[int], list[int]]
"""Ids of a context and of what follows it."""

ROWS = 8
"""Sequences at once where the harness asks for ``auto``."""
_SAMPLING = ("temperature", "top_k", "top_p", "repetition_penalty")


@register_model("gpt2_toolkit")
class HarnessModel(TemplateLM):  # type: ignore[misc]  # the harness may not be installed
    def __init__(
        self,
        path: str,
        backend: str = "auto",
        batch_size: int | str = ROWS,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        device: str = "auto",
        **options: Any,
    ) -> None:
        """path, backend: as ``load_model`` takes them. options: dtype, tokenizer, threads, likewise. max_length: tokens
        that the model sees at once, at most and by default its positions. max_gen_toks: where a task does not say.
        device: too; cuda:0 is what the harness says where the user says nothing. Raises what ``load_model`` does.
        """
        super().__init__()
        rows = ROWS if str(batch_size).startswith("auto") else int(batch_size)
        options.pop("max_batch_size", None)
        if unknown := options.keys() - {"dtype", "tokenizer", "threads", "verify"}:
            raise ConfigError(
                f"--model_args {min(unknown)}: not known; expected path, backend, device, dtype,"
                " tokenizer, threads, max_length or max_gen_toks"
            )
        self.model: LanguageModel = load_model(
            path,
            backend=backend,  # type: ignore[arg-type]
            device="auto" if device == "cuda:0" else device,  # type: ignore[arg-type]
            batch_size=rows,
            **options,
        )
        positions = self.model.max_positions
        self.max_length = positions if max_length is None else max_length
        if not 1 <= self.max_length <= positions:
            raise ConfigError(
                f"--model_args max_length={max_length}: expected 1 to {positions}, the positions of {path}"
            )
        self.max_gen_toks = max_gen_toks

    @property
    def eot_token_id(self) -> int:
        return self.model.tokenizer.eod_id

    @property
    def tokenizer_name(self) -> str:
        return self.model.tokenizer.kind

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        return self.model.encode(string)

    def get_model_info(self) -> dict[str, Any]:
        """Record that the harness keeps beside its results: what was measured, and how."""
        source = self.model.source
        return {
            "gpt2_toolkit": {
                "checkpoint": str(source.path),
                "format": source.format,
                "backend": self.model.backend,
                "precision": self.model.config.precision.model_dump(mode="json"),
                "tokenizer": describe_tokenizer(self.model.tokenizer),
                "window": self.max_length,
                "protocol": "context and continuation are encoded together and split behind the"
                " context; an empty context is end-of-text; long inputs lose their beginning;"
                " rolling windows do not overlap, but the last one is moved back to full length",
            }
        }

    # ---- what the harness asks for ----

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **more: object
    ) -> list[tuple[float, bool]]:
        answers = self._scored([(context, rest) for _, context, rest in requests])
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        texts = [request.args[0] for request in requests]
        of = self.prefix_token_id, self.max_length, 1
        rolling = [get_rolling_token_windows(self.tok_encode(text), *of) for text in texts]
        windows = [list(map(make_disjoint_window, each)) for each in rolling]
        answers = iter(self._scored([pair for each in windows for pair in each]))
        sums = [sum(next(answers)[0] for _ in each) for each in windows]
        for text, answer in zip(texts, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), answer)
        return sums

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Requests of equal settings are continued together, ``batch_size`` at once."""
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            settings = json.dumps(request.args[1], sort_keys=True, default=str)
            groups.setdefault(settings, []).append(number)
        answers: dict[int, str] = {}
        for numbers in groups.values():
            given = [requests[number].args for number in numbers]
            for number, text in zip(numbers, self._continued(given), strict=True):
                answers[number] = text
                self.cache_hook.add_partial("generate_until", requests[number].args, text)
        return [answers[number] for number in range(len(requests))]

    # ---- how it is answered ----

    def _scored(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """Sum of the log-probabilities of each continuation, and whether greedy generation gives
        it. Raises ConfigError for one that is longer than the window.
        """
        rows, starts = [], []
        for context, rest in pairs:
            if len(rest) > self.max_length:
                raise ConfigError(
                    f"a continuation of {len(rest)} tokens, and the model sees {self.max_length};"
                    " use a task with shorter ones"
                )
            rows.append((context + rest)[-(self.max_length + 1) :])
            starts.append(len(rows[-1]) - len(rest))
        scores = self.model.score_ids(rows, starts) if rows else []
        return [(score.logprob, score.is_greedy) for score in scores]

    def _continued(self, given: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterable[str]:
        """Continuations of contexts that have the same settings, cut at their stop strings."""
        wishes = dict(normalize_gen_kwargs(dict(given[0][1]), self.max_gen_toks))
        stops = handle_stop_sequences(wishes.pop("until"), None)
        count = wishes.pop("max_gen_toks")
        room = self.max_length - count
        if room < 1:
            raise ConfigError(
                f"max_gen_toks={count} leaves no place for a prompt in the {self.max_length}"
                f" positions of the model; give --gen_kwargs max_gen_toks={self.max_length // 2}"
            )
        prompts = [(self.tok_encode(text) or [self.eot_token_id])[-room:] for text, _ in given]
        found = self.model.generate(prompts, max_new_tokens=count, **_strategy(wishes))
        return [postprocess_generated_text(each.text, stops, None) for each in found]


def _strategy(wishes: dict[str, Any]) -> dict[str, Any]:
    """The section predict for what is left of a task's generation_kwargs. Raises ConfigError for a
    wish that it has no key for.
    """
    sampling, beams = wishes.pop("do_sample"), wishes.pop("num_beams", 1)
    numbers = {name: wishes.pop(name) for name in _SAMPLING if name in wishes}
    if wishes:
        raise ConfigError(
            f"generation_kwargs {min(wishes)}: not known; expected until, max_gen_toks, do_sample,"
            f" num_beams, {', '.join(_SAMPLING)}"
        )
    if sampling:
        return {"strategy": "sampling", **numbers}
    penalty = {name: value for name, value in numbers.items() if name == "repetition_penalty"}
    return {"strategy": "beam_search", "num_beams": beams, **penalty} if beams > 1 else penalty
