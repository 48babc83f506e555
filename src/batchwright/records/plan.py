"""The plan, with its explanation as text."""

from __future__ import annotations

from batchwright.records.plan_fields import PlanFields
from batchwright.records.text.plan_text import explain


class Plan(PlanFields):
    """How to train: a header and a table of stages. Training gets nothing else from planning.

    A plan holds no time of day, host or output path: the same input gives the same bytes
    everywhere.
    """

    def explain(self) -> str:
        """The plan as text for a person: each choice with its reason, and the other candidates."""
        return explain(self)
