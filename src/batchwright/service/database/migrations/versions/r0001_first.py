"""The first schema. New databases are made from `tables`, so nothing is left to do for it."""

from __future__ import annotations

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Change nothing: whoever is at this revision has the tables."""
