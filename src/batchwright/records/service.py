"""Messages between the service, the runs that report to it, and its agents.

    reporter --RunIntroduction, RecordBatch, RunEnd--> service --RecordsTaken, Advice--> reporter
    submit   --JobSubmission--> service --Lease--> agent
    agent    --JobProgress--> service --JobOrders--> agent
    agent    --artifacts, a stream of bytes each--> service --JobArtifacts--> anybody, later agents
    service  --Notice--> webhook

Identifiers that a client chooses are UUIDs in lower-case hex with dashes; times are seconds of Unix
time by the server's clock.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, field_validator

from batchwright.records.agent_rules import Needs, Offer, rules_of
from batchwright.records.base import Count, Index, NonNegative, Positive, Record
from batchwright.records.lines.run_lines import RunLine
from batchwright.records.plan import Plan
from batchwright.records.profile import Profile
from batchwright.records.run import RunSummary

MAX_RECORDS = 1000
"""Most records in one message."""

Name = Annotated[
    str, StringConstraints(min_length=1, max_length=120, pattern=r"^[^\x00-\x1f\x7f]+$")
]
IDENTIFIER = r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"
Identifier = Annotated[str, StringConstraints(pattern=IDENTIFIER)]
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
"""SHA-256 over lines, line ends included, in hex."""
OneLine = Annotated[str, StringConstraints(max_length=2000)]
Scope = Literal["read", "report", "submit", "admin"]
RunState = Literal["running", "finished", "stopped", "failed", "silent"]
RunOutcome = Literal["finished", "stopped", "failed"]
JobState = Literal["queued", "probing", "planned", "training", "done", "failed", "cancelled"]
LogName = Literal["probe.log", "plan.log", "check.log", "train.log", "workers.log"]
ArtifactName = Literal["last.pt", "best.pt", "plan.json", "metrics.jsonl", "summary.json"] | LogName
Event = Literal["job.failed", "run.silent", "prediction.missed"]


# ------------------------------------------------------------------------------------------- runs


class RunIntroduction(Record):
    """Announces a run to the service; sending it again changes nothing."""

    name: Name = Field(description="Name for people; need not be unique.")
    plan: Plan = Field(description="The plan that the run follows.")
    profile: Profile | None = Field(None, description="Profile of the plan, if it was kept.")
    follows_advice: bool = Field(
        False, description="Whether the run takes a new plan at the end of an epoch."
    )
    job: Identifier | None = Field(
        None, description="Job of the service that the run carries out; null: none."
    )


class RecordBatch(Record):
    """Lines of a run's metrics.jsonl, in order and without a gap."""

    first: Index = Field(
        description="Sequence number of the first record: its line in the file, zero-based."
    )
    before: Digest | None = Field(
        None,
        description="Digest of all lines before these in the run folder; null: not compared.",
    )
    after: Digest | None = Field(
        None, description="Digest of all lines up to the last of these; null: unknown."
    )
    anew: bool = Field(
        False,
        description="With `first` 0: these replace all stored records of the run, which differ.",
    )
    records: tuple[RunLine, ...] = Field(
        min_length=1,
        max_length=MAX_RECORDS,
        description="The lines; flat lines of earlier versions are accepted, too.",
    )


class RecordsTaken(Record):
    """Confirms that every record before `next` is stored."""

    next: Index = Field(description="Sequence number of the record to send next.")
    advice: Index = Field(0, description="Number of the newest advice; 0 if there is none.")
    digest: Digest | None = Field(
        None,
        description="Digest of the stored lines; null where some came without a digest.",
    )


class RunEnd(Record):
    """How a run ended. It may be sent again, and a run that was stopped may go on."""

    outcome: RunOutcome = Field(description="How it ended; a `stopped` run can be resumed.")
    summary: RunSummary | None = Field(None, description="Summary of a finished run.")
    error: OneLine | None = Field(
        None, description="Error line that the user saw, if the run failed."
    )


class Advice(Record):
    """A new plan for a run that missed its prediction."""

    number: Count = Field(description="Number among the advice to this run, from 1.")
    epoch: Index = Field(description="First epoch that the new plan is for, zero-based.")
    reason: OneLine = Field(
        description="Measured and predicted times, and what the new plan changes."
    )
    plan: Plan = Field(description="New plan; its stages up to `epoch` are those of the old one.")
    taken: Index | None = Field(
        None, description="Epoch from which the run follows it; null: it does not."
    )


class KeptAdvice(Advice):
    """Advice in a run folder, which may be reported as several runs that each count their own."""

    run: Identifier | None = Field(
        None, description="Run of the service that the advice was given to."
    )


