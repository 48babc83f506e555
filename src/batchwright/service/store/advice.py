"""Advice to runs: new plans, numbered from 1 within a run."""

from __future__ import annotations

from sqlalchemy import Row, insert, select, update

from batchwright.algorithms.splicing import spliced
from batchwright.records import Plan
from batchwright.records.service import Advice
from batchwright.service.database.engine import Database
from batchwright.service.database.tables import THERE, advice, runs
from batchwright.service.problems import NotFound
from batchwright.service.settings import Settings
from batchwright.service.store.clock import Clock


class AdviceStore:
    """The table of advice."""

    def __init__(self, database: Database, _settings: Settings, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def offer(self, run: str, epoch: int, reason: str, plan: Plan) -> Advice:
        """Store advice as the run's newest; its reporter learns of it with its next message.

        Raises:
            NotFound: There is no such run.
        """
        with self._database.writing() as connection:
            newest = connection.execute(
                select(runs.c.advice).where(runs.c.id == run, THERE).with_for_update()
            ).scalar()
            if newest is None:
                raise NotFound(f"there is no run {run}")
            given = Advice(number=newest + 1, epoch=epoch, reason=reason, plan=plan)
            connection.execute(
                insert(advice).values(
                    run_id=run,
                    number=given.number,
                    created=self._clock(),
                    epoch=epoch,
                    reason=reason,
                    plan=plan.model_dump_json(),
                )
            )
            connection.execute(update(runs).where(runs.c.id == run).values(advice=given.number))
        return given

    def list(self, run: str) -> list[Advice]:
        """All advice to a run, the oldest first.

        Raises:
            NotFound: There is no such run.
        """
        with self._database.reading() as connection:
            wanted = select(runs.c.id).where(runs.c.id == run, THERE)
            if connection.execute(wanted).first() is None:
                raise NotFound(f"there is no run {run}")
            rows = connection.execute(
                select(advice).where(advice.c.run_id == run).order_by(advice.c.number)
            ).all()
        return [_advice_of(row) for row in rows]

    def numbers(self, run: str) -> tuple[tuple[int, int | None], ...]:
        """Number of each advice and the epoch from which it is followed, without the plans."""
        with self._database.reading() as connection:
            rows = connection.execute(
                select(advice.c.number, advice.c.taken)
                .where(advice.c.run_id == run)
                .order_by(advice.c.number)
            ).all()
        return tuple((row.number, row.taken) for row in rows)

    def taken(self, run: str, number: int, epoch: int) -> Advice:
        """Note that a run follows advice from ``epoch`` on; telling it again changes nothing.

        That may be later than it was meant: the run's plan is then the old one up to there.

        Raises:
            NotFound: There is no such run or advice.
            PlanError: The run has no such epoch.
        """
        with self._database.writing() as connection:
            followed = connection.execute(
                select(runs.c.plan).where(runs.c.id == run, THERE).with_for_update()
            ).scalar()
            row = connection.execute(
                update(advice)
                .where(advice.c.run_id == run, advice.c.number == number)
                .values(taken=epoch)
                .returning(advice)
            ).one_or_none()
            if row is None or followed is None:
                raise NotFound(f"there is no advice {number} to run {run[:36]}")
            taken = _advice_of(row)
            plan = spliced(Plan.model_validate_json(followed), taken.plan, epoch)
            connection.execute(
                update(runs).where(runs.c.id == run).values(plan=plan.model_dump_json())
            )
        return taken


def _advice_of(row: Row[tuple[object, ...]]) -> Advice:
    values = row._mapping
    return Advice(
        number=values["number"],
        epoch=values["epoch"],
        reason=values["reason"],
        plan=Plan.model_validate_json(values["plan"]),
        taken=values["taken"],
    )
