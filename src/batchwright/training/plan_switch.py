"""Follows a service's advice: the plan of the run folder changes at the end of an epoch.

    reporter --advice.json--> rank 0 --plan.json--> the launcher, which resumes the run

The plan before is kept as ``plan-N.json`` and the advice as ``advice-N.json``, N being its number.
Replacing ``plan.json`` is what counts: a process that is killed before or after it leaves a run
folder that can be resumed; advice that is followed by then is put aside after the next epoch.
"""

from __future__ import annotations

from pathlib import Path

from batchwright.algorithms.splicing import spliced, why_not
from batchwright.errors import FileError, PlanError, one_line
from batchwright.records import Plan
from batchwright.records.documents import read_record, write_record
from batchwright.records.service import KeptAdvice
from batchwright.training.recorder import Recorder

ADVICE = "advice.json"


class PlanSwitch:
    """Looks for advice, and replaces the run folder's plan where it is taken; on worker 0 alone.

    Args:
        folder: The run folder; ``None`` takes no advice.
        plan: The plan that is followed.
        recorder: Notes what was taken, and what was not and why.
    """

    def __init__(self, folder: Path | None, plan: Plan, recorder: Recorder) -> None:
        self._folder, self._plan, self._recorder = folder, plan, recorder
        self._chosen: tuple[KeptAdvice, Plan] | None = None  # advice to take, and its plan

    def wanted(self, epoch: int) -> bool:
        """Whether another plan is to be followed from a zero-based epoch on.

        Advice for a later epoch waits; advice that cannot be followed is put aside, with a note.
        """
        self._chosen = None
        if epoch >= self._plan.epochs:
            return False
        advice = self._found()
        if advice is None or advice.epoch > epoch:
            return False
        try:
            plan = spliced(self._plan, advice.plan, epoch)
            if problem := why_not(plan, self._plan, epoch):  # a resumed run would refuse it
                raise PlanError(problem)
        except PlanError as error:
            self._recorder.note(f"advice {advice.number} is not taken: {one_line(error)}")
            self._put_aside(advice)
            return False
        if _effects(plan) == _effects(self._plan):  # nothing to change
            self._put_aside(advice.model_copy(update={"taken": epoch}))
            return False
        self._chosen = advice.model_copy(update={"taken": epoch}), plan
        return True

    def take(self) -> None:
        """Replace the run folder's plan by the one that was `wanted`.

        Raises:
            FileError: It cannot be written.
        """
        assert self._folder is not None  # noqa: S101 - it was wanted
        assert self._chosen is not None  # noqa: S101
        advice, plan = self._chosen
        write_record(self._plan, self._folder / f"plan-{advice.number}.json")
        write_record(plan, self._folder / "plan.json")
        self._settle(advice)

    def _found(self) -> KeptAdvice | None:
        """Advice in the run folder, if any; an unreadable file is put aside, with a note."""
        path = self._folder / ADVICE if self._folder is not None else None
        if path is None or not path.exists():
            return None
        try:
            return read_record(path, KeptAdvice)
        except FileError as error:
            path.replace(path.with_name("advice-unreadable.json"))
            self._recorder.note(f"advice is not taken: {one_line(error)}")
            return None

    def _settle(self, advice: KeptAdvice) -> None:
        """Note that advice is followed, and put it aside."""
        first = (advice.taken or 0) + 1
        self._recorder.note(
            f"advice {advice.number} is taken from epoch {first} on: {advice.reason}"
        )
        self._put_aside(advice)

    def _put_aside(self, advice: KeptAdvice) -> None:
        assert self._folder is not None  # noqa: S101 - it came from there
        try:
            write_record(advice, self._folder / f"advice-{advice.number}.json")
            (self._folder / ADVICE).unlink(missing_ok=True)
        except OSError as error:
            raise FileError(f"cannot remove {self._folder / ADVICE}: {error.strerror}") from None


def _effects(plan: Plan) -> list[tuple[object, ...]]:
    """What training takes from the plan's rows, epoch by epoch."""
    return [
        (row.local_batch_sizes, row.micro_batch_size, row.learning_rate)
        for row in plan.stages
        for _ in range(row.epochs)
    ]
