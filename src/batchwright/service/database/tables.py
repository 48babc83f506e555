"""The tables. Documents (plans, profiles, summaries) are stored as JSON text.

Times are seconds of Unix time. Of secrets the SHA-256 is stored: they are random and long, so no
slow hash is needed.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    or_,
)

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    }
)

tokens = Table(
    "tokens",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", String(120), nullable=False, unique=True),
    Column("hash", String(64), nullable=False, unique=True),
    Column("scopes", String(100), nullable=False),  # words, separated by blanks
    Column("created", Float, nullable=False),
    Column("used", Float),
    Column("revoked", Float),
)

links = Table(  # one-time sign-in links for browsers
    "links",
    metadata,
    Column("hash", String(64), primary_key=True),
    Column("scopes", String(100), nullable=False),
    Column("expires", Float, nullable=False),
    Column("name", String(120)),  # of who is to follow it; null: nobody said
)

sessions = Table(  # browsers that are signed in
    "sessions",
    metadata,
    Column("hash", String(64), primary_key=True),
    Column("scopes", String(100), nullable=False),
    Column("created", Float, nullable=False),
    Column("expires", Float, nullable=False),
    Column("name", String(120)),  # of the link
)

runs = Table(
    "runs",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("name", String(120), nullable=False),
    Column("owner", String(120), nullable=False),  # name of the token that introduced it
    Column("outcome", String(20)),  # null while it runs, else as in `RunOutcome`, or of `GONE`
    Column("created", Float, nullable=False, index=True),
    Column("changed", Float, nullable=False),
    Column("next_sequence", BigInteger, nullable=False),
    # JSON: for each kind how many records are stored and the sequence number of the newest
    Column("counts", Text, nullable=False),
    Column("digest", String(64)),  # of the lines that are stored; null where it is not known
    Column("advice", Integer, nullable=False),  # number of the newest advice, 0 without
    # From the plan, so that a list of runs opens no plan.
    Column("epochs", BigInteger, nullable=False),
    Column("workers", BigInteger, nullable=False),
    Column("method", String(40), nullable=False),
    Column("network", Text, nullable=False),
    Column("data", Text, nullable=False),
    # From the newest epoch, or as planned.
    Column("epochs_done", BigInteger, nullable=False),
    Column("top1", Float),
    Column("global_batch_size", BigInteger, nullable=False),
    Column("follows_advice", Boolean, nullable=False),
    Column("demo", Boolean, nullable=False),
    Column("job_id", String(36), index=True),
    Column("error", Text),
    Column("plan", Text, nullable=False),
    Column("profile", Text),
    Column("summary", Text),
)

DELETED, EXPIRED = GONE = ("deleted", "expired")
"""Outcomes of runs that are not found any more, while what they hold is removed. The row of a run
that somebody deleted stays for a while, so that its reporter cannot bring it back."""

NOT_DELETED = or_(runs.c.outcome.is_(None), runs.c.outcome.not_in(GONE))
"""Condition: a run can be found."""

records = Table(
    "records",
    metadata,
    Column("run_id", String(36), ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
    Column("sequence", BigInteger, primary_key=True),
    Column("kind", String(20), nullable=False),
    # How often the record's place among those of its kind, from 1, can be halved: those of level L
    # and above are every 2^L-th, so a long run is drawn from few of its records.
    Column("level", Integer, nullable=False),
    Column("body", Text, nullable=False),
    Index("ix_records_level", "run_id", "kind", "level", "sequence"),
    sqlite_with_rowid=False,  # ordered by its key on disk: a run's newest records lie together
)

advice = Table(
    "advice",
    metadata,
    Column("run_id", String(36), ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("created", Float, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("reason", Text, nullable=False),
    Column("plan", Text, nullable=False),
    Column("taken", BigInteger),
)

jobs = Table(
    "jobs",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("name", String(120), nullable=False),
    Column("owner", String(120), nullable=False),
    Column("state", String(20), nullable=False),
    Column("auto", Boolean, nullable=False),
    Column("approved", Boolean, nullable=False),
    Column("cancelling", Boolean, nullable=False),
    Column("created", Float, nullable=False),
    Column("changed", Float, nullable=False),
    Column("ended", Float),  # null until it is done, failed or cancelled
    Column("job", Text, nullable=False),  # JSON of the whole `Job`
    Column("needs", Text),  # JSON of `Needs`, what the job's keys say among them
    Column("keep_seconds", Float),  # null: as the settings say
    Column("profile", Text),
    Column("plan", Text),
    Column("run_id", String(36)),
    # As `Standing` has them.
    Column("agent", String(120)),
    Column("lease_key", String(36)),
    Column("lease_expires", Float),
    Column("heard", Boolean, nullable=False),
    Column("kept", Boolean, nullable=False),
    Column("trained", Float, nullable=False),
    Column("furthest", Float, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("lost", Integer, nullable=False),
    Column("error", Text),
    # Each list reads what it shows: all jobs, those of a state, the live ones and those that ended
    # by when, an agent's own.
    Index("ix_jobs_created_id", "created", "id"),
    Index("ix_jobs_state_created", "state", "created", "id"),
    Index("ix_jobs_ended_id", "ended", "id"),
    Index("ix_jobs_agent_ended", "agent", "ended"),
)

refusals = Table(  # agents that gave a job back because they cannot carry it out
    "refusals",
    metadata,
    Column("job_id", String(36), ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("agent", String(120), primary_key=True),
    Column("reason", Text, nullable=False),
    Index("ix_refusals_agent", "agent"),
)

artifacts = Table(  # files of jobs; each lies in an object of its own, named by `id`
    "artifacts",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("job_id", String(36), nullable=False, index=True),  # may be gone: then this is, soon
    Column("name", String(40), nullable=False),
    Column("state", String(10), nullable=False, index=True),  # as `store.artifacts` says
    Column("size", BigInteger, nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("created", Float, nullable=False),
)

notices = Table(  # to a webhook: those that wait, were sent, or were given up
    "notices",
    metadata,
    Column("key", String(120), primary_key=True),  # of the event, which is noted once
    Column("body", Text, nullable=False),  # JSON of a `Notice`
    Column("created", Float, nullable=False),
    Column("tries", Integer, nullable=False),
    Column("due", Float, index=True),  # when to try next; null: sent, or given up
)

agents = Table(
    "agents",
    metadata,
    Column("name", String(120), primary_key=True),
    Column("owner", String(120), nullable=False),
    Column("allow", Text, nullable=False),  # JSON list
    Column("offer", Text),  # JSON of `Offer`
    Column("folder", String(36)),  # identifies its folder; null: it did not say
    Column("session", String(36)),  # identifies its process
    Column("seen", Float, nullable=False),
)

profiles = Table(  # uploaded on the planner's page
    "profiles",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("name", String(120), nullable=False),
    Column("created", Float, nullable=False),
    Column("body", Text, nullable=False),
    Column("owner", String(120)),  # name of the token that uploaded it
)

audit = Table(
    "audit",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("at", Float, nullable=False, index=True),
    Column("who", String(120), nullable=False),  # a token's name, or `browser`, or `operator`
    Column("action", String(40), nullable=False),  # such as `run.end`, `job.cancel`
    Column("subject", String(120), nullable=False),
    Column("detail", Text, nullable=False),
)
