"""Leases that are lost only to another agent; lists of jobs that read what they show."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_ENDED = "state IN ('done', 'failed', 'cancelled')"


def upgrade() -> None:
    """Add what a lease and an agent are known by, and exchange the indexes."""
    op.add_column("jobs", sa.Column("ended", sa.Float()))
    op.add_column("jobs", sa.Column("needs", sa.Text()))
    op.add_column("jobs", sa.Column("keep_seconds", sa.Float()))
    for name in ("heard", "kept"):
        default = sa.false()
        op.add_column("jobs", sa.Column(name, sa.Boolean(), nullable=False, server_default=default))
    for name in ("trained", "furthest"):
        op.add_column("jobs", sa.Column(name, sa.Float(), nullable=False, server_default="0"))
    op.add_column("agents", sa.Column("offer", sa.Text()))
    op.add_column("agents", sa.Column("folder", sa.String(36)))
    op.add_column("agents", sa.Column("session", sa.String(36)))
    op.execute(f"UPDATE jobs SET ended = changed WHERE {_ENDED}")  # noqa: S608 - all our own words
    op.drop_index("ix_jobs_state", table_name="jobs")
    op.drop_index("ix_jobs_created", table_name="jobs")
    op.create_index("ix_jobs_created_id", "jobs", ["created", "id"])
    op.create_index("ix_jobs_state_created", "jobs", ["state", "created", "id"])
    op.create_index("ix_jobs_ended_id", "jobs", ["ended", "id"])
    op.create_index("ix_jobs_agent_ended", "jobs", ["agent", "ended"])
    op.create_table(
        "refusals",
        sa.Column("job_id", sa.String(36), nullable=False),
        sa.Column("agent", sa.String(120), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name="fk_refusals_job_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", "agent", name="pk_refusals"),
    )
    op.create_index("ix_refusals_agent", "refusals", ["agent"])
