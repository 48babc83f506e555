"""What profiles and runs tell of a job, before a candidate is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from batchwright.planning.candidates.choice import settled_goal
from batchwright.planning.candidates.cluster_options import ClusterOption, cluster_options_of
from batchwright.planning.candidates.learnt import (
    LearningCurve,
    learnt_of,
    loss_links_of,
    why_unknown,
)
from batchwright.planning.candidates.optimizer import (
    Compared,
    chosen_optimizer,
    longer_with_muon,
    optimizers_of,
)
from batchwright.planning.candidates.progress import Progress, fewest_epochs
from batchwright.planning.candidates.table import Table
from batchwright.planning.candidates.worker_types import WorkerType, worker_types_of
from batchwright.planning.methods.layout import searched
from batchwright.planning.methods.update_rule import settle
from batchwright.planning.run_history import Experience, experience_of
from batchwright.records import Job, Profile, Reason, RunSummary


@dataclass(frozen=True)
class Known:
    """What profiles and runs tell of a job, before a candidate is chosen."""

    job: Job  # with the update rule and the objective settled
    merged: tuple[Profile, ...]  # one profile for each kind of worker
    kinds: tuple[WorkerType, ...]  # the models fitted to them
    table: Table  # predicts the candidates
    progress: Progress  # what a batch means for progress
    compared: tuple[Compared, ...]  # optimizers at equal batches
    learnt: LearningCurve | None  # `None`: accuracy is not predicted by it
    recipe: tuple[Reason, ...]  # what earlier runs decided
    unknown: str  # why accuracy is not known; empty where it is

    @property
    def named(self) -> bool:
        """Whether candidates say which kinds of workers they take."""
        return bool(self.job.goal.kinds) or len(self.kinds) > 1

    def profile_of(self, cluster: ClusterOption) -> Profile:
        """The first profile of the kinds of workers in a cluster."""
        taken = [kind.profile for kind, _ in cluster.members]
        return next(profile for profile in self.merged if any(profile is one for one in taken))


def known_of(
    given: Sequence[Profile],
    merged: tuple[Profile, ...],
    asked: Job,
    runs: Sequence[RunSummary],
) -> Known:
    """Fit the models, and settle what earlier runs decide."""
    data = merged[0].data
    job = searched(asked, data)
    experience = experience_of(merged[0], job, runs)
    observed = experience.observed()
    learnt, links = learnt_of(given, job, observed), loss_links_of(given, job, observed)
    longer = longer_with_muon(worker_types_of(merged, job), job)
    compared = (*experience.compared(), *(learnt.compared(job, longer) if learnt else ()))
    if learnt and experience.tells_accuracy and not learnt.longest:
        # Without trials the accuracy after each epoch of the runs says more than the learning
        # curve, which sees the end of each run alone.
        learnt = None
    job, recipe = settle(job, experience.tried(), compared)
    kinds = worker_types_of(merged, job)
    clusters = cluster_options_of(kinds, job)
    progress = _progress(merged, replace(experience, job=job), compared, learnt)
    progress = replace(progress, loss_links=links)
    job = job.model_copy(update={"goal": settled_goal(job.goal, progress)})
    return Known(
        job=job,
        merged=merged,
        kinds=kinds,
        table=Table(
            job=job, data=data, clusters=clusters, compared=compared, epochs=progress.trained
        ),
        progress=progress,
        compared=compared,
        learnt=learnt,
        recipe=recipe,
        unknown=why_unknown(given, job, learnt),
    )


def _progress(
    profiles: Sequence[Profile],
    experience: Experience,
    compared: Sequence[Compared],
    learnt: LearningCurve | None,
) -> Progress:
    job, least = experience.job, None
    noise = next((p.noise for p in profiles if p.noise and p.noise.noise_scale), None)
    # Cycles and two batch sizes are laid out over the epochs that are stated.
    if job.goal.target is not None and job.method_spec.same_steps:
        least = fewest_epochs(job)
    return Progress(
        models={name: experience.progress(noise, name) for name in optimizers_of(job)},
        optimizer=lambda batch: chosen_optimizer(job, batch, compared),
        base_batch=job.base_batch,
        planned=job.epochs,
        target=job.goal.accuracy,
        confidence=job.goal.confidence,
        least=least,
        learnt=learnt,
        guessing=profiles[0].data.guessing,
        judged=not any(profile.without_accuracy for profile in profiles),
    )
