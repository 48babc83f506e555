"""What all records share: immutability, types of checked numbers, estimates with intervals."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from html import escape
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Literal, LiteralString, NamedTuple, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    JsonValue,
    ValidationInfo,
    field_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from batchwright.errors import ArgumentError
from batchwright.records.registries.methods import METHODS
from batchwright.records.registries.optimizers import OPTIMIZERS
from batchwright.records.registries.registry import Named
from batchwright.records.text.amounts import bytes_of, rate_of, seconds_of
from batchwright.records.text.problems import described, printable
from batchwright.storage.files import write_whole

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
# Whole numbers up to 2^53: floats represent each of these exactly.
Count = Annotated[int, Field(ge=1, le=2**53)]
Index = Annotated[int, Field(ge=0, le=2**53)]
# Figures that people state for a cluster. Larger ones (1e9 s are thirty years) are typing errors,
# and sums and ratios of them would overflow.
StatedSeconds = Annotated[float, Field(ge=0, le=1e9)]
Price = Annotated[float, Field(ge=1e-9, le=1e9)]
RelativeSpeed = Annotated[float, Field(ge=1e-9, le=1e9)]
StatedRate = Annotated[float, Field(ge=1, le=1e18)]
Workers = Annotated[int, Field(ge=1, le=1_000_000)]
Epochs = Annotated[int, Field(ge=1, le=1_000_000)]


# ---------------------------------------------------------------------- amounts with their unit


def _sized(value: object) -> object:
    """``8GiB`` as bytes; any other value unchanged, for the field to accept or refuse."""
    size = bytes_of(value) if isinstance(value, str) else None
    return value if size is None else size


def _timed(value: object) -> object:
    """``2h`` as seconds; any other value unchanged, for the field to accept or refuse."""
    return _time_in("seconds", 1.0, value)


def _time_in(unit: str, length: float, value: object) -> object:
    if not isinstance(value, str):
        return value
    if (seconds := seconds_of(value)) is not None:
        return seconds / length if _has_unit(value) else seconds
    message = "input should be a number of {unit}, or a time such as 90s, 10min or 2h"
    return _plain_number(value, message, unit=unit)


def _rated(value: object) -> object:
    """``10Gbit/s`` as bytes per second; other values as `_plain_number` checks them."""
    if not isinstance(value, str):
        return value
    if (rate := rate_of(value)) is not None:
        return rate
    message = "input should be a number of bytes per second, or a rate such as 1.25GB/s or 10Gbit/s"
    return _plain_number(value, message)


def _plain_number(value: str, message: LiteralString, **words: str) -> str:
    """The text itself if it is a number; else an error with ``message``, filled with ``words``."""
    try:
        float(value)
    except ValueError:
        raise PydanticCustomError("amount", message, words) from None
    return value


def _has_unit(words: str) -> bool:
    return words.strip()[-1:].isalpha()


def _share_or_timed(value: object) -> object:
    """A time as seconds, or a number below 1, which is a share; times below 1 s are refused."""
    seconds = _timed(value)
    if isinstance(value, str) and _has_unit(value) and isinstance(seconds, float) and seconds < 1:
        raise PydanticCustomError("time", "input should be a share, or a time from 1 s on")
    return seconds


Size = Annotated[Count, BeforeValidator(_sized)]
TIMED = BeforeValidator(_timed)
PositiveTime = Annotated[Positive, TIMED]
Time = Annotated[NonNegative, TIMED]
StatedTime = Annotated[StatedSeconds, TIMED]
StatedPositive = Annotated[float, Field(ge=1e-12, le=1e9), TIMED]
Hours = Annotated[Positive, BeforeValidator(lambda value: _time_in("hours", 3600.0, value))]
Rate = Annotated[StatedRate, BeforeValidator(_rated)]
ShareOrTime = Annotated[NonNegative, BeforeValidator(_share_or_timed)]


class _Arguments(dict[str, JsonValue]):
    """Arguments with a hash, as all values of records have one; nobody changes them."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(json.dumps(self, sort_keys=True))


Arguments = Annotated[dict[str, JsonValue], AfterValidator(_Arguments)]
"""Arguments of a call, by name: any JSON values."""
NO_ARGUMENTS = _Arguments()

Precision = Literal["float32", "bfloat16", "float16"]
Augmentation = Literal["none", "flip", "crop", "crop-flip", "resized-crop"]
Method = Annotated[str, Named(METHODS)]
OptimizerName = Annotated[str, Named(OPTIMIZERS)]
AskedMethod = Annotated[str, Named(METHODS, "auto")]
Source = Literal["measured", "predicted", "published", "assumed", "asked"]


def _fail_fast(part: Any, model: type) -> None:
    """Set ``fail_fast`` on all lists in a part of the schema of ``model``, not in other models'."""
    if isinstance(part, list | tuple):
        for inner in part:
            _fail_fast(inner, model)
    elif isinstance(part, dict) and part.get("cls", model) is model:
        if part.get("type") in ("list", "tuple", "set", "frozenset"):
            part["fail_fast"] = True
        for inner in part.values():
            _fail_fast(inner, model)


