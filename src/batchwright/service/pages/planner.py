"""The planner's page: a profile and a goal in, a plan with its reasons out, while the user types.

The page's address holds the whole form, so that it can be kept or sent to a colleague.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, File, Form, Request, Response, UploadFile
from fastapi.responses import RedirectResponse
from pydantic import TypeAdapter, ValidationError

from batchwright.errors import BatchwrightError, one_line
from batchwright.records import Estimate, Plan, Profile
from batchwright.records.base import record_text
from batchwright.records.documents import parse_record
from batchwright.records.service import Identifier, JobInfo, NewProfile, RunInfo
from batchwright.records.text.formatting import (
    counted,
    duration,
    number,
    percent,
    share_ends,
)
from batchwright.records.text.problems import printable
from batchwright.reporting.data.outline import outlined
from batchwright.reporting.data.plan_words import batches_words, decided_words
from batchwright.reporting.pages.live_page import CURRENCY
from batchwright.reporting.pages.page import plan_part, profile_facts
from batchwright.reporting.pages.page_plan import accuracy_chart, pareto_part
from batchwright.service.access import PageReader, PageSubmitter, StoreDep, check_form, store_of
from batchwright.service.api import plans as api
from batchwright.service.pages.planner_form import (
    FIELDS,
    LABELS,
    MORE_FIELDS,
    FilledForm,
    answer_form,
    read_form,
)
from batchwright.service.pages.rendering import drawn, render, sentence
from batchwright.service.problems import NotFound, Refused, ServiceProblem
from batchwright.service.reading import SMALL_BYTES, check_json, run_apart_if_large
from batchwright.service.settings import Limits
from batchwright.service.store import Store
from batchwright.service.store.profiles import ProfileInfo
from batchwright.service.store.tokens import Caller

router = APIRouter(include_in_schema=False)

MAX_OFFERED = 20
"""Newest runs, and newest jobs, whose profiles the page offers."""

MAX_KEPT = 64
"""Answers that stay in memory, so that going back to one costs nothing."""
LONGEST_KEPT = 256 * 1024
"""Maximum characters of a profile whose answers stay in memory; as a record it is ten times as
large."""

_IDENTIFIER: TypeAdapter[str] = TypeAdapter(Identifier)


@dataclass(frozen=True)
class Answer:
    """The planner's answer to a form: a plan, or errors.

    Attributes:
        form: The form, with its errors.
        plan: The plan; `None` where there are errors or no profile is chosen.
        profile: The profile that the plan was made from.
    """

    form: FilledForm
    plan: Plan | None
    profile: Profile | None

    @property
    def tiles(self) -> list[tuple[str, str, str]]:
        """The plan in short, as (name, value, more)."""
        plan = self.plan
        if plan is None:
            return []
        chosen, train = plan.chosen, plan.whole_seconds
        epoch = plan.stages[0].predicted_epoch_seconds
        tiles = [
            (
                "Decided",
                decided_words(plan),
                f"{counted(plan.workers, 'worker')}, local batch {batches_words(plan)}",
            ),
            ("An epoch", "not measured", "nothing tells its seconds")
            if epoch is None
            else ("An epoch", duration(epoch.value), f"{_ends(epoch)} s, 95 % interval"),
        ]
        if train is not None:
            ends = f"{duration(train.low)} to {duration(train.high)}"
            more = f"{counted(plan.likely_epochs(), 'epoch')}: {ends}, evaluation included"
            tiles.append(("The training", duration(train.value), more))
        if chosen is not None and (reached := chosen.accuracy) is not None:
            more = f"{share_ends(reached)}, held out at its end"
            tiles.append(("Accuracy", percent(reached.value), more))
        if chosen is not None and (cost := chosen.cost) is not None:
            tiles.append(("Cost", number(cost.value), f"{_ends(cost)}, {CURRENCY}"))
        return tiles

    @property
    def problems(self) -> list[tuple[str, str, str]]:
        """The errors, as (field or empty, its label, what to do)."""
        errors = self.form.errors.items()
        return [(name, LABELS.get(name, ""), words) for name, words in errors]

    @property
    def says(self) -> str:
        """The answer in a sentence."""
        if self.plan is None:
            lines = (f"{label}: {words}" if label else words for _, label, words in self.problems)
            return next(lines, "Choose a profile.")
        return ", ".join(value for _, value, _ in self.tiles)


def _ends(estimate: Estimate) -> str:
    return f"{number(estimate.low)} to {number(estimate.high)}"


class Answers:
    """Answers to forms; the newest stay in memory, as planning takes processor time."""

    def __init__(self) -> None:
        self._planned = lru_cache(maxsize=MAX_KEPT)(_planned)

    def answer(self, store: Store, given: Mapping[str, str]) -> Answer:
        """The answer to a filled-in form.

        Args:
            store: The store of profiles.
            given: Values of the fields, by name.

        Raises:
            TooMany: The service is busy with other plans.
            Unavailable: Planning took too long, or the system ended its process.
        """
        form = read_form(given)
        chosen = given.get("profile", "")
        if not chosen:
            return Answer(form, None, None)
        try:
            profile = chosen_profile(store, chosen)
        except NotFound as problem:
            form.errors["profile"] = sentence(problem.detail)
            return Answer(form, None, None)
        # By the profile's content, not its identifier: that of a run or a job may be replaced.
        kept = len(profile.model_dump_json()) <= LONGEST_KEPT
        return (self._planned if kept else _planned)(profile, tuple(form.words.items()))


def _planned(profile: Profile, words: tuple[tuple[str, str], ...]) -> Answer:
    form = read_form(dict(words))
    return Answer(form, answer_form(profile, form), profile)


@router.get("/planner")
def planner_page(request: Request, caller: PageReader) -> Response:
    """The page, with the answer to the form in its address."""
    return _page(request, caller)


@router.get("/planner/answer")
def planner_answer(request: Request, caller: PageReader) -> Response:
    """The answer alone."""
    given = _given(request)
    answer = request.app.state.plan_answers.answer(store_of(request), given)
    return render(request, "planner_answer.html", caller, **_shown(answer, given))


@router.get("/planner/plan.json")
def planner_plan(request: Request, store: StoreDep, _caller: PageReader) -> Response:
    """The plan as a file, equal to the byte with what `batchwright plan` writes."""
    answer = request.app.state.plan_answers.answer(store, _given(request))
    if answer.plan is None:
        raise Refused(answer.says.rstrip("."))
    headers = {"Content-Disposition": 'attachment; filename="plan.json"'}
    text = record_text(answer.plan)
    return Response(text, media_type="application/json", headers=headers)


@router.post("/planner/profiles", dependencies=[Depends(check_form)])
def upload_profile(
    request: Request,
    store: StoreDep,
    caller: PageSubmitter,
    file: Annotated[UploadFile, File()],
    name: Annotated[str, Form(max_length=120)] = "",
) -> Response:
    """Store a profile, and plan from it."""
    try:
        profile, name = read_profile(file.file.read(), name)
    except ProfileError as error:
        return _page(request, caller, wrong=str(error), status=422)
    stored = api.add_profile(store, caller, NewProfile(name=name, profile=profile))
    return RedirectResponse(f"/planner?{urlencode({'profile': stored.id})}", 303)


@router.post("/planner/profiles/delete", dependencies=[Depends(check_form)])
def delete_profile(
    store: StoreDep, caller: PageSubmitter, profile: Annotated[Identifier, Form()]
) -> Response:
    """Delete a stored profile, and plan from another."""
    api.delete_profile(store, caller, profile)
    return RedirectResponse("/planner", 303)


def _given(request: Request) -> dict[str, str]:
    """The form's fields in the address; of a repeated field the last value."""
    return {key: value[:4000] for key, value in request.query_params.items()}


