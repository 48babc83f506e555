"""Artifacts: files of jobs, which agents bring and others fetch; streams, never whole in memory."""

from __future__ import annotations

import base64
import hashlib
import threading
import time
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import anyio
from anyio import CancelScope, CapacityLimiter, from_thread, to_thread
from fastapi import APIRouter, Header, Path, Request, Response
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from batchwright.records.service import ArtifactInfo, ArtifactName, Identifier, JobArtifacts
from batchwright.service.access import StoreDep, Submitter, need, require_owner
from batchwright.service.api.jobs import JobId
from batchwright.service.problems import Conflict, NoRoom, Refused, TooMany, Unavailable
from batchwright.service.store import Store
from batchwright.service.store.artifact_place import PIECE
from batchwright.service.store.artifacts import Upload
from batchwright.service.store.tokens import Caller

router = APIRouter(prefix="/v1/jobs", tags=["artifacts"])

STALL_SECONDS, STALL_BYTES = 60.0, 2**20
"""An upload of which less comes in so long is given up: each has a place that others wait for."""

Named = Annotated[ArtifactName, Path(description="Which of them.")]
Key = Annotated[
    Identifier | None,
    Header(
        alias="batchwright-lease",
        description="Key of the job's newest lease: for its agent, whose token has no `read`.",
    ),
]
AnyReader = Annotated[Caller, need("read", "report")]
Bringer = Annotated[Caller, need("report")]

_BYTES = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}


class Transfers:
    """Counts what comes and goes at the same time: each has a piece in memory.

    Args:
        most: How many there may be.
    """

    def __init__(self, most: int) -> None:
        self._free = threading.BoundedSemaphore(most)
        self.threads = CapacityLimiter(most)  # so that uploads take none from other requests

    @contextmanager
    def one(self) -> Iterator[None]:
        """Inside, there is one more.

        Raises:
            TooMany: There are too many.
        """
        if not self._free.acquire(blocking=False):
            raise TooMany("too many artifacts come and go just now: try again in a while", 5.0)
        try:
            yield
        finally:
            self._free.release()


@router.get("/{job}/artifacts")
def list_artifacts(store: StoreDep, caller: AnyReader, job: JobId, lease: Key = None) -> JobArtifacts:
    """Logs, checkpoints and reports of a job that are kept here, and how much more may be."""
    refuse_strangers(store, caller, job, lease)
    return store.artifacts.of(job)


@router.get(
    "/{job}/artifacts/{name}",
    response_class=StreamingResponse,
    response_model=None,
    responses={200: {"content": _BYTES, "description": "The file."}},
)
def get_artifact(
    request: Request, store: StoreDep, caller: AnyReader, job: JobId, name: Named, lease: Key = None
) -> Response:
    """One of them, whole. `Repr-Digest` is the SHA-256 that it was brought with."""
    refuse_strangers(store, caller, job, lease)
    return handed_out(request, store, job, name)


@router.put(
    "/{job}/artifacts/{name}",
    openapi_extra={"requestBody": {"required": True, "content": _BYTES}},
)
async def put_artifact(
    request: Request,
    store: StoreDep,
    caller: Bringer,
    job: JobId,
    name: Named,
    lease: Annotated[
        Identifier, Header(alias="batchwright-lease", description="Key of the job's newest lease.")
    ],
    digest: Annotated[
        str,
        Header(
            alias="repr-digest",
            pattern=r"^sha-256=:[A-Za-z0-9+/]{43}=:$",
            description="SHA-256 of the file, as in RFC 9530.",
        ),
    ],
    length: Annotated[
        int, Header(alias="content-length", ge=0, le=2**53, description="Bytes of the file.")
    ],
) -> ArtifactInfo:
    """Bring a file, which takes the place of the one of this name when it is here whole.

    409 means that the lease is not the job's newest any more; 507 that there is no room.
    """
    transfers: Transfers = request.app.state.transfers
    sha256 = base64.b64decode(digest.removeprefix("sha-256=:")[:-1]).hex()

    def take() -> ArtifactInfo:
        refuse_strangers(store, caller, job, lease, always=True)
        coming = store.artifacts.begin(job, name, lease, size=length, sha256=sha256)
        try:
            _write(request, store, coming, length, sha256)
            return store.artifacts.finish(coming)
        except BaseException:
            store.artifacts.give_up(coming)
            raise
        finally:
            request.app.state.remover.soon()  # what it replaced, or what came of it

    with transfers.one():  # before there is a thread: one that waited for that would not be told
        return await to_thread.run_sync(take, limiter=transfers.threads)


