"""Who may ask what of the service: tokens and scopes, cookies, forms."""

from __future__ import annotations

import sqlite3
import uuid
from contextlib import closing

import pytest
from fastapi import APIRouter, Depends
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient

from batchwright.records.service import RunEnd
from batchwright.service.access import check_form, cookie_name, csrf_of, need_page, remember
from batchwright.service.store import Store
from batchwright.service.store.tokens import Caller
from samples import make_plan
from services import ADDRESS, HandClock, serving_from, step

SCOPES = ("read", "report", "submit", "admin")
OPEN = {  # anybody may call these
    ("GET", "/healthz"),
    ("GET", "/readyz"),
}


def routes(of):
    """All routes of an app, those of the routers that were included too."""
    found = []
    for route in of.routes:
        within = getattr(route, "original_router", None)  # as newer releases of FastAPI keep them
        found += [route] if within is None else routes(within)
    return found


def needs_of(route):
    """Scopes that the route's dependencies name; each `need` is one tuple."""
    found, waiting = [], [route.dependant]
    while waiting:
        one = waiting.pop()
        if hasattr(one.call, "needed"):
            found.append(one.call.needed)
        waiting += one.dependencies
    return found


def is_page(route):
    return not route.path.startswith(("/v1", "/metrics", "/healthz", "/readyz"))


def test_every_route_says_once_who_may_call_it(service):
    for route in routes(service.app):
        assert len(needs_of(route)) == 1, route.path
        assert isinstance(route, APIRoute)  # nothing is mounted past the dependencies


def test_nothing_of_the_api_is_open_but_what_is_meant_to_be(service):
    found = {
        (method, route.path)
        for route in routes(service.app)
        for method in route.methods
        if needs_of(route) == [()] and not is_page(route)
    }
    assert found == OPEN


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """One service for all scopes: its description takes a while, and is made once."""
    yield from serving_from(tmp_path_factory.mktemp("shared"), HandClock())


@pytest.mark.parametrize("scope", [None, *SCOPES])
def test_every_route_of_the_api_answers_those_with_its_scope_and_no_others(shared, scope):
    asked = 0
    for route in routes(shared.app):
        if is_page(route):
            continue
        (needed,) = needs_of(route)
        path = route.path.format(**{name: str(uuid.uuid4()) for name in route.param_convertors})
        for method in route.methods:
            status = shared.request(method, scope, path).status_code
            asked += 1
            if not needed:
                assert status == 200, path
            elif scope is None:
                assert status == 401, (method, path)
            elif scope == "admin" or scope in needed:
                assert status not in (401, 403), (method, path, status)
            else:
                assert status == 403, (method, path)
    assert asked > 15


def test_scopes_that_a_route_names_are_scopes(service):
    for route in routes(service.app):
        assert set(needs_of(route)[0]) <= set(SCOPES)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer ",
        "Bearer bw_nobody",
        "Basic YWRtaW46YWRtaW4=",
        "bw_x",
        "Bearer " + "x" * 9000,
    ],
)
def test_without_a_known_token_the_answer_is_401_and_how_to_send_one(service, header):
    answer = service.get(None, "/v1/runs", headers={"authorization": header} if header else {})
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert "token" in answer.json()["detail"]


def test_a_revoked_token_is_refused_at_once(service):
    assert service.get("read", "/v1/runs").status_code == 200
    service.store.tokens.revoke("read")
    assert service.get("read", "/v1/runs").status_code == 401


def test_a_cookie_does_not_open_the_api_and_a_token_no_page(service):
    add_page(service.app)
    assert service.sign_in("admin").get("/v1/runs").status_code == 401
    assert service.get("admin", "/page").status_code == 401
    assert service.sign_in("read").get("/page").status_code == 200


def test_a_run_takes_records_from_its_owner_and_from_an_admin_only(service):
    run = service.a_run("report")
    other = service.store.tokens.create("other", ["report"])
    path, body = f"/v1/runs/{run}/records", {"first": 0, "records": [step(0)]}
    refused = service.client.post(path, json=body, headers={"authorization": f"Bearer {other}"})
    assert refused.status_code == 403
    assert "another token" in refused.json()["detail"]
    assert service.post("report", path, json=body).json()["next"] == 1
    assert service.post("admin", path, json=body).json()["next"] == 1  # known already


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PUT", "/alive", None),
        ("PUT", "/end", RunEnd(outcome="finished").model_dump()),
        ("DELETE", "", None),
    ],
)
def test_a_run_is_ended_and_deleted_by_its_owner_or_an_admin_only(service, method, path, body):
    run = service.a_run("somebody")
    assert service.request(method, "report", f"/v1/runs/{run}{path}", json=body).status_code == 403
    assert service.request(method, "admin", f"/v1/runs/{run}{path}", json=body).is_success