def _page(request: Request, caller: Caller, wrong: str = "", status: int = 200) -> Response:
    store, given = store_of(request), _given(request)
    options = _options(store, given.get("profile", ""))
    if "profile" not in given and options:
        given["profile"] = options[0][0]
    answer = request.app.state.plan_answers.answer(store, given)
    return render(
        request,
        "planner.html",
        caller,
        status=status,
        chosen=given.get("profile", ""),
        profiles=options,
        own=[_option(info) for info in store.profiles.list() if caller.owns(info.owner or "")],
        fields=FIELDS,
        more_fields=MORE_FIELDS,
        more_open=any(answer.form.words[field.name] for field in MORE_FIELDS),
        wrong_upload=wrong,
        **_shown(answer, given),
    )


def _options(store: Store, chosen: str) -> list[tuple[str, str]]:
    """Profiles to choose from, as (value, words): the stored ones, and those of runs and jobs."""
    options = [_option(info) for info in store.profiles.list()]
    runs = store.runs.list(MAX_OFFERED, profiled=True)
    options += [_option(run, "run") for run in runs]
    for job in store.jobs.list(MAX_OFFERED):
        if job.has_profile and job.run is None:  # that of a job that trains is its run's, too
            options.append(_option(job, "job"))
    kind, _, identifier = chosen.partition(":")
    if kind in ("run", "job") and identifier and chosen not in dict(options):
        try:
            name = (store.runs if kind == "run" else store.jobs).get(identifier).name
        except ServiceProblem:
            name = identifier[:36]
        options.insert(0, (chosen, f"of {kind} {name}"))
    return options


