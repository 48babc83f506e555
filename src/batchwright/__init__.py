"""Batchwright decides how an image-training job should use its workers, runs it, and checks itself.

    import batchwright as bw

    if __name__ == "__main__":  # workers import the script
        profile = bw.probe(data="digits", probe={"budget": 5})  # measure
        plan = bw.plan(profile, epochs=3)  # decide; print(plan.explain())
        check = bw.check(plan, points=2)  # compare
        schedule = bw.schedule(plan)  # look ahead; schedule.points
        bw.simulate(plan, workers=(8, 64), global_batch=512)  # on clusters that are not here
        summary = bw.train(plan)  # act; summary.accuracy
        bw.report(summary)  # show

`bw.run` does all of it. The records that these functions return have ``save(path)``, and `bw.load`
reads them again.

Names are imported when first used, so that planning and serving start without torch. Hardly
anything else is imported here, so that the command catches Ctrl-C as early as it can.
"""

from __future__ import annotations

from batchwright.storage.version import VERSION

TYPE_CHECKING = False  # as `typing.TYPE_CHECKING`, which takes longer to load than all of this
if TYPE_CHECKING:
    from typing import Any

    from batchwright.errors import BatchwrightError, Interrupted
    from batchwright.prediction.memory import max_local_batch_size
    from batchwright.records import Check, Job, Plan, Profile, RunSummary, Sweep
    from batchwright.records.lines.export import metrics
    from batchwright.records.run_folder import load
    from batchwright.training.batches.unequal import Sampler, weight
    from batchwright.training.session import Session
    from batchwright.workflows.delivery.deliver import deliver
    from batchwright.workflows.scheduling import schedule
    from batchwright.workflows.simulating import simulate, take_searched
    from batchwright.workflows.sweep.verb import sweep
    from batchwright.workflows.trainers.accelerate import ForAccelerate
    from batchwright.workflows.trainers.lightning import ForLightning
    from batchwright.workflows.trainers.transformers import ForTransformers
    from batchwright.workflows.verbs import check, plan, probe, report, run, train
    from batchwright.workload.model_files import load_model
    from batchwright.workload.muon import muon

__version__ = VERSION

_HOME = {
    "BatchwrightError": "errors",
    "Check": "records",
    "ForAccelerate": "workflows.trainers.accelerate",
    "ForLightning": "workflows.trainers.lightning",
    "ForTransformers": "workflows.trainers.transformers",
    "Interrupted": "errors",
    "Job": "records",
    "Plan": "records",
    "Profile": "records",
    "RunSummary": "records",
    "Sampler": "training.batches.unequal",
    "Session": "training.session",
    "Sweep": "records",
    "check": "workflows.verbs",
    "deliver": "workflows.delivery.deliver",
    "load": "records.run_folder",
    "load_model": "workload.model_files",
    "max_local_batch_size": "prediction.memory",
    "metrics": "records.lines.export",
    "muon": "workload.muon",
    "plan": "workflows.verbs",
    "probe": "workflows.verbs",
    "report": "workflows.verbs",
    "run": "workflows.verbs",
    "schedule": "workflows.scheduling",
    "simulate": "workflows.simulating",
    "sweep": "workflows.sweep.verb",
    "take_searched": "workflows.simulating",
    "train": "workflows.verbs",
    "weight": "training.batches.unequal",
}

__all__ = [
    "BatchwrightError",
    "Check",
    "ForAccelerate",
    "ForLightning",
    "ForTransformers",
    "Interrupted",
    "Job",
    "Plan",
    "Profile",
    "RunSummary",
    "Sampler",
    "Session",
    "Sweep",
    "check",
    "deliver",
    "load",
    "load_model",
    "max_local_batch_size",
    "metrics",
    "muon",
    "plan",
    "probe",
    "report",
    "run",
    "schedule",
    "simulate",
    "sweep",
    "take_searched",
    "train",
    "weight",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'batchwright' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"batchwright.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
