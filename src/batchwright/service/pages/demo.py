"""The demo run: a real training, shipped with the program, stored as if it had reported here."""

from __future__ import annotations

import gzip
import json
from importlib.resources import files
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Response
from fastapi.responses import RedirectResponse
from pydantic_core import to_json

from batchwright.records.service import MAX_RECORDS, RunEnd, RunIntroduction
from batchwright.service.access import StoreDep, check_form, need_page
from batchwright.service.store import Store
from batchwright.service.store.lines import read_batch
from batchwright.service.store.tokens import Caller

router = APIRouter(include_in_schema=False)

DEMO = "00000000-0000-4000-8000-00000000de30"
"""Identifier of the demo run, so that loading it again changes nothing."""
OWNER = "demo"


@router.post("/demo", dependencies=[Depends(check_form)])
def load(store: StoreDep, caller: Annotated[Caller, need_page("report", "submit")]) -> Response:
    """Load the demo run, if it is not there, and show it."""
    load_demo(store)
    store.audit.note(caller.name, "demo.load", DEMO)
    return RedirectResponse(f"/runs/{DEMO}", 303)


def load_demo(store: Store) -> None:
    """Store the demo run as its reporter would have; what is stored already stays."""
    run = demo()
    introduction = RunIntroduction.model_validate(run["introduction"])
    info = store.runs.introduce(DEMO, introduction, OWNER, demo=True)
    lines = run["records"]
    for first in range(info.records, len(lines), MAX_RECORDS):
        body = to_json({"first": first, "records": lines[first : first + MAX_RECORDS]})
        store.records.append(DEMO, read_batch(body, lambda: introduction.plan.data))
    if info.state != "finished":
        store.runs.end(DEMO, RunEnd.model_validate(run["end"]))


def demo() -> dict[str, Any]:
    """The demo run: `introduction`, `records` and `end`, as a reporter sends them."""
    packed = files("batchwright.service.pages") / "demo.json.gz"
    run: dict[str, Any] = json.loads(gzip.decompress(packed.read_bytes()))
    return run
