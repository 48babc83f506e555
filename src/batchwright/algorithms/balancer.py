"""Watches how long each worker computes, and decides when the workers' shares change."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from batchwright.algorithms.rebalancing import (
    balanced,
    fixed_cost,
    followed,
    midmean,
    noise_between,
    noise_within,
    published_speeds,
    speeds_of,
    worth_changing,
)
from batchwright.records import Job

FEWEST_STEPS = 5
"""Fewest steps with which speeds are measured at the end of an epoch."""
_MEASUREMENTS = 8  # most past measurements whose differences give their noise
_FEWEST_MEASUREMENTS = 4  # with fewer, one change of speed would be a large part of the differences


def balancer_of(job: Job, places: Sequence[str], **known: Any) -> Balancer:
    """The balancer that the job's ``rebalance`` names; arguments are those of `Balancer`."""
    kind = PublishedBalancer if job.rebalance == "published" else Balancer
    return kind(job, places, **known)


class Balancer:
    """Decides shares by measured times. All workers have the same times and decide the same.

    Args:
        job: Its ``rebalance_steps``, ``least_local_batch`` and ``most_local_batch`` are used.
        places: Host and device of each worker, in rank order.
        least: Fewest samples that a worker can train on.
        speeds: Samples per second by place, as far as known.
        fixed_samples: Fixed time of a step over the time per sample, in samples.

    Attributes:
        speeds: Samples per second by place: as given, then as measured.
        fixed_samples: Fixed time of a step in samples: as given, then as measured.
    """

    def __init__(
        self,
        job: Job,
        places: Sequence[str],
        *,
        least: int,
        speeds: Mapping[str, float],
        fixed_samples: float,
    ) -> None:
        self.speeds = dict(speeds)
        self.fixed_samples = fixed_samples
        self._every = job.rebalance_steps
        self._places = places
        self._fewest, self._least = least, max(least, job.least_local_batch or 0)
        self._most = job.most_local_batch
        self._batches: tuple[int, ...] = ()
        self._times: list[Sequence[float]] = []
        self._before: tuple[tuple[int, ...], list[float]] | None = None
        self._measured: deque[dict[str, float]] = deque(maxlen=_MEASUREMENTS)

    def watch(self, batches: tuple[int, ...], seconds: Sequence[float], *, usual: bool) -> None:
        """Record a step.

        Args:
            batches: Local batches, in samples, by rank.
            seconds: Seconds of computing, by rank.
            usual: Whether the step has the planned global batch and is not the first of its epoch,
                in which loaders start and caches are cold. Other steps are ignored.
        """
        if not usual:
            return
        if batches != self._batches:
            self._batches, self._times = batches, []
        self._times.append(seconds)

    def forget_times(self, fixed_samples: float) -> None:
        """Forget recorded times, since steps change; the speeds are kept.

        ``fixed_samples``: Fixed time of the new steps, in samples.
        """
        self.fixed_samples = fixed_samples
        self._batches, self._times, self._before = (), [], None
        self._measured.clear()

    def look(self, *, epoch_ends: bool) -> tuple[int, ...] | None:
        """New local batches, if it is time to measure speeds and they have changed enough.

        ``epoch_ends``: Whether the last step was the last of its epoch.
        """
        enough = FEWEST_STEPS if epoch_ends else self._every
        if not enough or len(self._times) < enough:
            return None
        seconds = [midmean(one) for one in zip(*self._times, strict=True)]
        noise = noise_within(self._times)
        # Noise is that of earlier measurements: a new change must not count as noise.
        if len(self._measured) >= _FEWEST_MEASUREMENTS:
            noise = max(noise, noise_between(self._measured))
        if self._before is not None:
            fixed = fixed_cost(self._before, (self._batches, seconds), noise)
            if fixed is not None:
                self.fixed_samples = ((self.fixed_samples or fixed) + fixed) / 2
                self.speeds |= self._speeds_at(*self._before)
        if not self.speeds.keys() >= set(self._places):
            # Without known speeds, the current shares are taken as a guess of the speeds.
            self.speeds |= self._speeds_at(self._batches, [1.0] * len(seconds))
        measured = self._speeds_at(self._batches, seconds)
        self._measured.append(measured)
        self.speeds = followed(self.speeds, measured, noise)
        wanted = self.shares_of(sum(self._batches))
        self._before, self._times = (self._batches, seconds), []
        return wanted if worth_changing(self._batches, wanted, noise) else None

    def shares_of(self, batch: int) -> tuple[int, ...]:
        """Shares of a global batch by the known speeds; other places count with the mean speed."""
        known = [self.speeds[place] for place in self._places if place in self.speeds]
        average = sum(known) / len(known) if known else 1.0
        count = len(self._places)
        least = next((one for one in (self._least, self._fewest) if one * count <= batch), 1)
        return tuple(
            balanced(
                [self.speeds.get(place, average) for place in self._places],
                batch,
                fixed_samples=self.fixed_samples,
                least=least,
                # The job's bound, raised to an even share if it is below that.
                most=self._most and max(self._most, -(-batch // count)),
            )
        )

    def state_dict(self) -> dict[str, Any]:
        """What was watched so far, besides the attributes: plain values."""
        return {
            "batches": self._batches,
            "times": [tuple(one) for one in self._times],
            "before": self._before,
            "measured": list(self._measured),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint, which must be of workers at the same places."""
        self._batches, self._times = tuple(state["batches"]), list(state["times"])
        self._before = state["before"]
        self._measured.extend(state["measured"])

    def _speeds_at(self, batches: Sequence[int], seconds: Sequence[float]) -> dict[str, float]:
        speeds = speeds_of(batches, seconds, self.fixed_samples)
        return dict(zip(self._places, speeds, strict=True))


class PublishedBalancer(Balancer):
    """Shares by the times of the last epoch alone, once an epoch, as published by Ye et al. 2020.

    All steps of an epoch count, speeds are not smoothed, shares change by any amount, and the fixed
    time of a step is taken as 0.
    """

    def __init__(self, *job_and_places: Any, **known: Any) -> None:
        super().__init__(*job_and_places, **known | {"fixed_samples": 0.0})
        self._samples: list[int] = []
        self._seconds: list[float] = []

    def watch(
        self,
        batches: tuple[int, ...],
        seconds: Sequence[float],
        *,
        usual: bool,  # noqa: ARG002 - all steps of an epoch count
    ) -> None:
        """Record a step's local batches and seconds of computing, by rank."""
        if sum(batches) >= sum(self._batches):  # not the smaller step at the end of an epoch
            self._batches = batches
        none = [0] * len(batches)
        self._samples = [a + b for a, b in zip(self._samples or none, batches, strict=True)]
        self._seconds = [a + b for a, b in zip(self._seconds or none, seconds, strict=True)]

    def forget_times(self, fixed_samples: float) -> None:  # noqa: ARG002 - the rule has none
        """Forget recorded times, since steps change; the speeds are kept."""
        self._batches, self._samples, self._seconds = (), [], []

    def state_dict(self) -> dict[str, Any]:
        """See `Balancer.state_dict`."""
        return {**super().state_dict(), "samples": self._samples, "seconds": self._seconds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Balancer.load_state_dict`."""
        super().load_state_dict(state)
        self._samples = list(state.get("samples", ()))
        self._seconds = list(state.get("seconds", ()))

    def look(self, *, epoch_ends: bool) -> tuple[int, ...] | None:
        """The local batches of the next epoch, if an epoch ends and they change."""
        if not (epoch_ends and self._samples):
            return None
        speeds = published_speeds(self._samples, self._seconds)
        self.speeds = dict(zip(self._places, speeds, strict=True))
        before, wanted = self._batches, self.shares_of(sum(self._batches))
        self._batches, self._samples, self._seconds = (), [], []
        return wanted if wanted != before else None
