"""Jobs and agents: what waits, who works on what, and the plan that wants approval."""

from __future__ import annotations

from typing import Annotated, get_args

from fastapi import APIRouter, Depends, Form, Query, Request, Response
from fastapi.responses import RedirectResponse

from batchwright.records import Job
from batchwright.records.documents import job_yaml
from batchwright.records.service import AgentInfo, Identifier, JobInfo, JobState, RunInfo
from batchwright.records.text.formatting import counted
from batchwright.records.text.problems import printable
from batchwright.reporting.pages.live_page import Part, plan_parts
from batchwright.service.access import check_form, csrf_of, need_page, own, settings_of, store_of
from batchwright.service.caller import Caller
from batchwright.service.pages.fragments import digest_of, live_parts, tagged, unchanged
from batchwright.service.pages.planning.job_text import EXAMPLE, JobTextError, job_of_text
from batchwright.service.pages.rendering import origin_of, piece, render
from batchwright.service.problems import NotFound

router = APIRouter(prefix="/jobs", include_in_schema=False)

MOST_ROWS = 50

STEPS = ("queued", "probing", "planned", "training", "done")
"""The way of a job that goes well."""
ENDED = ("done", "failed", "cancelled")

SAYS = {
    "queued": "It waits for an agent that may carry it out.",
    "probing": "An agent measures it.",
    "planned": "Its plan waits for approval.",
    "training": "An agent trains it.",
    "done": "It is done.",
    "failed": "It failed.",
    "cancelled": "It was cancelled.",
}

Reader = Annotated[Caller, need_page("read")]
Submitter = Annotated[Caller, need_page("submit")]
Have = Annotated[str, Query(max_length=2000)]
Before = Annotated[Identifier | None, Query()]


# --------------------------------------------------------------------------------------- the list


@router.get("")
def jobs_page(
    request: Request,
    caller: Reader,
    state: Annotated[str, Query(max_length=20)] = "",
    before: Before = None,
) -> Response:
    """The page."""
    return _page(request, caller, _state(state), before)


@router.get("/rows")
def jobs_rows(
    request: Request,
    caller: Reader,
    state: Annotated[str, Query(max_length=20)] = "",
    before: Before = None,
    have: Have = "",
) -> Response:
    """What has changed in the lists."""
    told = _lists(request, caller, _state(state), before)
    etag = digest_of(*(part.content for part in told))
    same = unchanged(request, etag)
    if same is not None:
        return same
    says = _says(request)
    parts = live_parts(told, have)
    response = render(request, "live.html", caller, title="", says=says, over=False, parts=parts)
    return tagged(response, etag)


@router.post("", dependencies=[Depends(check_form)])
def submit_job(
    request: Request,
    caller: Submitter,
    job: Annotated[str, Form()] = "",
    name: Annotated[str, Form()] = "",
    auto: Annotated[str, Form()] = "",
) -> Response:
    """Queue a job, and show it."""
    store = store_of(request)
    told = printable(" ".join(name.split()))
    try:
        read = job_of_text(job)
    except JobTextError as error:
        filled = {"job": job, "name": told, "auto": auto, "errors": {"job": str(error)}}
        return _page(request, caller, None, None, 422, **filled)
    if len(told) > 120:
        errors = {"name": "A name has at most 120 characters."}
        filled = {"job": job, "name": told, "auto": auto, "errors": errors}
        return _page(request, caller, None, None, 422, **filled)
    told = told or printable(f"{read.network} on {read.data}")[:120]
    found = store.jobs.submit(told, read, auto=bool(auto), owner=caller.name)
    store.audit.note(caller.name, "job.submit", found.id, told)
    return RedirectResponse(f"/jobs/{found.id}", 303)


def _state(word: str) -> JobState | None:
    return next((one for one in get_args(JobState) if one == word), None)


def _says(request: Request) -> str:
    listed = store_of(request).jobs.list(MOST_ROWS)
    waiting = sum(one.state == "planned" and not one.approved for one in listed)
    going = sum(one.state in ("probing", "training") for one in listed)
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
    query = "&".join(
        f"{name}={value}" for name, value in (("state", state), ("before", before)) if value
    )
    return render(
        request,
        "jobs.html",
        caller,
        status=status,
        state=state,
        states=get_args(JobState),
        form=form,
        fragment=f"/jobs/rows?{query}",
        says=_says(request),
        parts=live_parts(_lists(request, caller, state, before)),
    )