class RunInfo(Record):
    """A run, without its records."""

    id: Identifier
    name: str
    state: RunState
    created: NonNegative = Field(description="When the run was introduced, Unix time in seconds.")
    changed: NonNegative = Field(
        description="When the run last sent anything, Unix time in seconds."
    )
    records: Index = Field(description="Number of stored records.")
    digest: Digest | None = Field(description="Digest of the stored lines, as in `RecordsTaken`.")
    epochs: Count = Field(description="Number of planned epochs.")
    epochs_done: Index = Field(description="Number of finished epochs.")
    top1: float | None = Field(description="Newest held-out accuracy, in [0, 1].")
    method: str
    workers: Count
    global_batch_size: Count = Field(
        description="Global batch of the newest epoch, or as planned before the first."
    )
    network: str
    data: str
    follows_advice: bool
    demo: bool = Field(description="Whether this is the example run that comes with the service.")
    job: Identifier | None
    error: str | None


class RecordPage(Record):
    """Some records of a run, evenly spaced where there are more than were asked for."""

    kind: str = Field(description="Kind of these records.")
    total: Index = Field(description="Number of stored records of this kind.")
    stride: Count = Field(
        description="Of the stored records every `stride`-th one is here, and the newest."
    )
    sequences: tuple[Index, ...] = Field(description="Sequence numbers of the records here.")
    records: tuple[RunLine, ...]


# ------------------------------------------------------------------------------------------- jobs


class JobSubmission(Record):
    """A job for an agent to carry out."""

    name: Name = Field(description="Name for people; need not be unique.")
    job: dict[str, Any] = Field(description="Keys as in a job file, nested or with dots.")
    auto: bool = Field(
        False, description="Whether to train without waiting for the plan to be approved."
    )
    needs: Needs = Field(
        Needs(), description="What the agent's machine must have, besides what the job's keys need."
    )
    keep_seconds: NonNegative | None = Field(
        None,
        description="Seconds that the training waits for an agent that fell silent or gave it back "
        "before another one may take it over; null: the service's default.",
    )


class JobInfo(Record):
    """A job and its state."""

    id: Identifier
    name: str
    state: JobState
    owner: str = Field(description="Name of the token that submitted it, or `browser`.")
    auto: bool
    approved: bool
    created: NonNegative = Field(description="Unix time in seconds.")
    changed: NonNegative = Field(description="Unix time in seconds.")
    job: dict[str, Any] = Field(description="All keys, resolved as far as the server can.")
    run: Identifier | None = Field(description="The run that carries the job out; null: none yet.")
    agent: str | None = Field(description="Name of the agent that has the job, or had it last.")
    attempts: Index = Field(
        description="How often the job was leased; also the number of its newest lease."
    )
    cancelling: bool = Field(description="Whether the agent has been asked to stop.")
    error: str | None = Field(description="Error line of the job; null: no error.")
    has_profile: bool
    has_plan: bool
    waiting: str | None = Field(
        None,
        description="Why the job waits for an agent, or that its agent is silent. Null where a "
        "suitable agent is free.",
    )
    needs: Needs = Field(Needs(), description="What the agent's machine must have.")
    keep_seconds: NonNegative = Field(
        0.0, description="Seconds that the training waits for an agent that is silent or away."
    )
    silent: bool = Field(
        False, description="Whether the job's agent has sent nothing for a whole lease."
    )
    trained: NonNegative = Field(
        0.0, description="Epochs that the agent's newest checkpoint holds, with fractions."
    )


class AgentIntroduction(Record):
    """Announces an agent: its name, rules and machine."""

    name: Annotated[
        str,  # not . or .., which would lead elsewhere in an address
        StringConstraints(
            min_length=1,
            max_length=120,
            pattern=r"^[^\x00-\x1f\x7f/]*[^\x00-\x1f\x7f/.][^\x00-\x1f\x7f/]*$",
        ),
    ] = Field(
        description="Unique name without a slash, not of dots alone; it belongs to the folder that "
        "came first with it."
    )
    allow: tuple[Annotated[str, StringConstraints(max_length=500)], ...] = Field(
        max_length=100,
        description="Rules for the jobs that it carries out: `data=PATTERN`, `network=PATTERN`.",
    )
    chosen: bool = Field(
        True,
        description="Whether a person chose the name. If not, and another agent has it, the answer "
        "holds another name.",
    )
    folder: Identifier | None = Field(
        None, description="Identifier of its folder: an agent that restarts there is the same one."
    )
    session: Identifier | None = Field(
        None,
        description="Identifier of its process; of several with one folder the newest counts.",
    )
    offer: Offer = Field(Offer(), description="What the agent's machine offers.")

    @field_validator("allow")
    @classmethod
    def _are_rules(cls, allow: tuple[str, ...]) -> tuple[str, ...]:
        rules_of(allow)
        return allow