def test_a_token_that_only_reports_reads_the_advice_to_its_own_runs_alone(service):
    """Advice holds a whole plan."""
    mine, others = service.a_run("report"), service.a_run("somebody")
    for run in (mine, others):
        service.store.advice.offer(run, 2, "because", make_plan())
    assert len(service.get("report", f"/v1/runs/{mine}/advice").json()) == 1
    assert service.get("report", f"/v1/runs/{others}/advice").status_code == 403
    for scope in ("read", "admin"):
        assert len(service.get(scope, f"/v1/runs/{others}/advice").json()) == 1


# ------------------------------------------------------------------------------- pages and forms


def add_page(app):
    """A page with a form, for tests of what pages are made of."""
    router = APIRouter()

    @router.get("/page", dependencies=[need_page("read")])
    def page() -> str:
        return "seen"

    @router.post("/page", dependencies=[need_page("submit"), Depends(check_form)])
    def fill_in() -> str:
        return "done"

    app.include_router(router)


def session_of(service, browser) -> str:
    return browser.cookies[cookie_name(service.settings)]


def csrf_for(service, browser) -> str:
    class Asked:
        cookies = browser.cookies  # stands for a request
        app = service.app

    return csrf_of(Asked())


def test_a_form_is_taken_with_the_sessions_own_token_only(service):
    add_page(service.app)
    browser, other = service.sign_in("submit"), service.sign_in("submit")
    own, others = csrf_for(service, browser), csrf_for(service, other)
    assert own != others
    assert session_of(service, browser) not in own
    assert browser.post("/page", data={"csrf": own}).status_code == 200
    for wrong in ({}, {"csrf": ""}, {"csrf": others}, {"csrf": own[:-1]}, {"csrf": "\u00e9"}):
        assert browser.post("/page", data=wrong).status_code == 403, wrong
    assert browser.post("/page", files={"csrf": ("name", own)}).status_code == 403
    assert (
        TestClient(service.app, base_url=ADDRESS).post("/page", data={"csrf": own}).status_code
        == 401
    )


def test_a_page_needs_the_scope_of_the_link(service):
    add_page(service.app)
    browser = service.sign_in("read")
    assert browser.get("/page").status_code == 200
    answer = browser.post("/page", data={"csrf": csrf_for(service, browser)})
    assert answer.status_code == 403


def test_a_link_works_once_and_not_for_ever(service):
    link = service.store.sign_in.link(["read"])
    assert service.store.sign_in.enter(link)
    assert service.store.sign_in.enter(link) is None
    late = service.store.sign_in.link(["read"])
    service.clock.go(service.settings.link_seconds + 1)
    assert service.store.sign_in.enter(late) is None
    assert service.store.sign_in.enter("nothing like it") is None


def test_a_session_ends_by_leaving_and_by_time(service):
    find = service.store.sign_in.find
    session = service.store.sign_in.enter(service.store.sign_in.link(["read"]))
    assert find(session) == Caller("browser", frozenset(["read"]))
    service.store.sign_in.leave(session)
    assert find(session) is None
    session = service.store.sign_in.enter(service.store.sign_in.link(["read"]))
    service.clock.go(service.settings.session_seconds + 1)
    assert find(session) is None


def test_what_a_browser_submits_belongs_to_those_of_its_name(service):
    def browser(name):
        link = service.store.sign_in.link(["read", "submit"], name)
        one = TestClient(service.app, base_url=ADDRESS, follow_redirects=False)
        assert one.post("/sign-in", data={"link": link}).status_code == 303
        return one

    ada, bob, again = browser("ada"), browser("bob"), browser("ada")
    form = {"csrf": csrf_for(service, ada), "job": "data: digits"}
    job = ada.post("/jobs", data=form).headers["location"]
    assert service.store.jobs.list()[0].id == job.rpartition("/")[2]
    for one, status in ((bob, 403), (again, 303)):
        form = {"csrf": csrf_for(service, one)}
        assert one.post(f"{job}/cancel", data=form).status_code == status
    assert {one.who for one in service.store.audit.list()} == {"browser ada", "browser bob"}


