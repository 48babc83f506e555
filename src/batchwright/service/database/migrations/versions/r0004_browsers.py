"""Browsers have names, so that what one submits is not everybody's."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns; who is signed in already stays without a name."""
    for table in ("links", "sessions"):
        op.add_column(table, sa.Column("name", sa.String(120)))
