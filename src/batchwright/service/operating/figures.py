"""Metrics of queue, agents, artifacts and database for `/metrics`, by a few quick queries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import Connection, func, select, text
from sqlalchemy.exc import SQLAlchemyError

from batchwright.service.database.tables import agents, artifacts, jobs
from batchwright.service.store import Store
from batchwright.service.store.agents import heard_lately
from batchwright.service.store.artifacts import GONE
from batchwright.service.store.job_rows import FREE, HELD
from batchwright.service.store.part import count


class StoreFigures(Collector):
    """Metrics of what is stored.

    Args:
        store: The store.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def describe(self) -> list[Metric]:
        """No metrics: otherwise the registry would collect them when the service starts."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The metrics; where the database does not answer, only that."""
        metrics: list[Metric] = []
        with suppress(SQLAlchemyError), self._store.database.reading() as connection:
            metrics = [*self._queue(connection), *self._sizes(connection)]
        yield _gauge("batchwright_database_up", "Whether the database answers.", bool(metrics))
        yield from metrics

    def _queue(self, connection: Connection) -> Iterator[Metric]:
        """Jobs, and the agents that carry them out."""
        by_state = GaugeMetricFamily(
            "batchwright_jobs", "Jobs that are stored, by state.", labels=("state",)
        )
        for state, number in connection.execute(
            select(jobs.c.state, func.count()).group_by(jobs.c.state)
        ):
            by_state.add_metric([state], number)
        yield by_state
        oldest = connection.execute(select(func.min(jobs.c.changed)).where(FREE)).scalar()
        yield _gauge(
            "batchwright_oldest_waiting_job_seconds",
            "How long the job has waited that has waited longest for an agent.",
            0.0 if oldest is None else max(0.0, self._store.clock() - oldest),
        )
        lost = CounterMetricFamily(
            "batchwright_leases_lost",
            "Leases taken from agents since this process began, most for silence.",
        )
        lost.add_metric([], self._store.jobs.leases_lost)
        yield lost
        there = heard_lately(self._store.clock(), self._store.settings.lease_seconds)
        busy = select(func.count(jobs.c.agent.distinct())).where(HELD)
        yield _gauge(
            "batchwright_agents", "Agents that are there.", count(connection, agents, there)
        )
        yield _gauge("batchwright_agents_busy", "Agents that have a job.", connection.scalar(busy))

    def _sizes(self, connection: Connection) -> Iterator[Metric]:
        sizes = select(func.coalesce(func.sum(artifacts.c.size), 0))
        yield _gauge(
            "batchwright_artifact_bytes",
            "Artifacts of jobs, those on their way too.",
            connection.scalar(sizes.where(artifacts.c.state != GONE)),
        )
        size = "pg_database_size(current_database())"
        if self._store.database.is_sqlite:
            size = "page_count * page_size FROM pragma_page_count(), pragma_page_size()"
        yield _gauge(
            "batchwright_database_bytes",
            "Size of the database.",
            connection.scalar(text(f"SELECT {size}")),
        )


def _gauge(name: str, about: str, value: float | None) -> Metric:
    return GaugeMetricFamily(name, about, value=float(value or 0))