class AgentInfo(Record):
    """An agent as the service knows it."""

    name: str
    allow: tuple[str, ...]
    seen: NonNegative = Field(
        description="When the agent last sent anything, Unix time in seconds."
    )
    job: Identifier | None = Field(description="The job that the agent has; null: none.")
    job_name: str | None = Field(None, description="Name of that job.")
    offer: Offer = Field(Offer(), description="What the agent's machine offers.")


class LeaseRequest(Record):
    """An agent asks for a job, or says that it ends."""

    session: Identifier | None = Field(
        None, description="Identifier of its process, as in its introduction."
    )


class Lease(Record):
    """A job given to an agent. Its messages about the job carry `key`; older keys are refused."""

    key: Identifier
    number: Count = Field(
        description="Number among the leases of the job, from 1; a higher one is newer."
    )
    seconds: Positive = Field(
        description="Seconds of silence of the agent after which others may get the job."
    )
    job: JobInfo
    profile: Profile | None = Field(
        description="Profile of an earlier agent; null: none has measured."
    )
    plan: Plan | None = Field(description="The approved plan, or one that waits for approval.")


class JobProgress(Record):
    """An agent's message about its job; with `key` alone it is a heartbeat."""

    key: Identifier
    state: JobState | None = Field(
        None,
        description="New state of the job; left out if unchanged. `queued` gives the job back, "
        "when the agent is being stopped.",
    )
    reason: OneLine | None = Field(
        None,
        description="With `queued`: why this agent cannot carry the job out. It does not get the "
        "job again until it introduces itself anew.",
    )
    trained: NonNegative | None = Field(
        None, description="Epochs that the newest checkpoint holds, with fractions."
    )
    sent: bool = Field(
        False,
        description="With `queued`: whether the service has the newest checkpoint, so that the job "
        "need not wait for this agent.",
    )
    profile: Profile | None = None
    plan: Plan | None = None
    run: Identifier | None = None
    error: OneLine | None = None


class JobOrders(Record):
    """The service's answer to an agent's message."""

    state: JobState = Field(
        description="State of the job. The agent still has it if that is `probing` or `training`, "
        "or `planned` and the job need not wait for approval."
    )
    stop: bool = Field(
        description="Whether the job was cancelled: the agent then stops, and reports that."
    )


class ArtifactInfo(Record):
    """A file of a job that the service keeps: the newest of its name."""

    name: ArtifactName
    size: Index = Field(description="Size, in bytes.")
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    created: NonNegative = Field(description="When the file had arrived, Unix time in seconds.")


class JobArtifacts(Record):
    """The files that the service keeps of a job, and the room for more."""

    kept: bool = Field(description="Whether this service keeps artifacts at all.")
    room: Index = Field(
        description="Bytes that a file of this job may have now, besides those of the file of the "
        "same name that it replaces."
    )
    artifacts: tuple[ArtifactInfo, ...]


# ---------------------------------------------------------------------------------------- webhooks


class Notice(Record):
    """A message to a webhook. It may be sent twice, with the same `id` and content."""

    id: Identifier
    event: Event
    created: NonNegative = Field(description="When the event was noticed, Unix time in seconds.")
    subject: Identifier = Field(description="Identifier of the job (`job.failed`) or run.")
    name: str = Field(description="Name of the job or run.")
    detail: OneLine = Field(description="What happened, for people.")
    path: str = Field(description="Page of the job or run, below the service's own address.")


# ------------------------------------------------------------------------------------------ plans


class PlanRequest(Record):
    """The input that `batchwright plan` reads from files and its command line."""

    profiles: tuple[Profile, ...] = Field(min_length=1, max_length=20)
    runs: tuple[RunSummary, ...] = Field(
        (), max_length=50, description="Finished runs to learn epochs and accuracy from."
    )
    keys: dict[str, Any] = Field(
        default_factory=dict, description="Job keys to change, nested or with dots."
    )


class NewProfile(Record):
    """A profile to keep."""

    name: Name
    profile: Profile


class AdviceTaken(Record):
    """A run follows an advice from an epoch on."""

    epoch: Index = Field(description="First epoch trained by the advice's plan, zero-based.")


class Problem(Record):
    """An error in one line, and what a program may do about it."""

    detail: str
    next: Index | None = Field(
        None,
        description="With 409 to records: sequence number of the record to send next. If it is "
        "`first`, the lines before it differ from the stored ones: send all of them again.",
    )
    retry_after: NonNegative | None = Field(
        None, description="With 429: seconds after which to try again."
    )
