"""Advice to runs: new plans, numbered from 1 within a run."""

from __future__ import annotations

from typing import Any

from sqlalchemy import RowMapping, insert, select, update

from batchwright.algorithms.splicing import spliced
from batchwright.records import Plan
from batchwright.records.service import Advice
from batchwright.service.database.tables import NOT_DELETED, advice, runs
from batchwright.service.problems import NotFound
from batchwright.service.store.part import Part, missing


class AdviceStore(Part):
    """The table of advice."""

    def offer(self, run: str, epoch: int, reason: str, plan: Plan) -> Advice:
        """Store advice as the run's newest; its reporter learns the number with its next answer.

        Args:
            run: Identifier of the run.
            epoch: First epoch that the new plan is for, zero-based.
            reason: Measured against predicted, and what would change.
            plan: The new plan, of the whole run.
        """
        with self._database.writing() as connection:
            newest = connection.execute(
                select(runs.c.advice).where(runs.c.id == run, NOT_DELETED).with_for_update()
            ).scalar()
            if newest is None:
                raise missing("run", run)
            offered = Advice(number=newest + 1, epoch=epoch, reason=reason, plan=plan)
            values = offered.model_dump(exclude={"plan"}) | {"plan": plan.model_dump_json()}
            connection.execute(insert(advice).values(run_id=run, created=self._clock(), **values))
            connection.execute(update(runs).where(runs.c.id == run).values(advice=offered.number))
        return offered

    def list(self, run: str) -> list[Advice]:
        """All advice to a run, the oldest first."""
        with self._database.reading() as connection:
            wanted = select(runs.c.id).where(runs.c.id == run, NOT_DELETED)
            if connection.execute(wanted).first() is None:
                raise missing("run", run)
            rows = connection.execute(
                select(advice).where(advice.c.run_id == run).order_by(advice.c.number)
            ).mappings()
            return [_advice_of(row) for row in rows]

    def numbers(self, run: str) -> tuple[tuple[int, int | None], ...]:
        """Number of each advice and the zero-based epoch from which it is followed, if it is."""
        wanted = select(advice.c.number, advice.c.taken).where(advice.c.run_id == run)
        return tuple((row.number, row.taken) for row in self._read(wanted.order_by("number")))

    def taken(self, run: str, number: int, epoch: int) -> Advice:
        """Store that a run follows advice; once more changes nothing.

        Args:
            run: Identifier of the run.
            number: Number of the advice.
            epoch: First epoch that is trained by the new plan, zero-based. It may be later than
                `Advice.epoch`: the run's plan is then the former one up to there.

        Raises:
            NotFound: There is no such run or advice.
            PlanError: The run has no such epoch.
        """
        with self._database.writing() as connection:
            followed = connection.execute(
                select(runs.c.plan).where(runs.c.id == run, NOT_DELETED).with_for_update()
            ).scalar()
            which = (advice.c.run_id == run, advice.c.number == number)
            row = (
                connection.execute(
                    update(advice).where(*which).values(taken=epoch).returning(advice)
                )
                .mappings()
                .one_or_none()
            )
            if row is None or followed is None:
                raise NotFound(f"there is no advice {number} to run {run[:36]}")
            taken = _advice_of(row)
            plan = spliced(Plan.model_validate_json(followed), taken.plan, epoch)
            connection.execute(
                update(runs).where(runs.c.id == run).values(plan=plan.model_dump_json())
            )
        return taken


def _advice_of(row: RowMapping) -> Advice:
    values: dict[str, Any] = {name: row[name] for name in Advice.model_fields if name != "plan"}
    return Advice(plan=Plan.model_validate_json(row["plan"]), **values)
