"""The pages of jobs and agents: the lists, a form to submit a job, and a page of each job, with the
plan to approve, logs and files.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any, get_args

import yaml
from fastapi import APIRouter, Depends, Form, Query, Request, Response
from fastapi.responses import RedirectResponse

from batchwright.errors import BatchwrightError, one_line
from batchwright.records import Job
from batchwright.records.agent_rules import refused_by_all
from batchwright.records.documents import change_job
from batchwright.records.job import other_keys_come
from batchwright.records.service import (
    ArtifactName,
    Identifier,
    JobInfo,
    JobState,
    JobSubmission,
    LogName,
    RunInfo,
)
from batchwright.records.text.formatting import counted, size
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
from batchwright.service.api.artifacts import handed_out
from batchwright.service.job_states import ENDED
from batchwright.service.pages.rendering import (
    Have,
    Live,
    answer_live,
    digest_of,
    fill,
    render,
    sentence,
)
from batchwright.service.problems import Conflict, NotFound, ServiceProblem
from batchwright.service.store import Store
from batchwright.service.store.tokens import Caller

router = APIRouter(prefix="/jobs", include_in_schema=False)

MAX_ROWS = 50

SHOWN_BYTES = 8192
"""Bytes of the newest log that are shown, its last ones; all of it can be downloaded."""

LONGEST_JOB = 64 * 1024
"""Maximum characters of a job."""
LONGEST_VALUE = 8 * 1024
"""Maximum characters of a value: parsing a number takes time by the square of its digits."""
MOST_PARTS = 4000
"""Maximum keys, values and brackets of a job: the parser, in Python, takes seconds for a text of
`?,` with the maximum of characters."""
DEEPEST_JOB = 8
"""Maximum levels of lists and maps; a job has four."""

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
    """The parts of the lists that have changed."""
    lists = _lists(request, caller, _state(state), before)
    etag = digest_of(*(part.content for part in lists))
    return answer_live(request, caller, have, etag, lambda: Live(_says(request), lists))


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
    name, errors = printable(" ".join(name.split())), {}
    try:
        parsed = job_of_text(job)
        if len(name) > 120:
            errors["name"] = "A name has at most 120 characters."
    except JobTextError as error:
        errors["job"] = str(error)
    if errors:
        filled = {"job": job, "name": name, "auto": auto, "errors": errors}
        return _page(request, caller, None, None, 422, **filled)
    name = name or printable(f"{parsed.network} on {parsed.data}")[:120]
    info = store.jobs.submit(name, parsed, auto=bool(auto), owner=caller.name)
    store.audit.note(caller.name, "job.submit", info.id, name)
    return RedirectResponse(f"/jobs/{info.id}", 303)


def _state(word: str) -> JobState | None:
    """The state that a word names; `None`: all states, as with a word that names none."""
    return next((state for state in get_args(JobState) if state == word), None)


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
    """The list of jobs and that of agents."""
    store = store_of(request)
    listed = store.jobs.list(MAX_ROWS + 1, before, state)
    shown, more = listed[:MAX_ROWS], len(listed) > MAX_ROWS
    older = f"/jobs?{f'state={state}&' if state else ''}before={shown[-1].id}" if more else ""
    rows = fill(
        request,
        "jobs_rows.html",
        caller,
        jobs=shown,
        filtered=state is not None or before is not None,
        older=older,
    )
    seconds, now, left = store.settings.lease_seconds, store.clock(), store.agents.left()
    # An agent is there if it was heard of so lately that it would keep a job.
    agents = [
        (agent, "stopped" if agent.name in left else "silent" * (abs(now - agent.seen) > seconds))
        for agent in store.agents.list()
    ]
    table = fill(request, "agents.html", caller, agents=agents)
    return [Part("rows", "", rows), Part("agents", "Agents", table)]


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
    """The parts of the page of one job that have changed."""
    info = store.jobs.get(job)
    files = store.artifacts.of(job)
    etag = digest_of(info.model_dump_json(), files, _run_of(store, info), csrf_of(request))
    return answer_live(request, caller, have, etag, lambda: _live(request, store, caller, info))


@router.get("/{job}/artifacts/{name}")
def download(
    request: Request, store: StoreDep, _caller: PageReader, job: Identifier, name: ArtifactName
) -> Response:
    """A file of a job, to be saved."""
    return handed_out(request, store, job, name)


@router.post("/{job}/approve", dependencies=[Depends(check_form)])
def approve_job(store: StoreDep, caller: PageSubmitter, job: Identifier) -> Response:
    """Approve a plan, and show the job."""
    api.approve_job(store, caller, job)
    return RedirectResponse(f"/jobs/{job}", 303)


@router.post("/{job}/cancel", dependencies=[Depends(check_form)])
def cancel_job(store: StoreDep, caller: PageSubmitter, job: Identifier) -> Response:
    """Cancel a job, and show it."""
    api.cancel_job(store, caller, job)
    return RedirectResponse(f"/jobs/{job}", 303)


@router.post("/{job}/again", dependencies=[Depends(check_form)])
def submit_again(store: StoreDep, caller: PageSubmitter, job: Identifier) -> Response:
    """Queue a job that has ended once more, as it was submitted, and show the new one."""
    info = store.jobs.get(job)
    if info.state not in ENDED:
        raise Conflict(f"the job is {info.state}: it can be submitted again once it has ended")
    submission = JobSubmission(
        name=info.name,
        job=info.job,
        auto=info.auto,
        needs=info.needs,
        keep_seconds=info.keep_seconds,
    )
    return RedirectResponse(f"/jobs/{api.submit_job(store, caller, submission).id}", 303)


def _run_of(store: Store, info: JobInfo) -> RunInfo | None:
    """The run that carries a job out, once it has been introduced."""
    with suppress(NotFound):
        return None if info.run is None else store.runs.get(info.run)
    return None


def _files_part(request: Request, store: Store, caller: Caller, job: str) -> list[Part]:
    """The end of the newest log, and the list of files; empty where there are none."""
    files = store.artifacts.of(job).artifacts
    if not files:
        return []
    logs = [file for file in files if file.name in get_args(LogName) and file.name != "workers.log"]
    newest = max(logs, key=lambda log: log.created, default=None)
    text = ""
    if newest is not None:
        with suppress(ServiceProblem):  # the place of artifacts is away: the page is of use without
            text = store.artifacts.tail(job, newest.name, SHOWN_BYTES)
    sized = [(file, size(file.size)) for file in files]
    values = {"job": job, "files": sized, "newest": newest, "text": text}
    return [Part("files", "Logs and files", fill(request, "job_files.html", caller, **values))]


def _live(request: Request, store: Store, caller: Caller, info: JobInfo) -> Live:
    """The state of the job, then its plan if it has one, else its keys."""
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
    parts += _files_part(request, store, caller, info.id)
    plan = store.jobs.plan(info.id) if info.has_plan else None
    if plan is not None:
        parts += plan_parts(plan, store.jobs.profile(info.id))
    else:
        with other_keys_come():  # it was submitted by the rules of another version
            job = Job.model_validate(info.job)
        parts.append(Part("job", "The job", job_text(job)))
    title = f"{info.state}: {info.name} - Batchwright"
    return Live(says, parts, info.state in ENDED, title)


# ------------------------------------------------------------- the text of a job, from a form


class JobTextError(ValueError):
    """A mistake in a job's text, described in a sentence."""


def job_of_text(text: str) -> Job:
    """The job that a YAML text describes.

    Raises:
        JobTextError: The text is too long, not YAML with keys, a key is wrong, or no agent would
            carry the job out.
    """
    try:
        job = change_job(Job(), keys_of_text(text))
    except BatchwrightError as error:
        raise JobTextError(sentence(one_line(error))) from None
    if problem := refused_by_all(job):
        raise JobTextError(f"{problem}.")
    return job


def keys_of_text(text: str) -> dict[str, Any]:
    """The keys of a YAML text. Anchors are refused: a few of them can expand to gigabytes.

    Raises:
        JobTextError: The text is too long, too deeply nested, or not YAML with keys.
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
    """Refuse a text that would take its parser too long, before more of it is parsed.

    Raises:
        JobTextError: The text has more parts or levels than any job, a long value or an anchor.
    """
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
