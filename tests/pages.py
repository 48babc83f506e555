"""The service's pages as tests look at them: elements, forms, and names that mean harm.

One service is shared by the tests of a file, since an app takes a third of a second to make. Tests
that count what there is take `empty`, a service of their own.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator

import pytest

from batchwright.records.service import RunIntroduction
from samples import make_plan
from services import ADDRESS, HandClock, Service, serving_from
from test_reporting_page import Document

NASTY = "<script>alert(1)</script>\u202e\"'&{{7*7}}"
LONG = "Wagenhuber" * 12


class Page(Document):
    """A page's elements, with what a browser would make of them."""

    def __init__(self, answer):
        assert answer.status_code == 200, answer.text
        super().__init__(re.sub(r"<!DOCTYPE html>", "", answer.text))
        self.source = answer.text

    @property
    def csrf(self):
        return next(one["value"] for one in self.all("input") if one.get("name") == "csrf")

    @property
    def parts(self):
        return {one["data-part"]: one["data-version"] for _, one in self.seen if "data-part" in one}


def browse(browser, path):
    return Page(browser.get(path))


def post(browser, path, token, **fields):
    return browser.post(path, data={"csrf": token, **fields}, headers={"origin": ADDRESS})


def a_named_run(service, name, **changes):
    run = str(uuid.uuid4())
    told = {"name": name, "plan": make_plan()} | changes
    service.store.runs.introduce(run, RunIntroduction(**told), "report")
    return run


@pytest.fixture(scope="module", name="service")
def shared_service(tmp_path_factory) -> Iterator[Service]:
    yield from serving_from(tmp_path_factory.mktemp("service"), HandClock())


@pytest.fixture(name="empty")
def empty_service(tmp_path) -> Iterator[Service]:
    yield from serving_from(tmp_path, HandClock())
