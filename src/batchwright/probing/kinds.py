r"""Several kinds of workers that measure together, told apart by what each computes meanwhile.

In a visit all workers take steps with equal batches, and wait for each other in the exchange. What
worker :math:`i` computes takes :math:`c_i` seconds, and it waits :math:`w_i`: those of the slowest
are the exchange alone. So a step of a kind would take :math:`c_i + \min_j w_j` if no other were
slower. All that is measured holds for the number of workers that were there together.

What a kind computes is told as a share of what all compute in the same visit, :math:`r`. One visit
scatters, and curves through single visits may cross, so the kind's shares at the points are drawn
towards its share over all of them, and that towards equal ones, as far as visits scatter (the
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
from batchwright.probing.measure.step_time import Apart
from batchwright.records import KindTimes, StepTime

CLEARLY = 1.25
"""Times as slow in three of four visits with larger batches makes hosts of one name two kinds,
where visits do not scatter so much that equal hosts could look like that (`_clearly_slower`)."""

_MINIMUM_VISITS = 2  # that tell


@dataclass(frozen=True)
class Place:
    """Where a worker is.

    Attributes:
        host: Its name.
        gpu: Which GPU; empty: none.
        kind: What its host says it is, or its device's name.
        device_name: Model of the device.
        memory_bytes: That it may use.
    """

    host: str
    gpu: str
    kind: str
    device_name: str
    memory_bytes: int

    def called(self, named: str) -> Place:
        """The same, of the kind that a job names, if any, where its host says nothing."""
        return replace(self, kind=named) if named and self.kind == self.device_name else self

    def named_among(self, kinds: Sequence[str], named: str) -> str:
        """Its kind in a plan, whose job names one.

        Hosts of one kind may stand apart there, as `kinds_of` names them.
        """
        for name in kinds:
            base, _, hosts = name.removesuffix(")").rpartition(" (")
            if base == self.kind and self.host in hosts.split(", "):
                return name
        return self.kind if self.kind in kinds else self.called(named).kind


def said_of_all(places: Sequence[Place], named: str) -> str:
    """The kind that all hosts say they are of, else what the job names; empty: the device tells."""
    said = {"" if one.kind == one.device_name else one.kind for one in places}
    return said.pop() if len(said) == 1 else named


def kinds_of(
    places: Sequence[Place],
    steps: Sequence[StepTime],
    visits: Mapping[Point, Sequence[Apart]],
    *,
    named: str = "",
) -> tuple[KindTimes, ...]:
    """What each kind takes, in the order of their first workers; nothing where all are of one.

    Args:
        places: Of all workers, in rank order.
        steps: Measured together, at the pace of the slowest.
        visits: By point, what each worker took at each visit in which all took part.
        named: Kind that the job names; its hosts are of one kind, however fast they are.
    """
    rising = sorted(visits, key=lambda point: point.local_batch_size)
    whole = [one for point in rising for one in visits[point] if len(one) == len(places)]
    if len(whole) < _MINIMUM_VISITS:
        return ()
    # Those of larger batches, as small ones show what goes on around computing.
    whole = whole[len(whole) // 2 :] if len(whole) >= 2 * _MINIMUM_VISITS else whole
    groups = _groups(places, whole, named)
    if len(groups) < 2:
        return ()
    found = []
    for name, ranks in sorted(groups.items(), key=lambda one: one[1][0]):
        shares = _Shares(whole, visits, ranks)
        own = tuple(
            _of_kind(step, shares, told, point)
            for step in steps
            if (told := visits.get(point := Point(*key_of(step)))) and step.workers == len(places)
        )
        memory = min(places[rank].memory_bytes for rank in ranks)
        found.append(
            KindTimes(
                kind=name,
                workers=len(ranks),
                device_name=places[ranks[0]].device_name,
                memory_bytes=memory,
                pace=exp(shares.overall),
                steps=own,
            )
        )
    return tuple(found)


class _Shares:
    """Logarithms of what a kind computes over what all workers compute in the mean.

    Args:
        whole: Visits that tell of the kind as a whole.
        visits: By point, all visits.
        ranks: Of the kind's workers.

    Attributes:
        overall: Of all points together.
    """

    def __init__(
        self,
        whole: Sequence[Apart],
        visits: Mapping[Point, Sequence[Apart]],
        ranks: Sequence[int],
    ) -> None:
        self._ranks = ranks
        told = [self._of(one) for one in whole]
        middle = median(told)
        self.overall = middle * _trust(middle**2, variance(told) / len(told))
        size = len(whole[0])
        self._by_point = {
            point: [self._of(one) for one in some if len(one) == size]
            for point, some in visits.items()
        }
        several = [some for some in self._by_point.values() if len(some) > 1]
        # Unknown where no point was visited twice: then nothing tells points apart.
        self._scatter = fmean(variance(some) for some in several) if several else None

    def _of(self, visit: Apart) -> float:
        return log(_computing(visit, self._ranks) / _computing(visit, range(len(visit))))

    def computing(self, point: Point, visits: Sequence[Apart]) -> list[float]:
        """Seconds that the kind computes at each visit to a point."""
        told = self._by_point[point]
        away = fmean(told) - self.overall
        trust = 0.0
        if self._scatter is not None:
            trust = _trust(away**2, self._scatter / len(told))
        return [
            _computing(visit, range(len(visit)))
            * exp(self.overall + trust * (self._of(visit) - self.overall))
            for visit in visits
        ]


def _trust(squared: float, noise: float) -> float:
    """How much of a deviation is more than noise of some variance would make of none."""
    return max(0.0, 1 - noise / squared) if squared else 1.0


def _groups(places: Sequence[Place], visits: Sequence[Apart], named: str) -> dict[str, list[int]]:
    """Ranks of each kind, by its name: hosts of one name that are clearly slower stand apart."""
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
    r"""Whether a host is slower than another by more than visits scatter.

    Three of four visits say so, and the 95 % interval of the mean of :math:`\ln r` (Student's t)
    lies above 0: what disturbs a few visits in turn makes no kind.

    Args:
        ratios: Of the times that both take to compute in the same visit, at least two.
    """
    logs = sorted(log(one) for one in ratios)
    error = student_t_975(len(logs) - 1) * stdev(logs) / sqrt(len(logs))
    return logs[len(logs) // 4] >= log(CLEARLY) and fmean(logs) > error


def _computing(visit: Apart, ranks: Sequence[int]) -> float:
    return fmean(visit[rank][0] for rank in ranks)


def _of_kind(step: StepTime, shares: _Shares, visits: Sequence[Apart], point: Point) -> StepTime:
    """The step as it is where no kind is slower than the one of these shares."""
    whole = [one for one in visits if len(one) == step.workers]
    computing = shares.computing(point, whole)
    exchange = [min(sync for _, sync in one) for one in whole]
    both = tuple(map(sum, zip(computing, exchange, strict=True)))
    ratio = median(both) / step.step_seconds
    return step.model_copy(
        update={
            "compute_seconds": median(computing),
            "sync_seconds": median(exchange),
            "step_seconds": median(both),
            "step_low": step.step_low * ratio,
            "step_high": step.step_high * ratio,
            "visits": both,
        }
    )
