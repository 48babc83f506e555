"""Jobs and agents: what waits, who works on what, and the plan that wants approval."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any, get_args

import yaml
from fastapi import APIRouter, Depends, Form, Query, Request, Response
from fastapi.responses import RedirectResponse

from batchwright.errors import BatchwrightError, one_line
from batchwright.records import Job
from batchwright.records.documents import change_job
from batchwright.records.job import other_keys_come
from batchwright.records.service import Identifier, JobInfo, JobState, RunInfo
from batchwright.records.text.formatting import counted
from batchwright.records.text.problems import printable
from batchwright.records.text.yaml_text import parse_yaml, yaml_problem
from batchwright.reporting.pages.live_page import Part, plan_parts
from batchwright.reporting.pages.page import job_text
from batchwright.service.access import (
    PageReader,
    PageSubmitter,
    StoreDep,
    check_form,
    csrf_of,
    store_of,
)
from batchwright.service.api import jobs as api
from batchwright.service.job_states import ENDED
from batchwright.service.pages.job_files import files_part
from batchwright.service.pages.rendering import (
    Have,
    Live,
    answer_live,
    digest_of,
    fill,
    render,
    sentence,
)
from batchwright.service.problems import NotFound
from batchwright.service.store import Store
from batchwright.service.store.tokens import Caller

router = APIRouter(prefix="/jobs", include_in_schema=False)

MAX_ROWS = 50

LONGEST_JOB = 64 * 1024
"""Characters of a job."""
LONGEST_VALUE = 8 * 1024
"""Characters of a value: reading a number takes the square of its digits."""
MOST_PARTS = 4000
"""Keys, values and brackets of a job; the parser is Python, and took 9 s for 64 KiB of `?,`."""
DEEPEST_JOB = 8
"""Levels of lists and maps; a job has four."""

EXAMPLE = """data: digits
network: resnet8
epochs: 10
method: dynamic-batch
goal:
  objective: knee
