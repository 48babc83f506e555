"""The nouns that travel between the verbs: frozen, checked, with a unit on every field.

    Job --probe--> Profile --plan--> Plan --train--> RunSummary --report--> pages

Words, settled once:

* *worker*: one training rank. *Loader process*: a data-loading process.
* *local* batch: samples per step on one worker. *Global* batch: their sum over the workers.
* *epoch*: every training sample once. *Step*: one update of the weights.
* *round*: one worker's stretch between two exchanges with the parameter server.
* *stage*: a stretch of constant learning rate (before warm-up and decay). *Sub-stage*: a stretch of
  constant resolution inside a stage, a row of the plan. *Cycle*: the resolutions low to high inside
  one stage.
* *update factor*: the weight of a pushed model in a merge.
* *cell*: one run of a sweep. *Setting*: the cells of a sweep that differ in the seed alone.
* *micro-batch*: the part of a local batch that goes through the network at once.

Every record refuses unknown keys, NaN and infinity. A file holds one record; its ``format`` says
which and in which version.
"""

from batchwright.records.base import (
    Augmentation,
    Count,
    Estimate,
    Index,
    Method,
    NonNegative,
    OptimizerName,
    Positive,
    Precision,
    Record,
    Source,
)
from batchwright.records.check import Check, CheckPoint, RoundCheck
from batchwright.records.job import (
    VIRTUAL_BANDWIDTH,
    VIRTUAL_LATENCY,
    Ags,
    Cycle,
    Disturbance,
    DualBatch,
    Goal,
    Job,
    Link,
    ProbeSettings,
    Server,
    Virtual,
    WorkerKind,
)
from batchwright.records.plan import Plan
from batchwright.records.plan_fields import (
    AgsRule,
    Alternative,
    HeldOut,
    KindCount,
    Knee,
    LearningRateRule,
    Prediction,
    Reason,
    ServerRule,
    Stage,
)
from batchwright.records.profile import (
    Cluster,
    CollectiveTime,
    DataFacts,
    GradientNoise,
    MachineLoad,
    MemoryParts,
    MemoryPoint,
    NetworkFacts,
    OutOfMemory,
    PairTime,
    PrecisionRatio,
    PrecisionTime,
    Profile,
    StepLoading,
    StepTime,
    Trial,
    UpdateTime,
)
from batchwright.records.run import (
    CommandPart,
    EpochRecord,
    FactorRange,
    LocalBatches,
    Refit,
    RoundRecord,
    RunSummary,
    WorkerTime,
)
from batchwright.records.schedule import RateSchedule, SchedulePoint, ScheduleRow
from batchwright.records.sweep import Mean, Sweep, SweepCell, SweepSetting, SweptKey

__all__ = [
    "VIRTUAL_BANDWIDTH",
    "VIRTUAL_LATENCY",
    "Ags",
    "AgsRule",
    "Alternative",
    "Augmentation",
    "Check",
    "CheckPoint",
    "Cluster",
    "CollectiveTime",
    "CommandPart",
    "Count",
    "Cycle",
    "DataFacts",
    "Disturbance",
    "DualBatch",
    "EpochRecord",
    "Estimate",
    "FactorRange",
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
    "MachineLoad",
    "Mean",
    "MemoryParts",
    "MemoryPoint",
    "Method",
    "NetworkFacts",
    "NonNegative",
    "OptimizerName",
    "OutOfMemory",
    "PairTime",
    "Plan",
    "Positive",
    "Precision",
    "PrecisionRatio",
    "PrecisionTime",
    "Prediction",
    "ProbeSettings",
    "Profile",
    "RateSchedule",
    "Reason",
    "Record",
    "Refit",
    "RoundCheck",
    "RoundRecord",
    "RunSummary",
    "SchedulePoint",
    "ScheduleRow",
    "Server",
    "ServerRule",
    "Source",
    "Stage",
    "StepLoading",
    "StepTime",
    "Sweep",
    "SweepCell",
    "SweepSetting",
    "SweptKey",
    "Trial",
    "UpdateTime",
    "Virtual",
    "WorkerKind",
    "WorkerTime",
]
