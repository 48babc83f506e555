"""The plan, which can tell what it holds."""

from __future__ import annotations

from batchwright.records.plan_fields import PlanFields
from batchwright.records.text.plan_text import explain


class Plan(PlanFields):
    """A header and a table of stages; nothing else passes between deciding and doing.

    Holds no time, host or output path: the same input gives the same bytes everywhere.
    """

    def explain(self) -> str:
        """The plan, choice by choice, and what else was considered, as text for a person."""
        return explain(self)