@router.delete("/{job}/artifacts/{name}", status_code=204)
def delete_artifact(
    request: Request, store: StoreDep, caller: Submitter, job: JobId, name: Named
) -> None:
    """Delete one of them, to make room."""
    require_owner(caller, store.jobs.owner(job))
    store.artifacts.delete(job, name)
    store.audit.note(caller.name, "artifact.delete", job, name)
    request.app.state.remover.soon()


def refuse_strangers(
    store: Store, caller: Caller, job: str, lease: str | None, *, always: bool = False
) -> None:
    """Nothing, if the caller may read everything, or has the job.

    Raises:
        NotFound: There is no such job.
        Conflict: It is, or was, another agent's.
    """
    agent = store.jobs.agent(job)
    if caller.may("read") and not always:
        return
    if agent is None or lease is None or not caller.owns(store.agents.owner(agent)):
        raise Conflict("this job is not, or no longer, one of this token's agents")
    store.artifacts.refuse_old_lease(job, lease)


def handed_out(request: Request, store: Store, job: str, name: ArtifactName) -> Response:
    """A file of a job as an answer; a browser saves it and never shows it as a page."""
    identifier, info = store.artifacts.find(job, name)

    def pieces() -> Generator[bytes]:
        slot = request.app.state.transfers.one()
        with slot, store.artifacts.place.reading(identifier) as file:
            yield b""
            while piece := file.read(PIECE):
                yield piece

    body = pieces()
    next(body)  # opened: what cannot be is answered as such, and what is begun is closed at its end
    return _Closing(
        body,
        media_type="application/octet-stream",
        headers={
            "content-length": str(info.size),
            "repr-digest": f"sha-256=:{base64.b64encode(bytes.fromhex(info.sha256)).decode()}:",
            "content-disposition": f'attachment; filename="{job}-{name}"',
            "cache-control": "no-store",
        },
    )


class _Closing(StreamingResponse):
    """Closes what it sends as soon as it ends, also where the client has gone: else the place of a
    transfer is taken until Python looks for circles, of which the cancelled sending is one.
    """

    def __init__(self, body: Generator[bytes], **named: Any) -> None:
        super().__init__(body, **named)
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            with CancelScope(shield=True):
                await to_thread.run_sync(self._body.close)


def _write(request: Request, store: Store, coming: Upload, length: int, sha256: str) -> None:
    """Write what comes, piece by piece; fails unless it is what was said.

    Raises:
        Refused: It is longer or shorter, or another.
        Unavailable: The disk cannot be written; then the rest is read as for `NoRoom`.
        NoRoom: The disk is full; the rest is read all the same, so that the sender hears of it.
    """
    found, size, pieces = hashlib.sha256(), 0, _arriving(request.stream())
    try:
        with store.artifacts.place.writing(coming.id) as file:
            for piece in pieces:
                size += len(piece)
                if size > length:
                    break
                found.update(piece)
                file.write(piece)
            if size != length or found.hexdigest() != sha256:
                raise Refused(f"{coming.name} is not what was announced: send it again")
    except (NoRoom, Unavailable):
        for _ in pieces:
            pass
        raise


def _arriving(stream: AsyncIterator[bytes]) -> Iterator[bytes]:
    """What comes over the wire, for a thread.

    Raises:
        Refused: The sender has gone, or too little comes.
    """
    end, left = time.monotonic() + STALL_SECONDS, STALL_BYTES

    async def following() -> bytes | None:
        with anyio.fail_after(end - time.monotonic()):
            return await anext(stream, None)

    try:
        while (piece := from_thread.run(following)) is not None:
            yield piece
            left -= len(piece)
            if left <= 0:
                end, left = time.monotonic() + STALL_SECONDS, STALL_BYTES
    except (ClientDisconnect, TimeoutError):
        raise Refused("the file did not come to its end") from None
