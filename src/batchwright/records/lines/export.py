"""A run's metrics under the flat names of experiment trackers, as a table or JSON lines."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

from batchwright.errors import FileError
from batchwright.records.documents import refuse_no_path, write_text
from batchwright.records.lines.flat_lines import flat_values
from batchwright.records.lines.line_files import METRICS, lines_of
from batchwright.records.lines.lost_lines import lines_that_count
from batchwright.storage.files import is_there


def metrics(run: str | Path, out: str | Path | None = None) -> list[dict[str, Any]]:
    """The lines of a run, each as one flat mapping: ``{"kind": "epoch", "val/top1": 0.9, ...}``.

    Of what was trained again, after a kill, the last time is there.

    Args:
        run: The run's folder; the run may still go on.
        out: File to write as well: a table if its name ends in ``.csv``, else one JSON object per
            line. ``-`` is standard output.

    Raises:
        FileError: The folder holds no run, or the file cannot be written.
    """
    refuse_no_path(run, "run")
    refuse_no_path(out, "out")
    folder = Path(run)
    if not is_there(folder / METRICS):
        raise FileError(f"{folder} holds no {METRICS}: name the folder of a run that has begun")
    rows = [flat_values(line) for line in lines_that_count(lines_of(folder))]
    if out is not None:
        if Path(out).suffix.lower() == ".csv":
            text = _table(rows)
        else:
            text = "".join(json.dumps(row) + "\n" for row in rows)
        write_text(text, out)
    return rows


def _table(rows: list[dict[str, Any]]) -> str:
    """CSV with a column for each name of any line; a cell is empty where its line lacks it."""
    names = dict.fromkeys(name for row in rows for name in row)
    file = io.StringIO()
    writer = csv.DictWriter(file, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()
