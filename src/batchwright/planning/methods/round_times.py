"""How long steps take on each worker of a round, from what was measured or stated."""

from __future__ import annotations

from batchwright.algorithms.dual_batch import Relative
from batchwright.planning.candidates.cluster_options import ClusterOption
from batchwright.planning.candidates.worker_types import WorkerType, link_given
from batchwright.planning.methods.groups import Pace
from batchwright.planning.methods.simulated import stated_line
from batchwright.planning.validation import sides
from batchwright.prediction.collective import exchange_seconds, fit_collectives
from batchwright.records import Job, NetworkFacts

LEAST_FIXED = 0.01
"""Share of a measured step that counts as fixed at least. On a busy machine a fit may leave none,
and the run would be refused after it was probed; pairs measured side by side correct it."""

_BYTES = 4  # of a weight


def measured_pace(mix: ClusterOption, job: Job, batch: int) -> Pace:
    """By the fitted step times, computing alone: workers of a server do not exchange gradients.

    Args:
        mix: The workers; kinds differ by one factor, that at ``batch``.
        job: Resolved.
        batch: Local batch, in samples.
    """
    first, workers = mix.members[0][0], mix.workers
    top = max(sides(job))

    def seconds_on(kind: WorkerType, side: int, size: int) -> float:
        return kind.times.computing(workers, side, kind.parts(workers, side, size))

    def ends(side: int, size: int) -> tuple[float, float]:
        counted = min(workers, first.measured[-1])
        found = first.times.predict(counted, side, first.parts(workers, side, size))
        return found.low / found.value, found.high / found.value

    usual = seconds_on(first, top, batch)
    speeds = [usual / seconds_on(kind, top, batch) for kind, n in mix.members for _ in range(n)]
    stated = job.virtual.relative_times(workers) if job.launcher.simulated else ()
    told = job.launcher.simulated and job.virtual.step_seconds is not None
    profile = first.profile
    parts = profile.memory_parts
    size = parts.parameters + parts.buffers if parts else _BYTES * profile.network.parameters
    model = fit_collectives(profile.collectives)
    seconds = 0.0
    if not model.assumed(2, "push-pull"):
        seconds = model.seconds(size, 2, "push-pull")
    elif link_given(job.link):
        seconds = exchange_seconds(size, 2, job.link, "push-pull")
    return Pace(
        seconds=lambda side, size: seconds_on(first, side, size),
        workers=tuple(
            Relative(speed * relative, overhead)
            for speed, (relative, overhead) in zip(
                speeds, stated or ((1.0, 1.0),) * workers, strict=True
            )
        ),
        least=max(kind.least for kind, _ in mix.members),
        exchange=_exchanges(job, size, workers, seconds),
        spread=ends,
        least_fixed=0.0 if told else LEAST_FIXED,
        pairs=profile.pairs if len(mix.members) == 1 and not first.stated else (),
    )


def stated_pace(job: Job, network: NetworkFacts, workers: int, least: int) -> Pace | None:
    """By ``virtual.sample_seconds`` and ``virtual.step_seconds``; `None` if they are not given."""
    if stated_line(job, max(sides(job))) is None:
        return None

    def seconds(side: int, batch: int) -> float:
        a, b = stated_line(job, side) or (0.0, 0.0)
        return a * batch + b

    size = _BYTES * network.parameters
    each = exchange_seconds(size, 2, job.link, "push-pull") if link_given(job.link) else 0.0
    return Pace(
        seconds=seconds,
        workers=tuple(Relative(*one) for one in job.virtual.relative_times(workers)),
        least=least,
        exchange=_exchanges(job, size, workers, each),
        spread=lambda side, batch: (1.0, 1.0),  # noqa: ARG005 - stated, so known
    )


def _exchanges(job: Job, size: int, workers: int, seconds: float) -> tuple[float, ...]:
    """Of each worker; a virtual one may have a link of its own."""
    links = job.virtual.links if job.launcher.simulated else ()
    if not links or job.link.bandwidth is None:
        return (seconds,) * workers
    whole = 2 * size / job.link.bandwidth
    return tuple(seconds + whole * (1 / link - 1) for link in links)
