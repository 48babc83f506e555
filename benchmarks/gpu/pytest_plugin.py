"""A pytest plugin that records how each test ended, and ends a process that can test no more.

    python -m pytest -p benchmarks.gpu.pytest_plugin ...

A test that takes too long, or after which the GPU refuses everything, ends the process. Started
again, pytest runs the tests without a recorded result.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.findings import (
    AGAIN,
    BEGAN,
    COMMIT,
    FAILED,
    FOLDER,
    SECONDS,
    TESTS,
    Findings,
)

_broken = False


def findings() -> Findings:
    """The findings that record the tests."""
    return Findings(Path(os.environ[FOLDER]), os.environ[COMMIT])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests whose results are recorded."""
    known = {name for name, value in findings().of(TESTS).items() if value != BEGAN}
    config.hook.pytest_deselected(items=[one for one in items if one.nodeid in known])
    items[:] = [one for one in items if one.nodeid not in known]


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Record a file that cannot be imported here."""
    if report.failed:
        findings().add(TESTS, report.nodeid, f"{FAILED}{_last_line(report.longreprtext)}")


def pytest_runtest_logstart(nodeid: str) -> None:
    """Record that a test has begun, and limit its time."""
    findings().add(TESTS, nodeid, BEGAN)
    faulthandler.dump_traceback_later(SECONDS, exit=True, file=sys.__stderr__)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record a part of a test that failed, or the result of the whole test."""
    global _broken
    if report.failed:
        findings().add(TESTS, report.nodeid, f"{FAILED}{_last_line(report.longreprtext)}")
        _broken |= "CUDA error" in report.longreprtext  # all further tests would fail, too
    elif report.skipped or (report.when == "call" and report.passed):
        findings().add(TESTS, report.nodeid, report.outcome)


def pytest_runtest_logfinish() -> None:
    """End the time limit, and the process if the GPU is broken."""
    faulthandler.cancel_dump_traceback_later()
    if _broken:
        sys.__stderr__.flush()
        os._exit(AGAIN)


def _last_line(text: str) -> str:
    """The line of a report that says what went wrong."""
    told = [line[1:].strip() for line in text.splitlines() if line.startswith("E")]
    return (told or text.strip().splitlines() or ["?"])[0][:200]
