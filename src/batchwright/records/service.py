"""What travels between the service, those who report to it, and its agents.

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
"""Records in one message."""

Name = Annotated[
    str, StringConstraints(min_length=1, max_length=120, pattern=r"^[^\x00-\x1f\x7f]+$")
]
Identifier = Annotated[
    str,
    StringConstraints(pattern=r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"),
]
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
"""SHA-256 over lines, each with its end, in hex."""
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
    """A run tells that it is there; telling it again changes nothing."""

    name: Name = Field(description="For people; need not be unique.")
    plan: Plan = Field(description="The plan that is followed.")
    profile: Profile | None = Field(None, description="What it was made from, if kept.")
    follows_advice: bool = Field(
        False, description="Whether it takes a new plan at the end of an epoch."
    )
    job: Identifier | None = Field(None, description="Job of the service that it carries out.")


class RecordBatch(Record):
    """Lines of a run's metrics.jsonl, in order and without a gap."""

    first: Index = Field(description="Sequence number of the first: its line, zero-based.")
    before: Digest | None = Field(
        None, description="Of all lines before them in the run folder; null: not compared."
    )
    after: Digest | None = Field(None, description="Of all lines up to the last of them.")
    anew: bool = Field(
        False,
        description="With `first` 0: in place of all that is stored of the run, which differs.",
    )
    records: tuple[RunLine, ...] = Field(
        min_length=1,
        max_length=MAX_RECORDS,
        description="The lines; flat ones of earlier versions are taken, too.",
    )


class RecordsTaken(Record):
    """Everything before `next` is stored for good."""

    next: Index = Field(description="Sequence number of the record that is wanted next.")
    advice: Index = Field(0, description="Number of the newest advice; 0 if there is none.")
    digest: Digest | None = Field(
        None, description="Of the lines that are stored; null where not all came with theirs."
    )


class RunEnd(Record):
    """How a run ended. It may be told again, and a run that was stopped may go on."""

    outcome: RunOutcome = Field(description="`stopped` can be resumed.")
    summary: RunSummary | None = Field(None, description="Of a finished run.")
    error: OneLine | None = Field(None, description="The line that the user saw, if it failed.")


class Advice(Record):
    """A new plan for a run that missed its prediction."""

    number: Count = Field(description="Counts the advice to this run, from 1.")
    epoch: Index = Field(description="First epoch that the new plan is for, zero-based.")
    reason: OneLine = Field(description="Measured against predicted, and what would change.")
    plan: Plan = Field(description="Rows up to `epoch` are those that were followed.")
    taken: Index | None = Field(None, description="Epoch from which it is followed, if it is.")


class KeptAdvice(Advice):
    """Advice in a run folder, which may be reported as several runs that each count their own."""

    run: Identifier | None = Field(None, description="Run of the service that it was given to.")


class RunInfo(Record):
    """A run, without its records."""

    id: Identifier
    name: str
    state: RunState
    created: NonNegative = Field(description="When it was introduced, Unix time in seconds.")
    changed: NonNegative = Field(description="When it was last heard of, Unix time in seconds.")
    records: Index = Field(description="How many are stored.")
    digest: Digest | None = Field(description="As in `RecordsTaken`.")
    epochs: Count = Field(description="Planned.")
    epochs_done: Index = Field(description="Finished.")
    top1: float | None = Field(description="Newest held-out accuracy, in [0, 1].")
    method: str
    workers: Count
    global_batch_size: Count = Field(description="Of the newest epoch; else as planned.")
    network: str
    data: str
    follows_advice: bool
    demo: bool = Field(description="Whether it is the example that comes with the service.")
    job: Identifier | None
    error: str | None


class RecordPage(Record):
    """Some records of a run, evenly spaced where there are more than were asked for."""

    kind: str = Field(description="Of all of them.")
    total: Index = Field(description="Records of this kind that are stored.")
    stride: Count = Field(description="Every so many of them is here; the newest always is.")
    sequences: tuple[Index, ...] = Field(description="Their sequence numbers.")
    records: tuple[RunLine, ...]


# ------------------------------------------------------------------------------------------- jobs


class JobSubmission(Record):
    """A job to be carried out by some agent."""

    name: Name = Field(description="For people; need not be unique.")
    job: dict[str, Any] = Field(description="Keys as in a job file, nested or with dots.")
    auto: bool = Field(False, description="Train without waiting for the plan to be approved.")
    needs: Needs = Field(
        Needs(), description="Of the agent's machine, beside what the job's keys say."
    )
    keep_seconds: NonNegative | None = Field(
        None,
        description="How long its training is kept for an agent that fell silent or gave it back, "
        "before another one may take it over; null: as the service has it.",
    )


class JobInfo(Record):
    """A job and where it stands."""

    id: Identifier
    name: str
    state: JobState
    owner: str = Field(description="Name of the token that submitted it, or `browser`.")
    auto: bool
    approved: bool
    created: NonNegative = Field(description="Unix time in seconds.")
    changed: NonNegative = Field(description="Unix time in seconds.")
    job: dict[str, Any] = Field(description="All keys, resolved as far as the server can.")
    run: Identifier | None = Field(description="The run that carries it out.")
    agent: str | None = Field(description="Name of the agent that has it, or had it last.")
    attempts: Index = Field(description="How often it was leased; the number of its newest lease.")
    cancelling: bool = Field(description="Whether the agent has been told to stop.")
    error: str | None = Field(description="The line that the user would have seen.")
    has_profile: bool
    has_plan: bool
    waiting: str | None = Field(
        None,
        description="Of a job that waits for an agent, or whose agent is silent: why. Null where "
        "an agent that carries it out is free.",
    )
    needs: Needs = Field(Needs(), description="Of the agent's machine.")
    keep_seconds: NonNegative = Field(
        0.0, description="How long its training is kept for an agent that is silent or away."
    )
    silent: bool = Field(
        False, description="Whether the agent that has it was not heard of for a whole lease."
    )
    trained: NonNegative = Field(
        0.0, description="Epochs that its agent's newest checkpoint holds, in fractions too."
    )


