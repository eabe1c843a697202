"""Counters and histograms for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.serving.engine import Engine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
"""Upper bounds, in seconds, of the buckets of a histogram."""


class Metrics(Collector):
    """Counts of the server and of its engine."""

    def __init__(self, engine: Engine, slots: int) -> None:
        self._engine, self._slots = engine, slots
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = own = CollectorRegistry()
        self.requests = Counter("gpt2_requests", "Requests by status.", ["status"], registry=own)
        self.generated_tokens = Counter("gpt2_generated_tokens", "Tokens generated.", registry=own)
        own.register(self)

        def histogram(name: str, help: str) -> Histogram:
            return Histogram(f"gpt2_{name}_seconds", help, registry=own, buckets=_BOUNDS)

        self.request_seconds = histogram("request", "From the head of a completion's request to its last byte.")
        self.first_token_seconds = histogram("first_token", "From the queueing of a sequence to its first token.")
        self.token_seconds = histogram("token", "Between two tokens of a sequence.")

    def collect(self) -> Iterable[Metric]:
        """Yield the figures of the engine as they are now."""
        engine = self._engine
        for name, help in (
            ("prompt_tokens", "Tokens of admitted prompts."),
            ("reused_prompt_tokens", "Tokens of prompts whose keys were there already."),
            ("sequences", "Sequences that got a slot."),
            ("cancelled_sequences", "Sequences given up."),
            ("steps", "Steps of the model."),
            ("step_rows", "Sequences in all steps."),
        ):
            yield CounterMetricFamily(f"gpt2_{name}", help, engine.counts[name])
        yield GaugeMetricFamily("gpt2_slots", "Sequences that can be at work at once.", self._slots)
        yield GaugeMetricFamily("gpt2_running_sequences", "Sequences at work.", engine.running)
        yield GaugeMetricFamily("gpt2_waiting_sequences", "Sequences in the queue.", engine.waiting)

    def text(self) -> bytes:
        """Return the page of /metrics."""
        return generate_latest(self._registry)
