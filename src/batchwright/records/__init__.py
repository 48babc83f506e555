"""The nouns that travel between the verbs: frozen, checked, with a unit on every field.

    Job --probe--> Profile --plan--> Plan --train--> RunSummary --report--> pages

Words, settled once:

* *worker*: one training rank. *Loader process*: a data-loading process.
* *local* batch: samples per step on one worker. *Global* batch: their sum over the workers.
* *epoch*: every training sample once. *Step*: one update of the weights.
* *stage*: a stretch of constant learning rate (before warm-up and decay) and resolution.
* *micro-batch*: the part of a local batch that goes through the network at once.

Every record refuses unknown keys, NaN and infinity. A file holds one record; its ``format`` says
which and in which version.
"""

from batchwright.records.base import (
    Augmentation,
    Count,
    Estimate,
    Index,
    NonNegative,
    Positive,
    Precision,
    Record,
    Source,
)
from batchwright.records.check import Check, CheckPoint
from batchwright.records.job import Goal, Job, Link, ProbeSettings, WorkerKind
from batchwright.records.plan import (
    Alternative,
    HeldOut,
    KindCount,
    Knee,
    LearningRateRule,
    Plan,
    Prediction,
    Reason,
    Stage,
)
from batchwright.records.profile import (
    Cluster,
    CollectiveTime,
    DataFacts,
    GradientNoise,
    MemoryParts,
    MemoryPoint,
    NetworkFacts,
    OutOfMemory,
    PrecisionTime,
    Profile,
    StepTime,
)
from batchwright.records.run import EpochRecord, LocalBatches, Refit, RunSummary, WorkerTime

__all__ = [
    "Alternative",
    "Augmentation",
    "Check",
    "CheckPoint",
    "Cluster",
    "CollectiveTime",
    "Count",
    "DataFacts",
    "EpochRecord",
    "Estimate",
    "Goal",
    "GradientNoise",
    "HeldOut",
    "Index",
    "Job",
    "KindCount",
    "Knee",
    "LearningRateRule",
    "Link",
    "LocalBatches",
    "MemoryParts",
    "MemoryPoint",
    "NetworkFacts",
    "NonNegative",
    "OutOfMemory",
    "Plan",
    "Positive",
    "Precision",
    "PrecisionTime",
    "Prediction",
    "ProbeSettings",
    "Profile",
    "Reason",
    "Record",
    "Refit",
    "RunSummary",
    "Source",
    "Stage",
    "StepTime",
    "WorkerKind",
    "WorkerTime",
]