class Record(BaseModel):
    """Base of all records: immutable, unknown keys refused, finite numbers only.

    Validation of a list ends at its first wrong item: to gather the errors of a million items takes
    minutes and gigabytes, and nobody reads them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Pydantic's schema, with lists whose validation ends at the first wrong item."""
        schema = handler(source)
        _fail_fast(schema, cls)
        return schema


class Estimate(Record):
    """A value with an interval that should hold the truth 95 times in 100."""

    value: float = Field(description="Best guess, in the unit of the field that holds it.")
    low: float = Field(description="Lower end, same unit.")
    high: float = Field(description="Upper end, same unit.")

    def mapped(self, function: Callable[[float], float]) -> Estimate:
        """The estimate of a rising function: its value, and both ends of its interval."""
        return Estimate(
            value=function(self.value), low=function(self.low), high=function(self.high)
        )


def sum_of(parts: Iterable[tuple[float, Estimate | None]], over: float = 1.0) -> Estimate | None:
    """The sum of estimates times their weights, divided by ``over``.

    `None` if one is missing, or where no number holds the sum. The interval assumes that their
    errors are fully correlated.
    """
    listed = list(parts)
    if any(one is None for _, one in listed):
        return None
    value, low, high = (
        sum(weight * getattr(one, end) for weight, one in listed) / over
        for end in ("value", "low", "high")
    )
    return Estimate(value=value, low=low, high=high) if isfinite(high) else None


class Keys(Record):
    """Base of records that people fill in: a job and its parts."""

    @field_validator("*", mode="before")
    @classmethod
    def _default_for_null(cls, value: Any, info: ValidationInfo) -> Any:
        """Null gives a key its default."""
        if value is not None or info.field_name is None:
            return value
        field = cls.model_fields[info.field_name]
        return None if field.is_required() else field.default

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool_for_number(cls, value: Any, field: ValidationInfo) -> Any:
        """Refuse true and false for a number: Python would count them as 1 and 0."""
        several = type(value) is tuple or type(value) is list
        found = any(type(part) is bool for part in value) if several else type(value) is bool
        if found and field.field_name is not None:
            kinds = _kinds_in(cls.model_fields[field.field_name].annotation)
            if bool not in kinds and (int in kinds or float in kinds):
                raise PydanticCustomError("yes_or_no", "this key is no yes or no")
        return value


def _kinds_in(annotation: Any) -> list[Any]:
    parts = get_args(annotation)
    return [kind for part in parts for kind in _kinds_in(part)] if parts else [annotation]


class Document(Record):
    """Base of the records that the verbs return; each is kept in a file of its own."""

    def _facts(self) -> list[tuple[str, str]]:
        """The record's main values as (name, value), for `repr` and notebooks."""
        raise NotImplementedError

    def _tables(self) -> list[Shown]:
        """Tables that a notebook shows below the facts."""
        return []

    def save(self, path: str | Path) -> None:
        """Write the record as JSON, as the command line does; `batchwright.load` reads it again.

        Raises:
            ArgumentError: ``path`` is neither a text nor a `Path`.
            FileError: The folder is missing or not writable, or the disk is full.
        """
        if not isinstance(path, str | Path):
            raise ArgumentError(f"save takes the path of a file, not {described(path)}")
        write_whole(Path(path), record_text(self).encode())

    def __repr__(self) -> str:
        facts = ", ".join(f"{name} {value}" for name, value in self._facts())
        return f"<{type(self).__name__}: {printable(facts)}>"

    def __str__(self) -> str:
        return repr(self)

    def _repr_html_(self) -> str:
        shown = "".join(table.html for table in self._tables())
        return html_table(type(self).__name__, self._facts()) + shown


def record_text(record: Record) -> str:
    """The record as the JSON text of its file."""
    return record.model_dump_json(indent=2) + "\n"


_CELL = "text-align:left;padding:1px 12px 1px 0"
"""Style of a table's cell. Colours are the notebook's own, light or dark."""


class Shown(NamedTuple):
    """A table of a few rows, for a notebook.

    Attributes:
        name: The table's caption.
        head: Title of each column.
        rows: Cells of each row, one for each column.
        bold: Index of the row that is set in bold; -1: none.
    """

    name: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    bold: int = -1

    @property
    def html(self) -> str:
        """The table as HTML, without scripts and with all text escaped."""

        def line(tag: str, cells: Sequence[str], style: str = "") -> str:
            each = (f"<{tag} style='{_CELL}{style}'>{escape(printable(c))}</{tag}>" for c in cells)
            return f"<tr>{''.join(each)}</tr>"

        body = "".join(
            line("td", row, ";font-weight:bold" * (index == self.bold))
            for index, row in enumerate(self.rows)
        )
        caption = f"<caption style='{_CELL}'>{escape(self.name)}</caption>"
        return f"<table>{caption}{line('th', self.head)}{body}</table>"


def html_table(name: str, rows: list[tuple[str, str]]) -> str:
    """Names and values as a small HTML table, for a notebook."""
    body = "".join(
        f"<tr><th style='{_CELL}'>{escape(printable(name))}</th>"
        f"<td style='{_CELL}'>{escape(printable(value))}</td></tr>"
        for name, value in rows
    )
    return f"<table><caption style='{_CELL}'>{escape(name)}</caption>{body}</table>"
