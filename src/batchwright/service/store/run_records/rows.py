"""Lines as rows of the table of records, and what they change in the row of their run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection

Row = tuple[int, str, int, str]
"""Sequence number, kind, level, body."""


def rows_of(
    first: int, lines: Sequence[tuple[str, str]], counts: dict[str, list[int]]
) -> list[Row]:
    """Rows of the table; ``counts`` goes on."""
    rows = []
    for sequence, (kind, body) in enumerate(lines, first):
        place = counts.get(kind, (0, -1))[0] + 1
        counts[kind] = [place, sequence]
        rows.append((sequence, kind, (place & -place).bit_length() - 1, body))
    return rows


def insert_rows(connection: Connection, run: str, rows: Sequence[Row]) -> None:
    """Insert rows in each database's quickest way; PostgreSQL's takes a tenth of the usual one."""
    columns = "records (run_id, sequence, kind, level, body)"
    if connection.dialect.name == "sqlite":
        statement = f"INSERT INTO {columns} VALUES (?, ?, ?, ?, ?)"  # noqa: S608 - ours alone
        connection.exec_driver_sql(statement, [(run, *row) for row in rows])
        return
    driver: Any = connection.connection
    with driver.cursor() as cursor, cursor.copy(f"COPY {columns} FROM STDIN") as copy:
        for row in rows:
            copy.write_row((run, *row))


def progress_in(lines: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """What the epoch lines among them change in the run's row."""
    values: dict[str, Any] = {}
    for kind, body in lines:
        if kind != "epoch":
            continue
        line = json.loads(body)
        if isinstance(line.get("epoch"), int):
            values["epochs_done"] = line["epoch"] + 1
        top1, batch = line.get("val/top1"), line.get("batch/global")
        if top1 is not None and 0 <= top1 <= 1:
            values["top1"] = float(top1)
        if isinstance(batch, int) and batch > 0:
            values["global_batch_size"] = batch
    return values
