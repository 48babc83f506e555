"""The first schema, as it was: `tables` says what it is now."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make all tables."""
    op.create_table(
        "tokens",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(120), nullable=False),
        sa.Column("hash", sa.String(64), nullable=False),
        sa.Column("scopes", sa.String(100), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("used", sa.Float()),
        sa.Column("revoked", sa.Float()),
        sa.PrimaryKeyConstraint("id", name="pk_tokens"),
        sa.UniqueConstraint("hash", name="uq_tokens_hash"),
        sa.UniqueConstraint("name", name="uq_tokens_name"),
    )
    op.create_table(
        "links",
        sa.Column("hash", sa.String(64), nullable=False),
        sa.Column("scopes", sa.String(100), nullable=False),
        sa.Column("expires", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("hash", name="pk_links"),
    )
    op.create_table(
        "sessions",
        sa.Column("hash", sa.String(64), nullable=False),
        sa.Column("scopes", sa.String(100), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("expires", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("hash", name="pk_sessions"),
    )
    op.create_table(
        "runs",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("name", sa.String(120), nullable=False),
        sa.Column("owner", sa.String(120), nullable=False),
        sa.Column("outcome", sa.String(20)),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("changed", sa.Float(), nullable=False),
        sa.Column("next_sequence", sa.BigInteger(), nullable=False),
        sa.Column("counts", sa.Text(), nullable=False),
        sa.Column("advice", sa.Integer(), nullable=False),
        sa.Column("epochs", sa.BigInteger(), nullable=False),
        sa.Column("workers", sa.BigInteger(), nullable=False),
        sa.Column("method", sa.String(40), nullable=False),
        sa.Column("network", sa.Text(), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
        sa.Column("epochs_done", sa.BigInteger(), nullable=False),
        sa.Column("top1", sa.Float()),
        sa.Column("global_batch_size", sa.BigInteger(), nullable=False),
        sa.Column("follows_advice", sa.Boolean(), nullable=False),
        sa.Column("demo", sa.Boolean(), nullable=False),
        sa.Column("job_id", sa.String(36)),
        sa.Column("error", sa.Text()),
        sa.Column("plan", sa.Text(), nullable=False),
        sa.Column("profile", sa.Text()),
        sa.Column("summary", sa.Text()),
        sa.PrimaryKeyConstraint("id", name="pk_runs"),
    )
    op.create_index("ix_runs_created", "runs", ["created"])
    op.create_index("ix_runs_job_id", "runs", ["job_id"])
    op.create_table(
        "records",
        sa.Column("run_id", sa.String(36), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.String(20), nullable=False),
        sa.Column("level", sa.Integer(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id"], ["runs.id"], name="fk_records_run_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run_id", "sequence", name="pk_records"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_records_level", "records", ["run_id", "kind", "level", "sequence"])
    op.create_table(
        "advice",
        sa.Column("run_id", sa.String(36), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("plan", sa.Text(), nullable=False),
        sa.Column("taken", sa.BigInteger()),
        sa.ForeignKeyConstraint(
            ["run_id"], ["runs.id"], name="fk_advice_run_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run_id", "number", name="pk_advice"),
    )
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("name", sa.String(120), nullable=False),
        sa.Column("owner", sa.String(120), nullable=False),
        sa.Column("state", sa.String(20), nullable=False),
        sa.Column("auto", sa.Boolean(), nullable=False),
        sa.Column("approved", sa.Boolean(), nullable=False),
        sa.Column("cancelling", sa.Boolean(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("changed", sa.Float(), nullable=False),
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("profile", sa.Text()),
        sa.Column("plan", sa.Text()),
        sa.Column("run_id", sa.String(36)),
        sa.Column("agent", sa.String(120)),
        sa.Column("lease_key", sa.String(36)),
        sa.Column("lease_expires", sa.Float()),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("lost", sa.Integer(), nullable=False),
        sa.Column("error", sa.Text()),
        sa.PrimaryKeyConstraint("id", name="pk_jobs"),
    )
    op.create_index("ix_jobs_state", "jobs", ["state"])
    op.create_index("ix_jobs_created", "jobs", ["created"])
    op.create_table(
        "agents",
        sa.Column("name", sa.String(120), nullable=False),
        sa.Column("owner", sa.String(120), nullable=False),
        sa.Column("allow", sa.Text(), nullable=False),
        sa.Column("seen", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_agents"),
    )
    op.create_table(
        "profiles",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("name", sa.String(120), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_profiles"),
    )
    op.create_table(
        "audit",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("who", sa.String(120), nullable=False),
        sa.Column("action", sa.String(40), nullable=False),
        sa.Column("subject", sa.String(120), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit"),
    )
    op.create_index("ix_audit_at", "audit", ["at"])
