"""Writing and reading lines of ``metrics.jsonl``, also those of earlier versions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from batchwright.errors import FileError
from batchwright.records.documents import read_record
from batchwright.records.lines.flat_lines import from_flat, is_flat
from batchwright.records.lines.run_lines import RunLine
from batchwright.records.plan import Plan
from batchwright.records.profile import DataFacts
from batchwright.storage.files import lines_from_end

METRICS = "metrics.jsonl"
_LINE: TypeAdapter[RunLine] = TypeAdapter(RunLine)


def line_text(line: RunLine) -> str:
    """A line's text without line break; values at their defaults are left out."""
    return line.model_dump_json(exclude_defaults=True)


def read_line(text: str | bytes, data: Callable[[], DataFacts] | None = None) -> RunLine:
    """Parse a line: a record, or a flat line of an earlier version.

    Args:
        text: The line.
        data: Returns the facts of the run's data, for flat lines of epochs.

    Raises:
        ValueError: The line is damaged, or no line of a run.
    """
    try:
        return _LINE.validate_json(text, strict=True)
    except ValidationError:
        values = from_json(text, allow_inf_nan=False)
        if isinstance(values, dict) and is_flat(values):
            return from_flat(values, data)
        raise


def sound_line(text: str | bytes) -> RunLine | None:
    """Parse a line; `None` if it is damaged, so that a display never ends a training."""
    try:
        return read_line(text)
    except ValueError:
        return None


def lines_of(
    folder: Path, data: Callable[[], DataFacts] | None = None, *, newest_first: bool = False
) -> Iterator[RunLine]:
    """All whole and undamaged lines of a run folder; none before the file exists.

    Args:
        folder: The folder.
        data: Returns the facts of the run's data, for flat lines; unset: those of its plan.
        newest_first: Whether the last line comes first, so that who stops early reads little.

    Raises:
        FileError: The file cannot be read, or flat lines need the plan and it is missing.
    """

    @cache
    def planned() -> DataFacts:
        return read_record(folder / "plan.json", Plan).data

    try:
        with (folder / METRICS).open("rb") as file:
            whole = (text for text in file if text.endswith(b"\n"))
            for text in lines_from_end(file) if newest_first else whole:
                try:
                    yield read_line(text, data or planned)
                except ValueError:
                    continue
    except FileNotFoundError:
        return
    except OSError as error:
        raise FileError(f"cannot read {folder / METRICS}: {error.strerror}") from None
