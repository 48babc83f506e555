"""Takes a service's advice: the plan of the run folder changes at the end of an epoch.

    reporter --advice.json--> rank 0 --plan.json--> the launcher, which resumes the run

What was followed before is kept as ``plan-N.json`` and the advice as ``advice-N.json``, N being its
number. Replacing ``plan.json`` is what counts: a process that is killed before or after it leaves a
run folder that can be resumed, and what it had yet to tell of a plan that it took is told then.
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


class Advised:
    """Looks for advice, and writes the plan that comes of it; on rank 0 alone.

    Args:
        folder: The run folder; ``None`` takes no advice.
        plan: What is followed.
        recorder: Told of what was taken, and of what was not and why.
        least: Fewest samples that a worker can train on.
    """

    def __init__(self, folder: Path | None, plan: Plan, recorder: Recorder, least: int) -> None:
        self._folder, self._plan, self._recorder, self._least = folder, plan, recorder, least
        self._advice: KeptAdvice | None = None
        self._next: Plan | None = None

    def finish(self) -> None:
        """What is left of taking advice, if a process was killed once it had replaced the plan.

        Raises:
            FileError: It cannot be written.
        """
        advice = self._found()
        epoch = self._followed_from(advice) if advice is not None else None
        if advice is not None and epoch is not None:
            self._settle(advice.model_copy(update={"taken": epoch}))

    def wanted(self, epoch: int) -> bool:
        """Whether another plan is to be followed from a zero-based epoch on.

        Advice for a later epoch waits; what cannot be followed is put aside, with a note.
        """
        self._advice = self._next = None
        if epoch >= self._plan.epochs:
            return False
        advice = self._found()
        if advice is None or advice.epoch > epoch:
            return False
        try:
            plan = spliced(self._plan, advice.plan, epoch)
            self._refuse(plan, epoch)
        except PlanError as error:
            self._recorder.note(f"advice {advice.number} is not taken: {one_line(error)}")
            self._put_aside(advice)
            return False
        if _effects(plan) == _effects(self._plan):  # nothing to change
            self._put_aside(advice.model_copy(update={"taken": epoch}))
            return False
        self._advice, self._next = advice.model_copy(update={"taken": epoch}), plan
        return True

    def take(self) -> None:
        """Make what was `wanted` the run folder's plan.

        Raises:
            FileError: It cannot be written.
        """
        assert self._folder is not None  # noqa: S101 - it was wanted
        assert self._advice is not None  # noqa: S101
        assert self._next is not None  # noqa: S101
        write_record(self._plan, self._folder / f"plan-{self._advice.number}.json")
        write_record(self._next, self._folder / "plan.json")
        self._settle(self._advice)

    def _found(self) -> KeptAdvice | None:
        """Advice in the run folder; what cannot be read is put aside, with a note."""
        path = self._folder / ADVICE if self._folder is not None else None
        if path is None or not path.exists():
            return None
        try:
            return read_record(path, KeptAdvice)
        except FileError as error:
            path.replace(path.with_name("advice-unreadable.json"))
            self._recorder.note(f"advice is not taken: {one_line(error)}")
            return None

    def _followed_from(self, advice: KeptAdvice) -> int | None:
        """The epoch from which the plan is what came of the advice; ``None`` if it is not.

        The first in which it differs from the plan before, provided that the advice brings just
        this about: the plan before may be one that was kept for something else.
        """
        assert self._folder is not None  # noqa: S101 - the advice came from there
        path, now = self._folder / f"plan-{advice.number}.json", _effects(self._plan)
        if not path.exists():
            return None
        try:
            before = read_record(path, Plan)
            pairs = enumerate(zip(_effects(before), now, strict=False))
            epoch = next((number for number, (old, new) in pairs if old != new), None)
            if epoch is None or _effects(spliced(before, advice.plan, epoch)) != now:
                return None
        except (FileError, PlanError):
            return None
        return epoch

    def _settle(self, advice: KeptAdvice) -> None:
        """Tell that the plan which came of advice is followed."""
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

    def _refuse(self, plan: Plan, epoch: int) -> None:
        """What a run would refuse once it had been started again with it."""
        problem = why_not(plan, self._plan, epoch)
        if problem:
            raise PlanError(problem)
        samples = plan.data.train_samples
        for stage in plan.stages:
            if stage.global_batch_size > samples:
                raise PlanError(
                    f"the global batch of {stage.global_batch_size} is larger than the {samples} "
                    "training samples"
                )
            if min(stage.local_batch_sizes) < self._least:
                raise PlanError(
                    f"a local batch of {min(stage.local_batch_sizes)} is too small: the network "
                    f"needs {self._least} samples"
                )


def _effects(plan: Plan) -> list[tuple[object, ...]]:
    """What of the rows training goes by, epoch by epoch."""
    return [
        (row.local_batch_sizes, row.micro_batch_size, row.learning_rate)
        for row in plan.stages
        for _ in range(row.epochs)
    ]
