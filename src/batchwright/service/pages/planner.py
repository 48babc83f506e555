"""The planner: a profile and a goal in, a plan with its reasons out, as fast as one can type.

The page's address holds all that was asked, so that it can be kept or sent to a colleague.
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
from batchwright.records.service import Identifier, Name, NewProfile
from batchwright.records.text.formatting import (
    counted,
    duration,
    number,
    percent,
)
from batchwright.records.text.plan_text import is_chosen
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
    Asked,
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

MAX_KEPT = 64
"""Answers that are kept: going back to one costs nothing."""
LONGEST_KEPT = 256 * 1024
"""Characters of a profile that is kept with them; read, it takes some ten times as much."""

_IDENTIFIER: TypeAdapter[str] = TypeAdapter(Identifier)


@dataclass(frozen=True)
class Answer:
    """What the planner says: a plan, or what is wrong."""

    asked: Asked
    plan: Plan | None
    profile: Profile | None

    @property
    def tiles(self) -> list[tuple[str, str, str]]:
        """The decision in short, as (name, value, more)."""
        plan = self.plan
        if plan is None:
            return []
        stage = plan.stages[0]
        chosen = next((one for one in plan.considered if is_chosen(plan, one)), None)
        train, cost = (chosen.train_seconds, chosen.cost) if chosen else (None, None)
        epoch, seconds = (
            stage.predicted_epoch_seconds,
            ("not measured", "nothing tells its seconds"),
        )
        if epoch is not None:
            seconds = duration(epoch.value), f"{_ends(epoch)} s, 95 % interval"
        told = [
            (
                "Decided",
                decided_words(plan),
                f"{counted(plan.workers, 'worker')}, local batch {batches_words(plan)}",
            ),
            ("An epoch", *seconds),
        ]
        if train is not None:
            ends = f"{duration(train.low)} to {duration(train.high)}"
            more = f"{counted(plan.likely_epochs(), 'epoch')}: {ends}, evaluation included"
            told.append(("The training", duration(train.value), more))
        if chosen is not None and (reached := chosen.accuracy) is not None:
            ends = f"{percent(reached.low)} to {percent(reached.high)}"
            told.append(("Accuracy", percent(reached.value), f"{ends}, held out at its end"))
        if cost is not None:
            told.append(("Cost", number(cost.value), f"{_ends(cost)}, {CURRENCY}"))
        return told

    @property
    def problems(self) -> list[tuple[str, str, str]]:
        """What is wrong: the field, or nothing, its label, and what to do."""
        errors = self.asked.errors.items()
        return [(name, LABELS.get(name, ""), words) for name, words in errors]

    @property
    def says(self) -> str:
        """The answer in a sentence."""
        if self.plan is None:
            told = (f"{label}: {words}" if label else words for _, label, words in self.problems)
            return next(told, "Choose a profile.")
        return ", ".join(value for _, value, _ in self.tiles)


def _ends(estimate: Estimate) -> str:
    return f"{number(estimate.low)} to {number(estimate.high)}"


class Answers:
    """Plans, the newest of them kept: each takes a while of a processor with other things to do."""

    def __init__(self) -> None:
        self._planned = lru_cache(maxsize=MAX_KEPT)(_planned)

    def answer(self, store: Store, given: Mapping[str, str]) -> Answer:
        """The answer to a filled-in form.

        Raises:
            TooMany: Others plan just now.
        """
        asked = read_form(given)
        chosen = given.get("profile", "")
        if not chosen:
            return Answer(asked, None, None)
        try:
            profile = chosen_profile(store, chosen)
        except NotFound as problem:
            asked.errors["profile"] = sentence(problem.detail)
            return Answer(asked, None, None)
        # By what is in it: the profile of a run or a job is replaced when a new one is sent.
        kept = len(profile.model_dump_json()) <= LONGEST_KEPT
        return (self._planned if kept else _planned)(profile, tuple(asked.words.items()))


def _planned(profile: Profile, words: tuple[tuple[str, str], ...]) -> Answer:
    asked = read_form(dict(words))
    return Answer(asked, answer_form(profile, asked), profile)


@router.get("/planner")
def planner_page(request: Request, caller: PageReader) -> Response:
    """The page, with the answer to what its address asks."""
    return _page(request, caller)


@router.get("/planner/answer")
def planner_answer(request: Request, caller: PageReader) -> Response:
    """The answer alone."""
    given = _given(request)
    told = request.app.state.plan_answers.answer(store_of(request), given)
    return render(request, "planner_answer.html", caller, **_shown(told, given))


@router.get("/planner/plan.json")
def planner_plan(request: Request, store: StoreDep, _caller: PageReader) -> Response:
    """The plan as a file, equal to the byte with what `batchwright plan` writes."""
    told = request.app.state.plan_answers.answer(store, _given(request))
    if told.plan is None:
        raise Refused(told.says.rstrip("."))
    headers = {"Content-Disposition": 'attachment; filename="plan.json"'}
    text = record_text(told.plan)
    return Response(text, media_type="application/json", headers=headers)


@router.post("/planner/profiles", dependencies=[Depends(check_form)])
def upload_profile(
    request: Request,
    store: StoreDep,
    caller: PageSubmitter,
    file: Annotated[UploadFile, File()],
    name: Annotated[Name | str, Form(max_length=120)] = "",
) -> Response:
    """Store a profile, and plan from it."""
    try:
        profile, told = read_profile(file.file.read(), name)
    except ProfileError as error:
        return _page(request, caller, wrong=str(error), status=422)
    kept = api.add_profile(store, caller, NewProfile(name=told, profile=profile))
    return RedirectResponse(f"/planner?{urlencode({'profile': kept.id})}", 303)


@router.post("/planner/profiles/delete", dependencies=[Depends(check_form)])
def delete_profile(
    store: StoreDep, caller: PageSubmitter, profile: Annotated[Identifier, Form()]
) -> Response:
    """Delete a stored profile, and plan from another."""
    api.delete_profile(store, caller, profile)
    return RedirectResponse("/planner", 303)


def _given(request: Request) -> dict[str, str]:
    """The fields of the address; of a field that comes twice the last one."""
    return {key: value[:4000] for key, value in request.query_params.items()}


def _page(request: Request, caller: Caller, wrong: str = "", status: int = 200) -> Response:
    store, given = store_of(request), _given(request)
    newest = store.profiles.list(1)
    if "profile" not in given and newest:
        given["profile"] = newest[0].id
    told = request.app.state.plan_answers.answer(store, given)
    return render(
        request,
        "planner.html",
        caller,
        status=status,
        chosen=given.get("profile", ""),
        profiles=_options(store, given.get("profile", "")),
        own=[_option(one) for one in store.profiles.list() if caller.owns(one.owner or "")],
        fields=FIELDS,
        more_fields=MORE_FIELDS,
        more_open=any(told.asked.words[one.name] for one in MORE_FIELDS),
        wrong_upload=wrong,
        **_shown(told, given),
    )


def _options(store: Store, chosen: str) -> list[tuple[str, str]]:
    """What there is to choose, as (value, words): the stored ones, and that of a run or a job."""
    found = [_option(one) for one in store.profiles.list()]
    kind, _, identifier = chosen.partition(":")
    if kind in ("run", "job") and identifier:
        try:
            name = (store.runs if kind == "run" else store.jobs).get(identifier).name
        except ServiceProblem:
            name = identifier[:36]
        found.insert(0, (chosen, f"of {kind} {name}"))
    return found


def _option(one: ProfileInfo) -> tuple[str, str]:
    return one.id, f"{one.name} ({datetime.fromtimestamp(one.created, UTC):%Y-%m-%d})"


def _shown(told: Answer, given: dict[str, str]) -> dict[str, Any]:
    plan = told.plan
    outline = plan and outlined(plan)
    return {
        "answer": told,
        "errors": told.asked.errors,
        "words": told.asked.words,
        "address": f"/planner/plan.json?{urlencode({k: v for k, v in given.items() if v})}",
        "pareto": drawn(accuracy_chart(outline) + pareto_part(outline)) if outline else "",
        "plan": drawn(plan_part(plan, told.profile, learning=False)) if plan else "",
        "measured": drawn(profile_facts(told.profile)) if told.profile else "",
    }


class ProfileError(ValueError):
    """An upload that is no profile, in a sentence."""


def chosen_profile(store: Store, chosen: str) -> Profile:
    """A profile by what the form says: its identifier, or `run:` or `job:` and that of one.

    Raises:
        NotFound: There is no such profile.
    """
    kind, _, identifier = chosen.rpartition(":")
    try:
        _IDENTIFIER.validate_python(identifier)
    except ValidationError:
        raise NotFound("there is no such profile: choose one from the list") from None
    if kind == "run":
        found = store.runs.profile(identifier)
    elif kind == "job":
        found = store.jobs.profile(identifier)
    elif kind:
        found = None
    else:
        found = store.profiles.get(identifier)
    if found is None:
        raise NotFound("that one came without a profile: choose another")
    return found


def read_profile(content: bytes, name: str) -> tuple[Profile, str]:
    """An uploaded profile, and what it is called.

    Args:
        content: The file.
        name: What it shall be called; empty: what it measured.

    Raises:
        ProfileError: It is none.
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
    told = " ".join(name.split()) or f"{profile.network.name} on {profile.data.name}"
    return profile, printable(told)[:120]
