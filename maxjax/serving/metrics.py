"""What ``/metrics`` tells Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
# Numbers of EngineStats: those that only grow, and the others.
_COUNTERS = {
    "read_tokens": "prompt tokens that were read",
    "found_tokens": "prompt tokens that were found in the cache",
    "written_tokens": "tokens of answers",
    "steps": "decode steps",
}
_GAUGES = {
    "waiting": "answers that wait in the engine",
    "running": "answers that have a slot",
    "pages": "pages of the cache",
    "free_pages": "pages that no answer uses",
    "window_pages": "pages of layers with a sliding window",
    "free_window_pages": "pages of layers with a sliding window that no answer uses",
}


class Metrics:
    """Counts requests, and reports what the engine counts.

    Args:
        engine: returns the engine; None while there is none.

    Attributes:
        requests: answered requests, by route and status.
        first, whole: seconds until the first piece of an answer, and until its end.
    """

    def __init__(self, engine: Callable[[], Any]):
        self._engine, self._registry = engine, CollectorRegistry()
        of: dict[str, Any] = {"registry": self._registry}
        self.requests = Counter(
            "maxjax_requests", "requests that were answered", ("route", "status"), **of
        )
        self.first = Histogram(
            "maxjax_time_to_first_token_seconds", "seconds from a request to its first text", buckets=_SECONDS, **of
        )  # fmt: skip
        self.whole = Histogram(
            "maxjax_request_seconds", "seconds from a request to its end", buckets=_SECONDS, **of
        )
        self._registry.register(self)

    def collect(self) -> Iterator[Any]:
        """The numbers of the engine, as Prometheus's client asks for them."""
        engine = self._engine()
        if engine is None:
            return
        stats = engine.stats()
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"maxjax_{name}", text, value=getattr(stats, name))
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"maxjax_{name}", text, value=getattr(stats, name))

    def describe(self) -> list[Any]:
        """Nothing: what is collected is not known before there is an engine."""
        return []

    def text(self) -> bytes:
        """All numbers, in Prometheus's text format."""
        return generate_latest(self._registry)
