"""What tests of several modules share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gloo import Crew
from postgres import postgres
from services import clock, service

__all__ = ["clock", "crew", "postgres", "service"]


@pytest.fixture(scope="session")
def crew() -> Iterator[Crew]:
    """Four worker processes for all modules: starting them takes longer than most of their work."""
    crew = Crew(4)
    yield crew
    crew.close()
