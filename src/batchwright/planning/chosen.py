"""What a choice comes to, said where it is made."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

from batchwright.records import Alternative, Reason, Source

Value = TypeVar("Value")


class Chosen(NamedTuple, Generic[Value]):
    """A value, and why it is that one.

    Attributes:
        value: What was chosen.
        why: In a sentence or more.
        source: Where it comes from.
        reference: Who published it, if anybody.
        alternatives: What else there was.
    """

    value: Value
    why: str
    source: Source
    reference: str = ""
    alternatives: tuple[Alternative, ...] = ()

    def reason(self, choice: str, shown: str = "") -> Reason:
        """As a record of the plan; ``shown`` is the value with its unit."""
        return Reason(
            choice=choice,
            value=shown or str(self.value),
            why=self.why,
            source=self.source,
            reference=self.reference,
            alternatives=self.alternatives,
        )
