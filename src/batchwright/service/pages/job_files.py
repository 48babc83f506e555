"""Logs and files of a job, as its page shows them."""

from __future__ import annotations

from contextlib import suppress
from typing import get_args

from fastapi import APIRouter, Request, Response

from batchwright.records.service import ArtifactName, Identifier, LogName
from batchwright.records.text.formatting import size
from batchwright.reporting.pages.live_page import Part
from batchwright.service.access import PageReader, StoreDep
from batchwright.service.api.artifacts import handed_out
from batchwright.service.pages.rendering import fill
from batchwright.service.problems import ServiceProblem
from batchwright.service.store import Store
from batchwright.service.store.tokens import Caller

router = APIRouter(prefix="/jobs", include_in_schema=False)

SHOWN_BYTES = 8192
"""End of the newest log that is shown; the whole of it can be downloaded."""


@router.get("/{job}/artifacts/{name}")
def download(
    request: Request, store: StoreDep, _caller: PageReader, job: Identifier, name: ArtifactName
) -> Response:
    """A file of a job, to be saved."""
    return handed_out(request, store, job, name)


def files_part(request: Request, store: Store, caller: Caller, job: str) -> list[Part]:
    """The end of the newest log, and what else there is; nothing where there is nothing."""
    found = store.artifacts.of(job).artifacts
    if not found:
        return []
    logs = [one for one in found if one.name in get_args(LogName) and one.name != "workers.log"]
    newest = max(logs, key=lambda one: one.created, default=None)
    text = ""
    if newest is not None:
        with suppress(ServiceProblem):  # its place does not answer; the page is of use without
            text = store.artifacts.tail(job, newest.name, SHOWN_BYTES)
    files = [(one, size(one.size)) for one in found]
    told = {"job": job, "files": files, "newest": newest, "text": text}
    return [Part("files", "Logs and files", fill(request, "job_files.html", caller, **told))]
