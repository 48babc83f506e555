"""What `/metrics` says of queue, agents and database: read when it is asked for, in a few quick
queries.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import Connection, func, select, text
from sqlalchemy.exc import SQLAlchemyError

from batchwright.service.database.tables import agents, artifacts, jobs
from batchwright.service.store import Store
from batchwright.service.store.artifacts import GONE
from batchwright.service.store.job_rows import FREE


class StoreFigures(Collector):
    """Figures of what is stored.

    Args:
        store: Where it is stored.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def describe(self) -> list[Metric]:
        """Nothing: else the registry would read them when the service starts."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The figures, as they are now; of a database that does not answer, only that."""
        up = GaugeMetricFamily("batchwright_database_up", "Whether the database answers.")
        found: list[Metric] = []
        try:
            with self._store.database.reading() as connection:
                found = [*self._queue(connection), *self._agents(connection)]
                found += self._kept(connection)
        except SQLAlchemyError:
            found = []
        up.add_metric([], float(bool(found)))
        yield up
        yield from found

    def _queue(self, connection: Connection) -> Iterator[Metric]:
        by_state = GaugeMetricFamily(
            "batchwright_jobs", "Jobs that are stored, by state.", labels=("state",)
        )
        counted = select(jobs.c.state, func.count()).group_by(jobs.c.state)
        for state, count in connection.execute(counted):
            by_state.add_metric([state], count)
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

    def _agents(self, connection: Connection) -> Iterator[Metric]:
        since = self._store.clock() - self._store.settings.lease_seconds
        seen = select(func.count()).select_from(agents).where(agents.c.seen > since)
        busy = select(func.count(jobs.c.agent.distinct())).where(jobs.c.lease_expires.is_not(None))
        yield _gauge("batchwright_agents", "Agents that are there.", connection.scalar(seen))
        yield _gauge("batchwright_agents_busy", "Agents that have a job.", connection.scalar(busy))

    def _kept(self, connection: Connection) -> Iterator[Metric]:
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
