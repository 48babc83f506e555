r"""Several kinds of workers that measure together, distinguished by their computing times.

In a visit all workers take steps with equal batches, and wait for each other in the exchange.
Worker :math:`i` computes for :math:`c_i` seconds and waits for :math:`w_i` seconds; the wait of the
slowest worker is the exchange alone. So a step of a kind would take :math:`c_i + \min_j w_j` if no
other worker were slower. The measurements hold for the number of workers that took part.

A kind's computing time is expressed as its ratio :math:`r` to the mean of all workers in the same
visit. Single visits scatter, and curves through them may cross. So the kind's ratios at the points
are shrunk towards its ratio over all points, and that towards 1, as far as visits scatter (the
estimator of James and Stein, 1961; Morris, J. Am. Stat. Assoc. 78, 1983).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log, sqrt
from statistics import fmean, median, stdev, variance

from batchwright.prediction.contradictions import key_of
from batchwright.prediction.fit import student_t_975
from batchwright.probing.commands import Point
from batchwright.probing.measure.step_time import WorkerMeans
from batchwright.records import KindTimes, StepTime

CLEARLY = 1.25
"""Ratio of computing times from which hosts of one name are two kinds: in three of four visits with
larger batches, and beyond the scatter of equal hosts (`_clearly_slower`)."""

_MINIMUM_VISITS = 2  # of all workers, to distinguish kinds


@dataclass(frozen=True)
class Place:
    """Host and device of a worker.

    Attributes:
        host: Name of the host.
        gpu: Identity of its GPU; empty: none.
        kind: The kind that its host states, or else its device's name.
        device_name: Model of the device.
        memory_bytes: Bytes that the worker may use.
    """

    host: str
    gpu: str
    kind: str
    device_name: str
    memory_bytes: int

    def with_kind(self, named: str) -> Place:
        """This place, with the kind that a job names, if any, where its host states none."""
        return replace(self, kind=named) if named and self.kind == self.device_name else self

    def kind_in_plan(self, kinds: Sequence[str], named: str) -> str:
        """This worker's kind in a plan.

        Args:
            kinds: The plan's kinds. Hosts of one kind may be separate kinds there, as `kinds_of`
                names them.
            named: The kind that the plan's job names; empty: none.
        """
        for name in kinds:
            base, _, hosts = name.removesuffix(")").rpartition(" (")
            if base == self.kind and self.host in hosts.split(", "):
                return name
        return self.kind if self.kind in kinds else self.with_kind(named).kind


def common_kind(places: Sequence[Place], named: str) -> str:
    """The kind that all hosts state, or else the one that the job names; empty: by the device."""
    stated = {"" if one.kind == one.device_name else one.kind for one in places}
    return stated.pop() if len(stated) == 1 else named


def kinds_of(
    places: Sequence[Place],
    steps: Sequence[StepTime],
    visits: Mapping[Point, Sequence[WorkerMeans]],
    *,
    named: str = "",
) -> tuple[KindTimes, ...]:
    """Step times of each kind, in the order of their first workers; empty for a single kind.

    Args:
        places: The place of each worker, in rank order.
        steps: Step times measured together, at the pace of the slowest worker.
        visits: By point, the mean seconds of each worker at each visit.
        named: Kind that the job names; its hosts are of one kind, however fast they are.
    """
    rising = sorted(visits, key=lambda point: point.local_batch_size)
    whole = [one for point in rising for one in visits[point] if len(one) == len(places)]
    if len(whole) < _MINIMUM_VISITS:
        return ()
    # Larger batches alone: in small ones the overhead around computing counts too much.
    whole = whole[len(whole) // 2 :] if len(whole) >= 2 * _MINIMUM_VISITS else whole
    groups = _groups(places, whole, named)
    if len(groups) < 2:
        return ()
    found = []
    for name, ranks in sorted(groups.items(), key=lambda one: one[1][0]):
        ratios = _LogRatios(whole, visits, ranks)
        own = []
        for step in steps:
            point = Point(*key_of(step))
            if step.workers == len(places) and visits.get(point):
                own.append(_step_of_kind(step, ratios, visits[point], point))
        found.append(
            KindTimes(
                kind=name,
                workers=len(ranks),
                device_name=places[ranks[0]].device_name,
                memory_bytes=min(places[rank].memory_bytes for rank in ranks),
                pace=exp(ratios.overall),
                steps=tuple(own),
            )
        )
    return tuple(found)


class _LogRatios:
    """Logarithms of a kind's computing time over the mean computing time of all workers.

    Args:
        whole: Visits of all workers that determine the overall ratio.
        visits: By point, all visits.
        ranks: Ranks of the kind's workers.

    Attributes:
        overall: Logarithm of the ratio over all points.
    """

    def __init__(
        self,
        whole: Sequence[WorkerMeans],
        visits: Mapping[Point, Sequence[WorkerMeans]],
        ranks: Sequence[int],
    ) -> None:
        self._ranks = ranks
        logs = [self._of(one) for one in whole]
        middle = median(logs)
        self.overall = middle * _trust(middle**2, variance(logs) / len(logs))
        size = len(whole[0])
        self._by_point = {
            point: [self._of(one) for one in some if len(one) == size]
            for point, some in visits.items()
        }
        several = [some for some in self._by_point.values() if len(some) > 1]
        # Unknown where no point was visited twice: then all points have the overall ratio.
        self._scatter = fmean(variance(some) for some in several) if several else None

    def _of(self, visit: WorkerMeans) -> float:
        return log(_computing(visit, self._ranks) / _computing(visit, range(len(visit))))

    def computing(self, point: Point, visits: Sequence[WorkerMeans]) -> list[float]:
        """Seconds that the kind computes at each visit to a point."""
        logs = self._by_point[point]
        away = fmean(logs) - self.overall
        trust = 0.0
        if self._scatter is not None:
            trust = _trust(away**2, self._scatter / len(logs))
        return [
            _computing(visit, range(len(visit)))
            * exp(self.overall + trust * (self._of(visit) - self.overall))
            for visit in visits
        ]


def _trust(squared: float, noise: float) -> float:
    """Factor by which a deviation is shrunk, from its square and the variance of its noise."""
    return max(0.0, 1 - noise / squared) if squared else 1.0


def _groups(
    places: Sequence[Place], visits: Sequence[WorkerMeans], named: str
) -> dict[str, list[int]]:
    """By kind, its ranks; hosts of one kind that are clearly slower become a kind of their own."""
    hosts_of: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, place in enumerate(places):
        hosts_of[place.kind][place.host].append(rank)
    found: dict[str, list[int]] = {}
    for kind, hosts in hosts_of.items():
        pace = {
            host: median(_computing(one, ranks) for one in visits) for host, ranks in hosts.items()
        }
        alike: list[list[str]] = []
        for host in sorted(hosts, key=pace.__getitem__):
            first = hosts[alike[-1][0]] if alike else hosts[host]
            ratios = [_computing(one, hosts[host]) / _computing(one, first) for one in visits]
            if alike and (kind == named or not _clearly_slower(ratios)):
                alike[-1].append(host)
            else:
                alike.append([host])
        for number, some in enumerate(alike):
            name = f"{kind} ({', '.join(sorted(some))})" if number else kind
            found[name] = sorted(rank for host in some for rank in hosts[host])
    return found


def _clearly_slower(ratios: Sequence[float]) -> bool:
    r"""Whether a host is slower than another by more than the scatter of visits.

    It is by `CLEARLY` in three of four visits, and the 95 % interval of the mean of :math:`\ln r`
    (Student's t) lies above 0, so that a disturbance of a few visits makes no kind.

    Args:
        ratios: Ratios :math:`r` of both hosts' computing times in the same visit, at least two.
    """
    logs = sorted(log(one) for one in ratios)
    error = student_t_975(len(logs) - 1) * stdev(logs) / sqrt(len(logs))
    return logs[len(logs) // 4] >= log(CLEARLY) and fmean(logs) > error


def _computing(visit: WorkerMeans, ranks: Sequence[int]) -> float:
    """Mean seconds of computing of some workers in a visit."""
    return fmean(visit[rank][0] for rank in ranks)


def _step_of_kind(
    step: StepTime, ratios: _LogRatios, visits: Sequence[WorkerMeans], point: Point
) -> StepTime:
    """The step time of a kind, as if no other worker were slower."""
    whole = [one for one in visits if len(one) == step.workers]
    computing = ratios.computing(point, whole)
    exchange = [min(sync for _, sync in one) for one in whole]
    both = tuple(map(sum, zip(computing, exchange, strict=True)))
    return step.scaled(median(both) / step.step_seconds).model_copy(
        update={
            "compute_seconds": median(computing),
            "sync_seconds": median(exchange),
            "step_seconds": median(both),
            "visits": both,
        }
    )
