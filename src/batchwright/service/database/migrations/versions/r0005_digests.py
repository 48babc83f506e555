"""Of a run's lines the digest is kept, to notice where a folder holds others than were sent."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; of lines that are stored nobody knows the digest."""
    op.add_column("runs", sa.Column("digest", sa.String(64)))
