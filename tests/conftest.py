"""What tests of several modules share."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from batchwright import cli
from gloo import Crew
from postgres import postgres
from services import clock, service

settings.register_profile("untimed", deadline=None)  # on a busy machine anything takes long
settings.load_profile("untimed")

__all__ = ["clock", "crew", "postgres", "service"]


@pytest.fixture(scope="session")
def crew() -> Iterator[Crew]:
    """Four worker processes for all modules: starting them takes longer than most of their work."""
    crew = Crew(4)
    yield crew
    crew.close()


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Decoded images, once for all tests of a process."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs ``batchwright WORDS`` in this process: exit code, stdout, stderr."""

    def call(*words: object, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["batchwright", *map(str, words)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        done = capsys.readouterr()
        return code, done.out, done.err

    return call