def _option(info: ProfileInfo | RunInfo | JobInfo, kind: str = "") -> tuple[str, str]:
    words = f"{info.name} ({datetime.fromtimestamp(info.created, UTC):%Y-%m-%d})"
    return (f"{kind}:{info.id}", f"of {kind} {words}") if kind else (info.id, words)


def _shown(answer: Answer, given: dict[str, str]) -> dict[str, Any]:
    """The answer as values for a template."""
    plan = answer.plan
    outline = plan and outlined(plan)
    return {
        "answer": answer,
        "errors": answer.form.errors,
        "words": answer.form.words,
        "address": f"/planner/plan.json?{urlencode({k: v for k, v in given.items() if v})}",
        "pareto": drawn(accuracy_chart(outline) + pareto_part(outline)) if outline else "",
        "plan": drawn(plan_part(plan, answer.profile, learning=False)) if plan else "",
        "measured": drawn(profile_facts(answer.profile)) if answer.profile else "",
    }


class ProfileError(ValueError):
    """An upload that is not a profile; the message is a sentence."""


def chosen_profile(store: Store, chosen: str) -> Profile:
    """A profile by the form's value: an identifier of its own, or `run:` or `job:` and that of a
    run or job.

    Raises:
        NotFound: There is no such profile.
    """
    kind, _, identifier = chosen.rpartition(":")
    try:
        _IDENTIFIER.validate_python(identifier)
    except ValidationError:
        raise NotFound("there is no such profile: choose one from the list") from None
    if kind == "run":
        profile = store.runs.profile(identifier)
    elif kind == "job":
        profile = store.jobs.profile(identifier)
    elif kind:
        profile = None
    else:
        profile = store.profiles.get(identifier)
    if profile is None:
        raise NotFound("this run or job has no profile: choose another")
    return profile


def read_profile(content: bytes, name: str) -> tuple[Profile, str]:
    """An uploaded profile, and its name.

    Args:
        content: Content of the file.
        name: Name that the user gives it; empty: network and data set of the profile.

    Raises:
        ProfileError: The file is not a profile.
    """
    if not content.strip():
        raise ProfileError("Choose a file: `batchwright probe --out profile.json` writes one.")
    try:
        text = content.decode("utf-8")
        if len(content) > SMALL_BYTES:
            check_json(content, Limits().nesting)
        profile = run_apart_if_large(len(content), parse_record, text, "this file", Profile)
    except UnicodeDecodeError:
        raise ProfileError("This file is not text in UTF-8, as profiles are.") from None
    except BatchwrightError as error:
        raise ProfileError(sentence(one_line(error))) from None
    name = " ".join(name.split()) or f"{profile.network.name} on {profile.data.name}"
    return profile, printable(name)[:120]
