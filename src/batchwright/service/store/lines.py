"""Batches of records from outside: read in one go, the first mistake told with its place."""

from __future__ import annotations

from collections.abc import Callable

from pydantic import ValidationError
from pydantic_core import from_json, to_json

from batchwright.records import DataFacts
from batchwright.records.lines.line_files import read_line
from batchwright.records.service import MAX_RECORDS, RecordBatch
from batchwright.records.text.problems import first_problem
from batchwright.service.problems import Refused, TooLarge

LONGEST_LINE = 2**20
"""Characters of a line: an epoch of a thousand workers has some 300,000."""
MAX_KEYS = 8000
"""Most keys of a flat line; a record has a few, and a list of workers."""
MAX_BYTES = 2 * 2**20
"""Largest batch; our reporters send half as much, or one line."""

_MAX_PROBLEMS = 100
"""Mistakes in one line among which the first is looked for: each takes memory."""
_MAX_TEXT = 280
"""Longest message, in characters."""


def read_batch(body: bytes, data: Callable[[], DataFacts]) -> RecordBatch:
    """The records of a request.

    Args:
        body: Its JSON.
        data: What the run trains on, for epochs of reporters of earlier versions.

    Raises:
        TooLarge: There is more than `MAX_BYTES`.
        Refused: Something is no record that a run writes; the message names its number and field.
    """
    if len(body) > MAX_BYTES:
        raise TooLarge(f"a batch of records may have {MAX_BYTES:,} bytes: send fewer at once")
    try:
        return RecordBatch.model_validate_json(body, strict=True)
    except ValidationError:
        return _read_one_by_one(body, data)


def _read_one_by_one(body: bytes, data: Callable[[], DataFacts]) -> RecordBatch:
    """As `read_batch`, slower: it takes flat lines of earlier versions, and tells what is wrong."""
    try:
        values = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise Refused(f"the body is no JSON: {error}") from None
    if not isinstance(values, dict) or not isinstance(values.get("records"), list):
        raise Refused("the body is no batch of records: it has `first` and a list `records`")
    unknown = next((key for key in values if key not in RecordBatch.model_fields), None)
    if unknown is not None:
        raise Refused(f"{unknown[:40]} is unknown")
    told, first = values["records"], values.get("first")
    if len(told) > MAX_RECORDS:
        raise Refused(f"records: {len(told):,}, where {MAX_RECORDS:,} are taken at once")
    number = first if isinstance(first, int) else 0
    values["records"] = tuple(_line(one, number + place, data) for place, one in enumerate(told))
    try:
        return RecordBatch.model_validate(values, strict=True)
    except ValidationError as error:
        raise Refused(first_problem(error, "")) from None


def _line(values: object, number: int, data: Callable[[], DataFacts]) -> object:
    if isinstance(values, dict) and len(values) > MAX_KEYS:
        raise Refused(f"record {number}: {len(values):,} keys, where {MAX_KEYS:,} are taken")
    text = to_json(values)
    if len(text) > LONGEST_LINE:
        told = f"{len(text):,} characters, where {LONGEST_LINE:,} are taken"
        raise Refused(f"record {number}: {told}")
    try:
        return read_line(text, data)
    except ValidationError as error:
        count = error.error_count()
        few = count <= _MAX_PROBLEMS
        problem = first_problem(error, "") if few else f"{count:,} keys are wrong or unknown"
    except ValueError as error:
        problem = str(error)
    raise Refused(f"record {number}: {problem}"[:_MAX_TEXT])
