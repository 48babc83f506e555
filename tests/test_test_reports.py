"""What a process that runs tests tells the one that hands them out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

import conftest


@pytest.mark.parametrize(
    ("call", "told"), [("passed", ["call"]), ("failed", ["setup", "call", "teardown"])]
)
def test_only_of_a_test_that_passes_the_call_alone_is_told(
    monkeypatch: pytest.MonkeyPatch, call: str, told: list[str]
) -> None:
    """What the end of a failing one has printed is shown with its error."""
    reports = [
        SimpleNamespace(when=when, passed=when != "call" or call == "passed", duration=0.0)
        for when in ("setup", "call", "teardown")
    ]
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    monkeypatch.setattr(conftest, "runtestprotocol", lambda *_, **__: reports)
    item: Any = Mock()
    assert conftest.pytest_runtest_protocol(item, None)
    calls = item.ihook.pytest_runtest_logreport.call_args_list
    assert [one.kwargs["report"].when for one in calls] == told
