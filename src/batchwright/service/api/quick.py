"""Large bodies read quickly: pydantic's own parser takes a quarter of the time of Python's."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json


class QuickRequest(Request):
    """A request whose JSON is parsed quickly. While Python parses, nobody else is answered."""

    async def json(self) -> Any:
        """The body's value.

        Raises:
            JSONDecodeError: It is no JSON; NaN and infinity are none.
        """
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise json.JSONDecodeError(str(error), "", 0) from None


class QuickRoute(APIRoute):
    """A route that gets its requests as `QuickRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, called with such a request."""
        handle = super().get_route_handler()

        async def quickly(request: Request) -> Response:
            return await handle(QuickRequest(request.scope, request.receive))

        return quickly
