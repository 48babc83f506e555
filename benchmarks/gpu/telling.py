"""A plugin of pytest: tells how each test ended, and ends the process where it can test no more.

    python -m pytest -p benchmarks.gpu.telling ...

A test that takes too long, or after which the GPU refuses everything, ends the process; started
again, pytest goes on with the tests of which nothing is known.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.findings import Findings

STEP, BEGAN = "tests", "began"
FOLDER, COMMIT = "BENCHMARKS_GPU_FOLDER", "BENCHMARKS_GPU_COMMIT"
SECONDS = 120  # that a test may take
AGAIN = 75  # exit code: start once more

_broken = False


def findings() -> Findings:
    """Where tests are told."""
    return Findings(Path(os.environ[FOLDER]), os.environ[COMMIT])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is known."""
    known = {name for name, value in findings().of(STEP).items() if value != BEGAN}
    config.hook.pytest_deselected(items=[one for one in items if one.nodeid in known])
    items[:] = [one for one in items if one.nodeid not in known]


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that cannot be imported here."""
    if report.failed:
        findings().add(STEP, report.nodeid, f"failed: {_last_line(report.longreprtext)}")


def pytest_runtest_logstart(nodeid: str) -> None:
    """Before a test."""
    findings().add(STEP, nodeid, BEGAN)
    faulthandler.dump_traceback_later(SECONDS, exit=True, file=sys.__stderr__)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """After each part of a test: it failed, or it was the last part."""
    global _broken
    if report.failed:
        findings().add(STEP, report.nodeid, f"failed: {_last_line(report.longreprtext)}")
        _broken |= "CUDA error" in report.longreprtext  # all that follow would meet it again
    elif report.skipped or (report.when == "call" and report.passed):
        findings().add(STEP, report.nodeid, report.outcome)


def pytest_runtest_logfinish() -> None:
    """After a test."""
    faulthandler.cancel_dump_traceback_later()
    if _broken:
        sys.__stderr__.flush()
        os._exit(AGAIN)


def _last_line(text: str) -> str:
    """What went wrong, in a line."""
    told = [line[1:].strip() for line in text.splitlines() if line.startswith("E")]
    return (told or text.strip().splitlines() or ["?"])[0][:200]
