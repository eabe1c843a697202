"""Counters and histograms in Prometheus' text format."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable

from common.serving.engine import Engine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
"""Upper bounds, in seconds, of the buckets of a histogram."""


class Histogram:
    """Durations of events, counted in buckets."""

    def __init__(self, name: str, help: str) -> None:
        self._name, self._help = name, help
        self._counts = [0] * (len(_BOUNDS) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(_BOUNDS, seconds)] += 1
        self._sum += seconds

    def lines(self) -> Iterable[str]:
        yield f"# HELP {self._name} {self._help}"
        yield f"# TYPE {self._name} histogram"
        total = 0
        for bound, count in zip((*_BOUNDS, float("inf")), self._counts, strict=True):
            total += count
            label = "+Inf" if bound == float("inf") else f"{bound:g}"
            yield f'{self._name}_bucket{{le="{label}"}} {total}'
        yield f"{self._name}_sum {self._sum:.6f}"
        yield f"{self._name}_count {total}"


class Metrics:
    """Counts of the server, in addition to those of its engine."""

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        self.generated_tokens = 0
        self.request_seconds = Histogram(
            "gpt2_request_seconds", "From the head of a completion's request to its last byte."
        )
        self.first_token_seconds = Histogram(
            "gpt2_first_token_seconds", "From the queueing of a sequence to its first token."
        )
        self.token_seconds = Histogram("gpt2_token_seconds", "Between two tokens of a sequence.")

    def text(self, engine: Engine, slots: int) -> str:
        """Return the page of /metrics."""
        counts = engine.counts
        figures: list[tuple[str, str, str, float]] = [
            ("prompt_tokens_total", "counter", "Tokens of admitted prompts.", counts.prompt_tokens),
            (
                "reused_prompt_tokens_total",
                "counter",
                "Tokens of prompts whose keys were there already.",
                counts.reused_tokens,
            ),
            ("generated_tokens_total", "counter", "Tokens generated.", self.generated_tokens),
            ("sequences_total", "counter", "Sequences that got a slot.", counts.prompts),
            ("cancelled_sequences_total", "counter", "Sequences given up.", counts.cancelled),
            ("steps_total", "counter", "Steps of the model.", counts.steps),
            ("step_rows_total", "counter", "Sequences in all steps.", counts.rows),
            ("slots", "gauge", "Sequences that can be at work at once.", slots),
            ("running_sequences", "gauge", "Sequences at work.", engine.running),
            ("waiting_sequences", "gauge", "Sequences in the queue.", engine.waiting),
        ]
        lines = [
            "# HELP gpt2_requests_total Requests by status.",
            "# TYPE gpt2_requests_total counter",
            *(
                f'gpt2_requests_total{{status="{status}"}} {count}'
                for status, count in sorted(self.statuses.items())
            ),
        ]
        for name, kind, help, value in figures:
            lines += [f"# HELP gpt2_{name} {help}", f"# TYPE gpt2_{name} {kind}"]
            lines.append(f"gpt2_{name} {value}")
        for each in (self.request_seconds, self.first_token_seconds, self.token_seconds):
            lines += each.lines()
        return "\n".join(lines) + "\n"