"""

STEPS = ("queued", "probing", "planned", "training", "done")
"""The way of a job that goes well."""

SAYS = {
    "queued": "It waits for an agent that may carry it out.",
    "probing": "An agent measures it.",
    "planned": "Its plan waits for approval.",
    "training": "An agent trains it.",
    "done": "It is done.",
    "failed": "It failed, for the reason below.",
    "cancelled": "It was cancelled.",
}

Before = Annotated[Identifier | None, Query()]


# --------------------------------------------------------------------------------------- the list


@router.get("")
def jobs_page(
    request: Request,
    caller: PageReader,
    state: Annotated[str, Query(max_length=20)] = "",
    before: Before = None,
) -> Response:
    """The page."""
    return _page(request, caller, _state(state), before)


@router.get("/rows")
def jobs_rows(
    request: Request,
    caller: PageReader,
    state: Annotated[str, Query(max_length=20)] = "",
    before: Before = None,
    have: Have = "",
) -> Response:
    """What has changed in the lists."""
    told = _lists(request, caller, _state(state), before)
    etag = digest_of(*(part.content for part in told))
    return answer_live(request, caller, have, etag, lambda: Live(_says(request), told))


@router.post("", dependencies=[Depends(check_form)])
def submit_job(
    request: Request,
    store: StoreDep,
    caller: PageSubmitter,
    job: Annotated[str, Form()] = "",
    name: Annotated[str, Form()] = "",
    auto: Annotated[str, Form()] = "",
) -> Response:
    """Queue a job, and show it."""
    told, errors = printable(" ".join(name.split())), {}
    try:
        read = job_of_text(job)
        if len(told) > 120:
            errors["name"] = "A name has at most 120 characters."
    except JobTextError as error:
        errors["job"] = str(error)
    if errors:
        filled = {"job": job, "name": told, "auto": auto, "errors": errors}
        return _page(request, caller, None, None, 422, **filled)
    told = told or printable(f"{read.network} on {read.data}")[:120]
    found = store.jobs.submit(told, read, auto=bool(auto), owner=caller.name)
    store.audit.note(caller.name, "job.submit", found.id, told)
    return RedirectResponse(f"/jobs/{found.id}", 303)


def _state(word: str) -> JobState | None:
    return next((one for one in get_args(JobState) if one == word), None)


def _says(request: Request) -> str:
    going, waiting = store_of(request).jobs.going_and_waiting()
    words = f"{counted(going, 'job')} going on"
    return f"{words}, {counted(waiting, 'plan')} waiting for approval." if waiting else f"{words}."


def _page(
    request: Request,
    caller: Caller,
    state: JobState | None,
    before: str | None,
    status: int = 200,
    **filled: object,
) -> Response:
    form = {"job": EXAMPLE, "name": "", "auto": "", "errors": {}} | filled
    asked = {"state": state, "before": before}
    query = "&".join(f"{name}={value}" for name, value in asked.items() if value)
    return render(
        request,
        "jobs.html",
        caller,
        status=status,
        state=state,
        states=get_args(JobState),
        form=form,
        fragment=f"/jobs/rows?{query}",
        live=Live(_says(request), _lists(request, caller, state, before)),
    )


def _lists(
    request: Request, caller: Caller, state: JobState | None, before: str | None
) -> list[Part]:
    store = store_of(request)
    found = store.jobs.list(MAX_ROWS + 1, before, state)
    shown, more = found[:MAX_ROWS], len(found) > MAX_ROWS
    older = f"/jobs?{f'state={state}&' if state else ''}before={shown[-1].id}" if more else ""
    rows = fill(
        request,
        "jobs_rows.html",
        caller,
        jobs=shown,
        filtered=state is not None or before is not None,
        older=older,
    )
    seconds, now = store.settings.lease_seconds, store.clock()
    # An agent is there if it was heard of so lately that it would keep a job.
    agents = [(one, now - one.seen <= seconds) for one in store.agents.list()]
    told = fill(request, "agents.html", caller, agents=agents)
    return [Part("rows", "", rows), Part("agents", "Agents", told)]


# ------------------------------------------------------------------------------------------ a job


@router.get("/{job}")
def job_page(request: Request, store: StoreDep, caller: PageReader, job: Identifier) -> Response:
    """The page of one job."""
    info = store.jobs.get(job)
    return render(request, "job.html", caller, job=info, live=_live(request, store, caller, info))


@router.get("/{job}/live")
def job_live(
    request: Request, store: StoreDep, caller: PageReader, job: Identifier, have: Have = ""
) -> Response:
    """What has changed on it."""
    info = store.jobs.get(job)
    files = store.artifacts.of(job)
    etag = digest_of(info.model_dump_json(), files, _run_of(store, info), csrf_of(request))
    return answer_live(request, caller, have, etag, lambda: _live(request, store, caller, info))


@router.post("/{job}/approve", dependencies=[Depends(check_form)])
def approve_job(store: StoreDep, caller: PageSubmitter, job: Identifier) -> Response:
    """Let a plan be followed, and show the job."""
    api.approve_job(store, caller, job)
    return RedirectResponse(f"/jobs/{job}", 303)


@router.post("/{job}/cancel", dependencies=[Depends(check_form)])
def cancel_job(store: StoreDep, caller: PageSubmitter, job: Identifier) -> Response:
    """End a job, and show it."""
    api.cancel_job(store, caller, job)
    return RedirectResponse(f"/jobs/{job}", 303)


def _run_of(store: Store, info: JobInfo) -> RunInfo | None:
    """The run that carries a job out, once it has been introduced."""
    with suppress(NotFound):
        return None if info.run is None else store.runs.get(info.run)
    return None


def _live(request: Request, store: Store, caller: Caller, info: JobInfo) -> Live:
    """Where the job stands, then its plan if it has one, else what it asks for."""
    says = SAYS[info.state]
    if info.state == "planned" and (info.approved or info.auto):
        says = "Its plan is approved; it waits for an agent."
    if info.waiting is not None:
        says = f"{says[:-1]}: {info.waiting}."
    now = fill(
        request,
        "job_now.html",
        caller,
        job=info,
        says=says,
        steps=STEPS,
        ended=info.state in ENDED,
        run=_run_of(store, info),
    )
    parts = [Part("now", "", now)]
    if info.error:
        when = "after it was planned" if info.has_plan else "before it had a plan"
        if info.run is not None:
            when = "while it trained"
        why = fill(request, "job_failure.html", caller, job=info, when=when)
        parts.append(Part("failure", "Why it failed", why))
    parts += files_part(request, store, caller, info.id)
    plan = store.jobs.plan(info.id) if info.has_plan else None
    if plan is not None:
        parts += plan_parts(plan, store.jobs.profile(info.id))
    else:
        with other_keys_come():  # it is as it was submitted, by the rules of then
            asked = Job.model_validate(info.job)
        parts.append(Part("job", "The job", job_text(asked)))
    title = f"{info.state}: {info.name} - Batchwright"
    return Live(says, parts, info.state in ENDED, title)


# ------------------------------------------------------------- a job as people paste it, untrusted


class JobTextError(ValueError):
    """What is wrong with a job's text, in a sentence."""


def job_of_text(text: str) -> Job:
    """The job that a text describes.

    Raises:
        JobTextError: It is too long, not YAML with keys, or a key is wrong.
    """
    try:
        return change_job(Job(), keys_of_text(text))
    except BatchwrightError as error:
        raise JobTextError(sentence(one_line(error))) from None


def keys_of_text(text: str) -> dict[str, Any]:
    """The keys of a YAML text. Anchors are refused: a few of them can stand for gigabytes.

    Raises:
        JobTextError: It is too long, too deep, or not YAML with keys.
    """
    if len(text) > LONGEST_JOB:
        raise JobTextError(f"A job has at most {LONGEST_JOB // 1024} KiB of text.")
    try:
        _check_shape(text)
        values = parse_yaml(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark else ""
        raise JobTextError(f"This is not YAML{where}: {yaml_problem(error)}.") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise JobTextError("Write a key on each line, such as epochs: 3.")
    return values


def _check_shape(text: str) -> None:
    """Refuse what no job needs and a parser takes long for; it is parsed no further than that."""
    depth = 0
    for number, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader)):
        if number > MOST_PARTS:
            raise JobTextError("This has more keys and values than any job.")
        if isinstance(event, yaml.ScalarEvent) and len(event.value) > LONGEST_VALUE:
            raise JobTextError(f"A value has more than {LONGEST_VALUE:,} characters.")
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise JobTextError("Anchors (& and *) are not taken: write the values out.")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > DEEPEST_JOB:
                raise JobTextError("This is more deeply nested than any job.")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
