"""The API as a program sees it: the story of a run, and a description that is complete and true."""

from __future__ import annotations

import json
import re
import uuid

import pytest

from batchwright.records import Plan, Profile, RunSummary
from batchwright.records.service import RecordPage, RunInfo
from samples import make_plan, make_profile, make_summary
from services import epoch, step, step_line


def json_of(record):
    return record.model_dump(mode="json")


def test_the_story_of_a_run(service):
    run = str(uuid.uuid4())
    at = f"/v1/runs/{run}"
    told = {"name": "digits", "plan": json_of(make_plan()), "profile": json_of(make_profile())}
    made = service.put("report", at, json=told)
    assert made.status_code == 200
    assert RunInfo.model_validate(made.json()).state == "running"
    batch = {"first": 0, "records": [step(0), step(1), epoch(0)]}
    answer = service.post("report", f"{at}/records", json=batch)
    assert answer.json() == {"next": 3, "advice": 0, "digest": None}
    assert service.put("report", f"{at}/alive").json() == answer.json()
    gap = service.post("report", f"{at}/records", json={"first": 9, "records": [step(9)]})
    assert gap.status_code == 409
    assert gap.json() == {"detail": "records from 3 on are wanted, not from 9", "next": 3}
    page = service.get("read", f"{at}/records", params={"kind": "step", "most": 1}).json()
    assert page["records"][-1] == step(1)
    assert RecordPage.model_validate(page).records[-1] == step_line(1)
    rest = service.get("read", f"{at}/records", params={"after": 0, "limit": 5}).json()
    assert rest["sequences"] == [1, 2]
    assert Plan.model_validate(service.get("read", f"{at}/plan").json()) == make_plan()
    assert Profile.model_validate(service.get("read", f"{at}/profile").json()) == make_profile()
    assert service.get("read", f"{at}/summary").status_code == 404
    end = {"outcome": "finished", "summary": json_of(make_summary())}
    assert service.put("report", f"{at}/end", json=end).json()["state"] == "finished"
    told = RunSummary.model_validate(service.get("read", f"{at}/summary").json())
    assert told == make_summary(run_folder="digits")
    assert [one["id"] for one in service.get("read", "/v1/runs").json()] == [run]
    assert service.delete("report", at).status_code == 204
    assert service.get("read", at).status_code == 404


def test_profiles_are_uploaded_and_found_again(service):
    new = {"name": "box", "profile": json_of(make_profile())}
    made = service.post("submit", "/v1/profiles", json=new)
    assert made.status_code == 201
    assert service.get("read", "/v1/profiles").json() == [made.json()]
    found = service.get("read", f"/v1/profiles/{made.json()['id']}").json()
    assert Profile.model_validate(found) == make_profile()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"name": ""}, "name"),
        ({"name": "a\x00b"}, "name"),
        ({"name": "x" * 121}, "name"),
        ({"plan": {}}, "plan.job"),
        ({"more": 1}, "more"),
        ({"job": "../../etc"}, "job"),
    ],
)
def test_what_is_wrong_with_an_introduction_is_told_by_its_key(service, change, told):
    body = {"name": "digits", "plan": json_of(make_plan())} | change
    answer = service.put("report", f"/v1/runs/{uuid.uuid4()}", json=body)
    assert answer.status_code in (400, 422)
    if b"\\u0000" not in answer.request.content:
        assert told in answer.json()["detail"]


@pytest.mark.parametrize(
    "run", ["x", "1", "A" * 36, "5F0C2D1E-8A44-4A0B-9D0E-2F6F7C1F0A11", "-" * 36]
)
def test_a_run_is_a_uuid_in_lower_case(service, run):
    body = {"name": "digits", "plan": json_of(make_plan())}
    assert service.put("report", f"/v1/runs/{run}", json=body).status_code == 422


def test_an_identifier_that_was_copied_in_part_is_named_without_a_pattern(service):
    answer = service.get("read", f"/v1/jobs/{str(uuid.uuid4())[:8]}")
    assert answer.status_code == 422
    assert "copy all of it" in answer.json()["detail"]
    assert "pattern" not in answer.text


def test_numbers_that_no_database_holds_are_refused(service):
    plan = json_of(make_plan())
    plan["stages"][0]["local_batch_sizes"] = [10**30, 10**30]
    body = {"name": "digits", "plan": plan}
    assert service.put("report", f"/v1/runs/{uuid.uuid4()}", json=body).status_code == 422


def test_health_and_readiness(service):
    assert service.get(None, "/healthz").json() == {"status": "ok"}
    assert service.get(None, "/readyz").json() == {"status": "ok"}
    with service.store.database.writing() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = 'f9999'")
    answer = service.get(None, "/readyz")
    assert answer.status_code == 503
    assert "another version" in answer.json()["detail"]


# ------------------------------------------------------------------------------- the description

MESSAGES = {
    *("Health", "Problem", "Plan", "Profile", "RunSummary", "RunIntroduction", "RunInfo", "RunEnd"),
    *("RecordBatch", "RecordsTaken", "RecordPage", "Advice", "AdviceTaken", "PlanRequest"),
    *("NewProfile", "StoredProfile", "JobSubmission", "JobInfo", "AgentIntroduction", "AgentInfo"),
    *("Lease", "LeaseRequest", "JobProgress", "JobOrders", "JobArtifacts", "ArtifactInfo"),
}
"""All that travels."""


@pytest.fixture(scope="module")
def made():
    """What was described once."""
    return {}


@pytest.fixture
def description(service, made):
    return made or (made.update(service.get("read", "/v1/openapi.json").json()) or made)


def operations(description):
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            yield f"{method} {path}", operation


def test_every_operation_says_what_it_does_and_answers(description):
    for name, operation in operations(description):
        assert operation["summary"], name
        assert operation["description"], name
        assert operation["tags"], name
        for status in ("401", "403", "422", "429"):
            schema = operation["responses"][status]["content"]["application/json"]["schema"]
            assert schema["$ref"].endswith("/Problem"), (name, status)
        if not name.endswith(("/healthz", "/readyz")):
            assert operation["security"] == [{"HTTPBearer": []}], name


def test_every_parameter_is_described_and_every_message_has_a_schema(description):
    for name, operation in operations(description):
        for parameter in operation.get("parameters", ()):
            assert parameter["description"], (name, parameter["name"])
    schemas = description["components"]["schemas"]
    assert schemas.keys() >= MESSAGES
    named = re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(description))
    assert schemas.keys() >= {*named}
