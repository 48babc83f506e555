"""The time, as the store is told it."""

from __future__ import annotations

from collections.abc import Callable

Clock = Callable[[], float]
"""Unix time in seconds."""
