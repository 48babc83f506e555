"""Batchwright decides how an image-training job should use its workers, runs it, and checks itself.

>>> import batchwright as bw
>>> profile = bw.probe("data=digits")        # measure            # doctest: +SKIP
>>> plan = bw.plan(profile)                  # decide             # doctest: +SKIP
>>> check = bw.check(plan)                   # compare            # doctest: +SKIP
>>> bw.schedule(plan).points                 # look ahead         # doctest: +SKIP
>>> summary = bw.train(plan)                 # act                # doctest: +SKIP
>>> bw.report(summary)                       # tell               # doctest: +SKIP

Names are imported when first used, so that planning and serving start without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchwright.errors import BatchwrightError, Interrupted
    from batchwright.prediction.memory import max_local_batch_size
    from batchwright.records import Check, Job, Plan, Profile, RunSummary
    from batchwright.training.session import Session
    from batchwright.verbs import check, plan, probe, report, run, schedule, train

__version__ = "0.1.0"

_HOME = {
    "BatchwrightError": "errors",
    "Check": "records",
    "Interrupted": "errors",
    "Job": "records",
    "Plan": "records",
    "Profile": "records",
    "RunSummary": "records",
    "Session": "training.session",
    "check": "verbs",
    "max_local_batch_size": "prediction.memory",
    "plan": "verbs",
    "probe": "verbs",
    "report": "verbs",
    "run": "verbs",
    "schedule": "verbs",
    "train": "verbs",
}

__all__ = [
    "BatchwrightError",
    "Check",
    "Interrupted",
    "Job",
    "Plan",
    "Profile",
    "RunSummary",
    "Session",
    "check",
    "max_local_batch_size",
    "plan",
    "probe",
    "report",
    "run",
    "schedule",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'batchwright' has no attribute {name!r}")
    return getattr(import_module(f"batchwright.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
