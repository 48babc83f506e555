"""Packages that are there only if an extra was installed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from batchwright.errors import ArgumentError


def needed(module: str, extra: str) -> Any:
    """Import what an extra installs.

    Raises:
        ArgumentError: It is not installed; the message has the line that does it.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name.partition(".")[0]):
            raise
        raise ArgumentError(
            f"{module.partition('.')[0]} is not installed: pip install 'batchwright[{extra}]'"
        ) from None
