"""A value that the plan chooses, together with the reason for it."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

from batchwright.records import Alternative, Reason, Source

Value = TypeVar("Value")


class Chosen(NamedTuple, Generic[Value]):
    """A chosen value and the reason for it."""

    value: Value  # the chosen value
    why: str  # the reason, in a sentence or more
    # Where the value comes from: measured, predicted, published, assumed or asked for.
    source: Source
    reference: str = ""  # the publication that the value is taken from; empty without one
    alternatives: tuple[Alternative, ...] = ()  # other values that were considered

    def reason(self, choice: str, shown: str = "") -> Reason:
        """The reason as a record of the plan.

        Args:
            choice: What was chosen, such as ``learning rate``.
            shown: The value with its unit; unset: the value as it prints.
        """
        return Reason(
            choice=choice,
            value=shown or str(self.value),
            why=self.why,
            source=self.source,
            reference=self.reference,
            alternatives=self.alternatives,
        )
