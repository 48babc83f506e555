"""What tests of artifacts share: a job that an agent has, and files brought for it."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from typing import Any

from fastapi.testclient import TestClient

from batchwright.records.service import AgentIntroduction, Lease
from batchwright.service.store import Store
from samples import make_job
from services import ADDRESS, Service, app_over


def restarted(service: Service, **changes: Any) -> Service:
    """The same service with other settings."""
    limits = service.settings.limits.model_copy(update=changes.pop("limits", {}))
    service.settings = service.settings.model_copy(update={**changes, "limits": limits})
    service.store = Store(service.store.database.engine, service.settings, service.clock)
    service.app = app_over(service.store, service.settings)
    service.client = TestClient(service.app, base_url=ADDRESS, follow_redirects=False)
    return service


def over_postgresql(service: Service, request: Any) -> Service:
    """A service like another one, over a PostgreSQL database of its own."""
    url = request.getfixturevalue("postgres")()
    settings = service.settings.model_copy(update={"database": url})
    store = Store.open(settings, service.clock)
    request.addfinalizer(store.close)
    return Service(store, settings, service.clock)


def leased(service: Service, agent: str = "one", owner: str = "report") -> Lease:
    """A new job that an agent has."""
    service.store.jobs.submit("a job", make_job(), auto=True, owner="submit")
    return lease_of(service, agent, owner)


def lease_of(service: Service, agent: str, owner: str = "report") -> Lease:
    """What an agent gets that asks for a job."""
    service.store.agents.introduce(AgentIntroduction(name=agent, allow=()), owner)
    lease = service.store.jobs.lease(agent)
    assert lease is not None
    return lease


def headers_of(lease: Lease | None, content: bytes) -> dict[str, str]:
    digest = base64.b64encode(hashlib.sha256(content).digest()).decode()
    told = {"repr-digest": f"sha-256=:{digest}:", "content-length": str(len(content))}
    return told | ({"batchwright-lease": lease.key} if lease is not None else {})


def bring(
    service: Service,
    lease: Lease,
    name: str,
    content: bytes,
    *,
    scope: str = "report",
    sent: bytes | Iterable[bytes] | None = None,
    **headers: str,
) -> Any:
    """Put a file of a job; ``sent`` instead of what was announced."""
    return service.put(
        scope,
        f"/v1/jobs/{lease.job.id}/artifacts/{name}",
        content=content if sent is None else sent,
        headers=headers_of(lease, content) | headers,
    )


def names_in(service: Service, job: str) -> list[str]:
    found = service.get("read", f"/v1/jobs/{job}/artifacts").json()["artifacts"]
    return [one["name"] for one in found]