@pytest.mark.parametrize("name", ["", "x" * 113, "a\nb"])
def test_some_names_are_nobodys(service, name):
    from batchwright.service.problems import Refused

    with pytest.raises(Refused, match="cannot name who is signed in"):
        service.store.sign_in.link(["read"], name)


def test_the_cookie_is_kept_from_scripts_and_other_sites(service):
    from starlette.responses import Response

    answer = Response()
    remember(answer, "secret", service.settings)
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert "secure;" not in cookie + ";"
    answer = Response()
    remember(answer, "secret", service.settings.model_copy(update={"secure_cookies": True}))
    assert "; secure" in answer.headers["set-cookie"].lower()


def test_services_over_other_databases_have_cookies_of_other_names(service):
    """Browsers send a cookie to all ports of a host."""
    names = [
        cookie_name(service.settings.model_copy(update={"database": database}))
        for database in ("sqlite:////a", "sqlite:////b", "postgresql://me:x@h/a")
    ]
    assert len(set(names)) == 3
    again = service.settings.model_copy(update={"database": "postgresql://me:y@h/a"})
    assert cookie_name(again) == names[2]  # and tells nothing of the password


# ----------------------------------------------------------------------------------- secrets


def test_no_secret_is_in_the_database(service, tmp_path):
    link = service.store.sign_in.link(["admin"])
    session = service.store.sign_in.enter(service.store.sign_in.link(["admin"]))
    with closing(sqlite3.connect(tmp_path / "service.sqlite")) as connection:
        dump = "\n".join(connection.iterdump())
    assert "INSERT INTO" in dump
    for secret in (*service.tokens.values(), link, session):
        assert secret not in dump
        assert secret.removeprefix("bw_") not in dump


def test_tokens_are_long_and_differ(service):
    secrets = {service.store.tokens.create(f"t{i}", ["read"]) for i in range(10)}
    assert len(secrets) == 10
    assert all(len(secret) == 46 and secret.startswith("bw_") for secret in secrets)


def test_a_token_made_again_under_its_name_owns_what_the_old_one_did(service):
    run = service.a_run("report")
    service.store.tokens.revoke("report")
    service.tokens["report"] = service.store.tokens.create("report", ["report"])
    assert service.put("report", f"/v1/runs/{run}/alive").status_code == 200


def test_a_token_tells_when_it_was_used_last(service):
    listed = {token.name: token for token in service.store.tokens.list()}
    assert listed["read"].used is None

    def used(store=service.store):
        return {token.name: token for token in store.tokens.list()}["read"].used

    service.get("read", "/v1/runs")
    first = used()
    assert first == service.clock.now
    service.clock.go(10)
    service.get("read", "/v1/runs")
    assert used() == first
    service.clock.go(60)
    service.get("read", "/v1/runs")
    assert used() > first
    service.store.tokens.note_used()
    service.store.tokens.note_used()  # there is nothing new
    other = Store(service.store.database.engine, service.settings)
    assert used(other) == used() == service.clock.now


def test_when_tokens_were_used_is_written_when_the_service_ends(service):
    with service.client:
        service.get("read", "/v1/runs")
    other = Store(service.store.database.engine, service.settings)
    assert {token.name: token for token in other.tokens.list()}["read"].used == service.clock.now


@pytest.mark.parametrize(
    "name", ["", "x" * 121, "a\nb", "browser", "browser ada", "operator", "service"]
)
def test_some_names_cannot_name_a_token(service, name):
    from batchwright.service.problems import Refused

    with pytest.raises(Refused, match="cannot name a token"):
        service.store.tokens.create(name, ["read"])


def test_a_scope_that_there_is_not_is_refused(service):
    from batchwright.service.problems import Conflict, Refused

    with pytest.raises(Refused, match="unknown scope 'write'"):
        service.store.tokens.create("x", ["write"])
    with pytest.raises(Refused, match="may do nothing"):
        service.store.tokens.create("x", [])
    with pytest.raises(Conflict, match="already"):
        service.store.tokens.create("read", ["read"])
