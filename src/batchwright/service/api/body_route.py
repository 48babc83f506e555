"""Routes that parse their JSON body before FastAPI does, without delaying other answers.

FastAPI parses and validates bodies on the event loop; a record that is parsed already it does not
parse again.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool

from batchwright.service.middleware.bodies import body_of, is_json
from batchwright.service.reading import read, read_json

TINY_BYTES = 8 * 1024
"""Maximum size of a body that is parsed on the event loop: a thread would take longer to begin."""


class BodyRoute(APIRoute):
    """A route whose body is a record. Access is checked before the body is parsed."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler of requests; those without a JSON body are left to FastAPI."""
        handle, field = super().get_route_handler(), self.body_field
        model = field.field_info.annotation if field is not None else None
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            return handle
        dependencies = [each.call for each in self.dependant.dependencies]
        checks = [call for call in dependencies if hasattr(call, "needed")]  # see `access.need`

        async def read_first(request: Request) -> Response:
            for check in checks:
                await check(request, None)  # type: ignore[misc]
            body = body_of(request.scope)
            if not body or not is_json(request.headers.get("content-type", "")):
                return await handle(request)  # which says what is missing
            small = len(body) <= TINY_BYTES
            record = read_json(model, body) if small else await run_in_threadpool(read, model, body)
            return await handle(_ReadRequest(request, record))

        return read_first


class _ReadRequest(Request):
    """A request whose JSON is parsed into a record."""

    def __init__(self, request: Request, record: BaseModel) -> None:
        super().__init__(request.scope, request.receive)
        self._record = record

    async def body(self) -> bytes:
        """A body that is not empty, so that FastAPI asks for `json`."""
        return b"{}"

    async def json(self) -> BaseModel:
        """The record."""
        return self._record
