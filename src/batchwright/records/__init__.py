"""The records that the verbs pass to each other: frozen, checked, with a unit on every field.

    Job --probe--> Profile --plan--> Plan --train--> RunSummary --report--> pages

Terms that fields and their descriptions use, and not the words in brackets:

* *worker* (not *replica*, *trainer*): one training rank. *Loader process* (not *data worker*): a
  process that loads data for a worker.
* *local batch* (not *device batch*): samples per step on one worker. *Global batch* (not
  *mini-batch*, *effective batch*): their sum over the workers. *Micro-batch* (not *sub-batch*): the
  part of a local batch that goes through the network at once.
* *epoch*: every training sample once. *Step* (not *iteration*): one update of the weights.
* *round*: the training of one worker between two exchanges with the parameter server.
* *stage* (not *sub-stage*): a stretch of epochs with one resolution, batch and rate, a row of the
  plan's table. *Rate stage*: a stretch of constant learning rate (before warm-up and decay), of one
  stage or more; the job's ``cycle`` keys use this meaning. *Cycle*: the resolutions low to high
  inside one rate stage.
* *update factor* (not *merge weight*): the weight of a pushed model in a merge.
* *cell* (not *experiment*): one run of a sweep. *Setting*: the cells of a sweep that differ in the
  seed alone.

Every record refuses unknown keys, NaN and infinity. A file holds one record; its ``format`` names
the kind and the version.
"""

from batchwright.records.base import (
    Augmentation as Augmentation,
    Count as Count,
    Estimate as Estimate,
    Index as Index,
    Method as Method,
    NonNegative as NonNegative,
    OptimizerName as OptimizerName,
    Positive as Positive,
    Precision as Precision,
    Record as Record,
    Source as Source,
)
from batchwright.records.check import (
    Check as Check,
    CheckPoint as CheckPoint,
    RoundCheck as RoundCheck,
)
from batchwright.records.job import Job as Job
from batchwright.records.job_sections import (
    Ags as Ags,
    Cycle as Cycle,
    DualBatch as DualBatch,
    Goal as Goal,
    ProbeSettings as ProbeSettings,
    Server as Server,
)
from batchwright.records.clusters.sections import (
    VIRTUAL_BANDWIDTH as VIRTUAL_BANDWIDTH,
    VIRTUAL_LATENCY as VIRTUAL_LATENCY,
    Disturbance as Disturbance,
    Link as Link,
    Ray as Ray,
    Slurm as Slurm,
    Virtual as Virtual,
    WorkerKind as WorkerKind,
)
from batchwright.records.plan import Plan as Plan
from batchwright.records.plan_fields import (
    AgsRule as AgsRule,
    Alternative as Alternative,
    HeldOut as HeldOut,
    KindCount as KindCount,
    Knee as Knee,
    LearningRateRule as LearningRateRule,
    Prediction as Prediction,
    Reason as Reason,
    ServerRule as ServerRule,
    Stage as Stage,
)
from batchwright.records.measured.choices import (
    CompilationTimes as CompilationTimes,
    GraphTimes as GraphTimes,
    PrecisionRatio as PrecisionRatio,
    PrecisionTime as PrecisionTime,
    RecomputationTimes as RecomputationTimes,
)
from batchwright.records.measured.steps import (
    CollectiveTime as CollectiveTime,
    KindTimes as KindTimes,
    LinkTime as LinkTime,
    MemoryParts as MemoryParts,
    MemoryPoint as MemoryPoint,
    OutOfMemory as OutOfMemory,
    PairTime as PairTime,
    StepLoading as StepLoading,
    StepTime as StepTime,
    UpdateTime as UpdateTime,
)
from batchwright.records.profile import (
    Cluster as Cluster,
    DataFacts as DataFacts,
    FirstAnswers as FirstAnswers,
    GradientNoise as GradientNoise,
    MachineLoad as MachineLoad,
    NetworkFacts as NetworkFacts,
    Profile as Profile,
    Trial as Trial,
)
from batchwright.records.run import (
    CommandPart as CommandPart,
    EpochRecord as EpochRecord,
    FactorRange as FactorRange,
    LocalBatches as LocalBatches,
    Refit as Refit,
    RoundRecord as RoundRecord,
    RunSummary as RunSummary,
    WorkerTime as WorkerTime,
)
from batchwright.records.schedule import (
    RateSchedule as RateSchedule,
    SchedulePoint as SchedulePoint,
    ScheduleRow as ScheduleRow,
)
from batchwright.records.clusters.simulation import (
    Scenario as Scenario,
    SimulatedCluster as SimulatedCluster,
    Simulation as Simulation,
)
from batchwright.records.sweep import (
    Mean as Mean,
    Sweep as Sweep,
    SweepCell as SweepCell,
    SweepSetting as SweepSetting,
    SweptKey as SweptKey,
)
