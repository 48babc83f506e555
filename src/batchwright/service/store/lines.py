"""Batches of records from clients: parsed and checked in one call; of a wrong one the error names
the first record and field that is wrong.
"""

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
"""Maximum characters of a line: an epoch of a thousand workers has some 300,000."""
MAX_KEYS = 8000
"""Maximum keys of a flat line; a record has a few, and a list of workers."""
MAX_BYTES = 2 * 2**20
"""Maximum bytes of a batch; our reporters send half as much, or one line."""

_MAX_PROBLEMS = 100
"""Mistakes in a line up to which the first one is described: each takes memory."""
_MAX_TEXT = 280
"""Maximum characters of a message."""


def read_batch(body: bytes, data: Callable[[], DataFacts]) -> RecordBatch:
    """The batch of records in a request.

    Args:
        body: The request's JSON.
        data: Returns the data set of the run, for epochs of reporters of earlier versions.

    Raises:
        TooLarge: The body is larger than `MAX_BYTES`.
        Refused: A record is wrong; the message names its number and field.
    """
    if len(body) > MAX_BYTES:
        raise TooLarge(f"a batch of records may have {MAX_BYTES:,} bytes: send fewer at once")
    try:
        return RecordBatch.model_validate_json(body, strict=True)
    except ValidationError:
        return _read_one_by_one(body, data)


def _read_one_by_one(body: bytes, data: Callable[[], DataFacts]) -> RecordBatch:
    """`read_batch`, slower: takes flat lines of earlier versions too, and describes mistakes."""
    try:
        values = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise Refused(f"the body is no JSON: {error}") from None
    if not isinstance(values, dict) or not isinstance(values.get("records"), list):
        raise Refused("the body is no batch of records: it has `first` and a list `records`")
    unknown = next((key for key in values if key not in RecordBatch.model_fields), None)
    if unknown is not None:
        raise Refused(f"{unknown[:40]} is unknown")
    lines, first = values["records"], values.get("first")
    if len(lines) > MAX_RECORDS:
        raise Refused(f"records: {len(lines):,}, where {MAX_RECORDS:,} are taken at once")
    numbered = enumerate(lines, first if isinstance(first, int) else 0)
    values["records"] = tuple(_line(line, number, data) for number, line in numbered)
    try:
        return RecordBatch.model_validate(values, strict=True)
    except ValidationError as error:
        raise Refused(first_problem(error, "")) from None


def _line(values: object, number: int, data: Callable[[], DataFacts]) -> object:
    """A record, parsed; `Refused` names its number and field."""
    if isinstance(values, dict) and len(values) > MAX_KEYS:
        raise Refused(f"record {number}: {len(values):,} keys, where {MAX_KEYS:,} are taken")
    text = to_json(values)
    if len(text) > LONGEST_LINE:
        raise Refused(
            f"record {number}: {len(text):,} characters, where {LONGEST_LINE:,} are taken"
        )
    try:
        return read_line(text, data)
    except ValidationError as error:
        count = error.error_count()
        few = count <= _MAX_PROBLEMS
        problem = first_problem(error, "") if few else f"{count:,} keys are wrong or unknown"
    except ValueError as error:
        problem = str(error)
    raise Refused(f"record {number}: {problem}"[:_MAX_TEXT])