class AgentIntroduction(Record):
    """What an agent is and does."""

    name: Annotated[
        str, StringConstraints(min_length=1, max_length=120, pattern=r"^[^\x00-\x1f\x7f/]+$")
    ] = Field(description="Unique, no slash; it belongs to the folder that came with it first.")
    allow: tuple[Annotated[str, StringConstraints(max_length=500)], ...] = Field(
        max_length=100, description="What it carries out: `data=PATTERN`, `network=PATTERN`."
    )
    chosen: bool = Field(
        True,
        description="Whether somebody chose the name. If not, and another agent has it, the answer "
        "holds the name that it gets instead.",
    )
    folder: Identifier | None = Field(
        None, description="Identifies its folder: an agent that comes back from it is the same one."
    )
    session: Identifier | None = Field(
        None, description="Identifies its process: the newest one of a folder is listened to."
    )
    offer: Offer = Field(Offer(), description="What its machine offers.")

    @field_validator("allow")
    @classmethod
    def _are_rules(cls, allow: tuple[str, ...]) -> tuple[str, ...]:
        rules_of(allow)
        return allow


class AgentInfo(Record):
    """An agent as the service knows it."""

    name: str
    allow: tuple[str, ...]
    seen: NonNegative = Field(description="When it was last heard of, Unix time in seconds.")
    job: Identifier | None = Field(description="The job that it has.")
    job_name: str | None = Field(None, description="That job's name.")
    offer: Offer = Field(Offer(), description="What its machine offers.")


class LeaseRequest(Record):
    """An agent asks for something to do."""

    session: Identifier | None = Field(None, description="As in its introduction.")


class Lease(Record):
    """A job handed to an agent. All it says of the job carries `key`; an older key is refused."""

    key: Identifier
    number: Count = Field(
        description="Counts the leases of the job, from 1: what comes under a lower one is older."
    )
    seconds: Positive = Field(
        description="After so long without a word of the agent, others may get the job."
    )
    job: JobInfo
    profile: Profile | None = Field(description="From an earlier agent, if it got so far.")
    plan: Plan | None = Field(description="The approved plan, or one that waits to be.")


class JobProgress(Record):
    """What an agent has to say of its job; nothing more than `key` is a heartbeat."""

    key: Identifier
    state: JobState | None = Field(
        None,
        description="The state that it is in now; left out if as before. `queued` gives the job "
        "back, for an agent that is being stopped.",
    )
    reason: OneLine | None = Field(
        None,
        description="With `queued`: why this agent cannot carry the job out. It does not get it "
        "again until it introduces itself anew.",
    )
    trained: NonNegative | None = Field(
        None, description="Epochs that its newest checkpoint holds, in fractions too."
    )
    sent: bool = Field(
        False,
        description="With `queued`: the service has the newest checkpoint, so that the job need "
        "not be kept for this agent.",
    )
    profile: Profile | None = None
    plan: Plan | None = None
    run: Identifier | None = None
    error: OneLine | None = None


class JobOrders(Record):
    """What the service wants of the agent."""

    state: JobState = Field(
        description="Where the job stands. The agent has it still while that is `probing` or "
        "`training`, or `planned` and the job need not wait for approval."
    )
    stop: bool = Field(description="The job was cancelled: stop, and say so.")


class ArtifactInfo(Record):
    """A file of a job that the service keeps: the newest of its name."""

    name: ArtifactName
    size: Index = Field(description="Bytes.")
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    created: NonNegative = Field(description="When it had arrived, Unix time in seconds.")


class JobArtifacts(Record):
    """What the service keeps of a job, and how much more it would."""

    kept: bool = Field(description="Whether this service keeps artifacts at all.")
    room: Index = Field(
        description="Bytes that a file of this job may have now, beyond the one of its name that "
        "it takes the place of."
    )
    artifacts: tuple[ArtifactInfo, ...]


# ---------------------------------------------------------------------------------------- webhooks


class Notice(Record):
    """What a webhook is told. The same `id` may come twice; what it says is the same then."""

    id: Identifier
    event: Event
    created: NonNegative = Field(description="When it was noticed, Unix time in seconds.")
    subject: Identifier = Field(description="The job, of `job.failed`; else the run.")
    name: str = Field(description="Of the job or run, for people.")
    detail: OneLine = Field(description="What happened, for people.")
    path: str = Field(description="Page of the job or run, below the service's own address.")


# ------------------------------------------------------------------------------------------ plans


class PlanRequest(Record):
    """What `batchwright plan` takes from files and its command line."""

    profiles: tuple[Profile, ...] = Field(min_length=1, max_length=20)
    runs: tuple[RunSummary, ...] = Field((), max_length=50, description="To learn epochs from.")
    keys: dict[str, Any] = Field(
        default_factory=dict, description="Job keys to change, nested or with dots."
    )


class NewProfile(Record):
    """A profile to keep."""

    name: Name
    profile: Profile


class AdviceTaken(Record):
    """A run follows an advice from here on."""

    epoch: Index = Field(description="First epoch that is trained by its plan, zero-based.")


class Problem(Record):
    """What is wrong, in one line, and what a program may do about it."""

    detail: str
    next: Index | None = Field(
        None,
        description="With 409 to records: sequence number of the one that is wanted next. If it is "
        "`first`, the lines before it differ from those that are stored: all are wanted anew.",
    )
    retry_after: NonNegative | None = Field(
        None, description="With 429: seconds after which to come again."
    )
