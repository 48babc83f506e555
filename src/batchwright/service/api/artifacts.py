"""Artifacts: files of jobs, which agents upload and clients download as streams, never whole in
memory.
"""

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
from batchwright.service.access import Reporter, StoreDep, Submitter, need, require_owner
from batchwright.service.api.jobs import JobId
from batchwright.service.problems import Conflict, NoRoom, Refused, TooMany, Unavailable
from batchwright.service.store import Store
from batchwright.service.store.artifact_place import PIECE
from batchwright.service.store.artifacts import Upload
from batchwright.service.store.tokens import Caller

router = APIRouter(prefix="/v1/jobs", tags=["artifacts"])

STALL_SECONDS, STALL_BYTES = 60.0, 2**20
"""An upload of fewer bytes in so many seconds is aborted, to make room for others."""

Named = Annotated[ArtifactName, Path(description="Name of the file.")]
Key = Annotated[
    Identifier | None,
    Header(
        alias="batchwright-lease",
        description="Key of the job's newest lease: for its agent, whose token has no `read`.",
    ),
]
AnyReader = Annotated[Caller, need("read", "report")]

_BYTES = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}


class Transfers:
    """Limits the uploads and downloads at the same time, each of which has a piece in memory.

    Args:
        most: Maximum number of transfers.

    Attributes:
        threads: Limiter of the uploads' threads, so that they take none from other requests.
    """

    def __init__(self, most: int) -> None:
        self._free = threading.BoundedSemaphore(most)
        self.threads = CapacityLimiter(most)

    @contextmanager
    def one(self) -> Iterator[None]:
        """Inside, one more transfer is in progress.

        Raises:
            TooMany: The maximum is reached.
        """
        if not self._free.acquire(blocking=False):
            raise TooMany("too many files are being transferred: try again in a while", 5.0)
        try:
            yield
        finally:
            self._free.release()


@router.get("/{job}/artifacts")
def list_artifacts(
    store: StoreDep, caller: AnyReader, job: JobId, lease: Key = None
) -> JobArtifacts:
    """Files of a job that the service keeps, and the room for more."""
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
    """A file of a job. `Repr-Digest` is its SHA-256, as the upload announced it."""
    refuse_strangers(store, caller, job, lease)
    return handed_out(request, store, job, name)


@router.put(
    "/{job}/artifacts/{name}",
    openapi_extra={"requestBody": {"required": True, "content": _BYTES}},
)
async def put_artifact(
    request: Request,
    store: StoreDep,
    caller: Reporter,
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
    replaces: Annotated[
        str | None,
        Header(
            alias="batchwright-replaces",
            pattern=r"^([0-9a-f]{64})?$",
            description="SHA-256, in hex, of the file of this name that the sender knows to be "
            "here; empty: none. If it is another one, this upload came late, after a newer one. "
            "Left out: any is replaced.",
        ),
    ] = None,
) -> ArtifactInfo:
    """Upload a file, which replaces the one of this name once it has arrived completely.

    409 means that the lease is not the job's newest any more or, with `Retry-After`, that another
    upload of this job has begun meanwhile, or that the file to be replaced is another one by now;
    507 that there is no room.
    """
    transfers: Transfers = request.app.state.transfers
    sha256 = base64.b64decode(digest.removeprefix("sha-256=:")[:-1]).hex()

    def receive() -> ArtifactInfo:
        refuse_strangers(store, caller, job, lease, always=True)
        upload = store.artifacts.begin(
            job, name, lease, size=length, sha256=sha256, replaces=replaces
        )
        try:
            _write(request, store, upload, length, sha256)
            return store.artifacts.finish(upload)
        except BaseException:
            store.artifacts.give_up(upload)
            raise
        finally:
            request.app.state.remover.soon()  # the former artifact, or what is left of the upload

    with transfers.one():  # before a thread is taken: with one too many, that would wait
        return await to_thread.run_sync(receive, limiter=transfers.threads)


@router.delete("/{job}/artifacts/{name}", status_code=204)
def delete_artifact(
    request: Request, store: StoreDep, caller: Submitter, job: JobId, name: Named
) -> None:
    """Delete a file of a job, to make room."""
    require_owner(caller, store.jobs.owner(job))
    store.artifacts.delete(job, name)
    store.audit.note(caller.name, "artifact.delete", job, name)
    request.app.state.remover.soon()


def refuse_strangers(
    store: Store, caller: Caller, job: str, lease: str | None, *, always: bool = False
) -> None:
    """Refuse a caller that may not read everything and whose agent does not have the job.

    Args:
        store: The store.
        caller: The caller.
        job: Identifier of the job.
        lease: Key of the job's newest lease, as the caller says.
        always: Whether the caller's agent must have the job even if the caller may read everything.

    Raises:
        NotFound: There is no such job.
        Conflict: The job is, or was, another token's agent's.
    """
    agent = store.jobs.agent(job)
    if caller.may("read") and not always:
        return
    if agent is None or lease is None or not caller.owns(store.agents.owner(agent)):
        raise Conflict("this job is not leased, or no longer leased, to an agent of this token")
    store.artifacts.refuse_old_lease(job, lease)


def handed_out(request: Request, store: Store, job: str, name: ArtifactName) -> Response:
    """An artifact as an answer; a browser saves it and never shows it as a page."""
    identifier, info = store.artifacts.find(job, name)

    def pieces() -> Generator[bytes]:
        slot = request.app.state.transfers.one()
        with slot, store.artifacts.place.reading(identifier) as file:
            yield b""
            while piece := file.read(PIECE):
                yield piece

    body = pieces()
    next(body)  # opens the file: an error is answered as such, as the answer has not begun yet
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
    """Closes its body as soon as it ends, also where the client has disconnected: otherwise the
    transfer would count until Python collects the reference cycle of the cancelled task.
    """

    def __init__(self, body: Generator[bytes], **named: Any) -> None:
        super().__init__(body, **named)
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            with CancelScope(shield=True):
                await to_thread.run_sync(self._body.close)


def _write(request: Request, store: Store, upload: Upload, length: int, sha256: str) -> None:
    """Write the body of an upload, whose length and digest were announced, piece by piece.

    Raises:
        Refused: The body has another length or digest.
        Unavailable: The place cannot be written.
        NoRoom: The place is full. In both cases the rest of the body is read first: a client that
            is still sending would not get the answer.
    """
    digest, size, pieces = hashlib.sha256(), 0, _arriving(request.stream())
    try:
        with store.artifacts.place.writing(upload.id) as file:
            for piece in pieces:
                size += len(piece)
                if size > length:
                    break
                digest.update(piece)
                file.write(piece)
            if size != length or digest.hexdigest() != sha256:
                raise Refused(f"{upload.name} is not what was announced: send it again")
    except (NoRoom, Unavailable):
        for _ in pieces:
            pass
        raise


def _arriving(stream: AsyncIterator[bytes]) -> Iterator[bytes]:
    """Pieces of a body as they arrive, for a thread.

    Raises:
        Refused: The client has disconnected, or is too slow.
    """
    end, left = time.monotonic() + STALL_SECONDS, STALL_BYTES

    async def next_piece() -> bytes | None:
        with anyio.fail_after(end - time.monotonic()):
            return await anext(stream, None)

    try:
        while (piece := from_thread.run(next_piece)) is not None:
            yield piece
            left -= len(piece)
            if left <= 0:
                end, left = time.monotonic() + STALL_SECONDS, STALL_BYTES
    except (ClientDisconnect, TimeoutError):
        raise Refused("the file did not arrive completely") from None
