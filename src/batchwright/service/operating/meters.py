"""What the service counts about itself, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Meters:
    """Counters of one app; each app has its own, so that tests do not add up."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "batchwright_requests_total",
            "Requests answered, by method, route and status.",
            ("method", "route", "status"),
            registry=self.registry,
        )
        self.seconds = Histogram(
            "batchwright_request_seconds",
            "Time to answer, by route.",
            ("route",),
            buckets=SECONDS,
            registry=self.registry,
        )
        self.in_progress = Gauge(
            "batchwright_requests_in_progress",
            "Requests being answered.",
            registry=self.registry,
        )
        self.records = Counter(
            "batchwright_records_total",
            "Records of runs in batches that were accepted.",
            registry=self.registry,
        )

    def text(self) -> bytes:
        """All of them, in Prometheus' text format."""
        return generate_latest(self.registry)
