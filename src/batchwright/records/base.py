"""What all records share: immutability, checked numbers, an estimate with its interval."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Index = Annotated[int, Field(ge=0)]

Precision = Literal["float32", "bfloat16"]
Augmentation = Literal["none", "crop", "crop-flip"]
Method = Literal["plain", "dynamic-batch", "dual-batch", "cyclic", "hybrid"]
Source = Literal["measured", "predicted", "published", "assumed", "asked"]


class Record(BaseModel):
    """Base of all records: immutable, unknown keys refused, finite numbers only."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Estimate(Record):
    """A value with an interval that should hold the truth 95 times in 100."""

    value: float = Field(description="Best guess, in the unit of the field that holds it.")
    low: float = Field(description="Lower end, same unit.")
    high: float = Field(description="Upper end, same unit.")
