"""Logs as JSON, one object a line, for whatever gathers them."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TextIO

NAMES = ("batchwright.service", "uvicorn.error")


class JsonLines(logging.Formatter):
    """Time (UTC), level, what happened, the fields that were given, and a traceback if any."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        values = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            values["error"] = self.formatException(record.exc_info)
        return json.dumps(values, default=str)


def log_to(stream: TextIO | None = None, level: str = "info") -> None:
    """Send the service's log to ``stream``, standard error if none is given.

    Args:
        stream: Where lines go.
        level: `debug`, `info`, `warning` or `error`.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines())
    for name in NAMES:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level.upper())
        logger.propagate = False
