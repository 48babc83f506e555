"""Profiles belong to the token that uploaded them; to nobody, where that is not known."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    op.add_column("profiles", sa.Column("owner", sa.String(120)))