def _lists(
    request: Request, caller: Caller, state: JobState | None, before: str | None
) -> list[Part]:
    store, settings = store_of(request), settings_of(request)
    found = store.jobs.list(MOST_ROWS + 1, before, state)
    shown, more = found[:MOST_ROWS], len(found) > MOST_ROWS
    older = f"/jobs?{f'state={state}&' if state else ''}before={shown[-1].id}" if more else ""
    common = {"caller": caller, "csrf": csrf_of(request), "origin": origin_of(request)}
    rows = piece(
        "jobs_rows.html",
        **common,
        jobs=shown,
        filtered=state is not None or before is not None,
        older=older,
    )
    agents = [(one, _is_there(request, one)) for one in store.agents.list()]
    return [
        Part("rows", "", rows),
        Part(
            "agents",
            "Agents",
            piece("agents.html", **common, agents=agents, seconds=settings.lease_seconds),
        ),
    ]


def _is_there(request: Request, agent: AgentInfo) -> bool:
    """Whether an agent was heard of so lately that it would keep a job."""
    store, seconds = store_of(request), settings_of(request).lease_seconds
    return store.clock() - agent.seen <= seconds


# ------------------------------------------------------------------------------------------ a job


@router.get("/{job}")
def job_page(request: Request, caller: Reader, job: Identifier) -> Response:
    """The page of one job."""
    info = store_of(request).jobs.get(job)
    return render(
        request,
        "job.html",
        caller,
        job=info,
        says=_says_of(info),
        over=info.state in ENDED,
        parts=live_parts(_parts(request, caller, info)),
    )


@router.get("/{job}/live")
def job_live(request: Request, caller: Reader, job: Identifier, have: Have = "") -> Response:
    """What has changed on it."""
    info = store_of(request).jobs.get(job)
    etag = digest_of(info.model_dump_json(), _run_of(request, info), csrf_of(request))
    same = unchanged(request, etag)
    if same is not None:
        return same
    response = render(
        request,
        "live.html",
        caller,
        title=f"{info.state}: {info.name} - Batchwright",
        says=_says_of(info),
        over=info.state in ENDED,
        parts=live_parts(_parts(request, caller, info), have),
    )
    return tagged(response, etag)


@router.post("/{job}/approve", dependencies=[Depends(check_form)])
def approve_job(request: Request, caller: Submitter, job: Identifier) -> Response:
    """Let a plan be followed, and show the job."""
    store = store_of(request)
    own(caller, store.jobs.owner(job))
    store.jobs.approve(job)
    store.audit.note(caller.name, "job.approve", job)
    return RedirectResponse(f"/jobs/{job}", 303)


@router.post("/{job}/cancel", dependencies=[Depends(check_form)])
def cancel_job(request: Request, caller: Submitter, job: Identifier) -> Response:
    """End a job, and show it."""
    store = store_of(request)
    own(caller, store.jobs.owner(job))
    store.jobs.cancel(job)
    store.audit.note(caller.name, "job.cancel", job)
    return RedirectResponse(f"/jobs/{job}", 303)


def _says_of(info: JobInfo) -> str:
    if info.state == "planned" and (info.approved or info.auto):
        says = "Its plan is approved; it waits for an agent."
    else:
        says = SAYS[info.state]
    if info.waiting is None:
        return says
    return f"{says[:-1]}: {info.waiting}."


def _run_of(request: Request, info: JobInfo) -> RunInfo | None:
    """The run that carries a job out, once it has been introduced."""
    if info.run is None:
        return None
    try:
        return store_of(request).runs.get(info.run)
    except NotFound:
        return None


def _parts(request: Request, caller: Caller, info: JobInfo) -> list[Part]:
    """Where the job stands, then its plan if it has one, else what it asks for."""
    store = store_of(request)
    now = piece(
        "job_now.html",
        caller=caller,
        csrf=csrf_of(request),
        job=info,
        says=_says_of(info),
        steps=STEPS,
        ended=info.state in ENDED,
        run=_run_of(request, info),
    )
    parts = [Part("now", "", now)]
    plan = store.jobs.plan(info.id) if info.has_plan else None
    if plan is not None:
        return parts + plan_parts(plan, store.jobs.profile(info.id))
    text = job_yaml(Job.model_validate(info.job))
    return [*parts, Part("job", "The job", piece("job_yaml.html", text=text))]
