"""The objectives of a goal: which candidate each one chooses, what is level with it, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from batchwright.planning.candidates.knees import KneeFit
from batchwright.planning.candidates.objectives.accuracy import AccurateSoon, MostAccurate, ToTarget
from batchwright.planning.candidates.objectives.knee import AtTheKnee, WorthItsTime
from batchwright.planning.candidates.objectives.objective import LeastCost, Objective
from batchwright.planning.candidates.progress import Progress
from batchwright.planning.candidates.table import Table


def _auto(table: Table, knees: Sequence[KneeFit], progress: Progress) -> Objective:
    kind = AccurateSoon if progress.tells_accuracy else WorthItsTime
    return kind(table, knees, progress)


def _to_target(table: Table, knees: Sequence[KneeFit], progress: Progress) -> Objective:
    """The objective of trainings to an accuracy.

    Where accuracy rests on other tasks alone, a batch is chosen by accuracy, as without a target.
    The least time over the chance of success would suppose tries that are independent, but all have
    the level of the task in common, which is what is not known.
    """
    if progress.chooses and progress.assumed:
        return _auto(table, knees, progress)
    return ToTarget(table, knees, progress)


OBJECTIVES: dict[str, Callable[[Table, Sequence[KneeFit], Progress], Objective]] = {
    "auto": _auto,
    "accuracy": MostAccurate,
    "cost": LeastCost,
    "knee": AtTheKnee,
    "target-accuracy": _to_target,
    "time": Objective,
}
