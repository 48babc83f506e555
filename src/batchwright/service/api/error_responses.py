"""Answers to requests that fail: JSON to programs, a page to people."""

from __future__ import annotations

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from sqlalchemy.exc import DataError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from batchwright.errors import BatchwrightError, shortage
from batchwright.records.service import IDENTIFIER
from batchwright.records.text.problems import first_problem, shorten
from batchwright.service.problems import (
    Conflict,
    NotFound,
    Refused,
    ServiceProblem,
    Unauthorized,
    Unavailable,
    WrongAddress,
)
from batchwright.service.reading import MAX_CHARACTERS, problem_line

FOR_PROGRAMS = ("/v1", "/healthz", "/readyz", "/metrics")


class Broken(ServiceProblem):
    """A mistake of the service, which is described in its log."""

    status = 500


def answer(request: Request, problem: ServiceProblem) -> Response:
    """The answer to a request that failed because of ``problem``."""
    response: Response
    if is_for_programs(request):
        detail = problem.detail[:MAX_CHARACTERS]
        response = JSONResponse({"detail": detail, **problem.values}, problem.status)
    else:
        if isinstance(problem, WrongAddress):  # a link that was copied or typed in part
            problem = NotFound(problem.detail)
        response = request.app.state.error_page(request, problem)
    if isinstance(problem, Unauthorized):
        response.headers["www-authenticate"] = "Bearer"
    if problem.retry_after is not None:
        response.headers["retry-after"] = str(max(1, round(problem.retry_after)))
    return response


def is_for_programs(request: Request) -> bool:
    """Whether the path is one of the API's."""
    path = request.scope.get("path", "")
    return any(path == start or path.startswith(f"{start}/") for start in FOR_PROGRAMS)


def problem_of(error: Exception) -> ServiceProblem:
    """The problem to answer an exception with; an unexpected one is not described to the client."""
    if isinstance(error, ServiceProblem):
        return error
    if isinstance(error, BatchwrightError):
        return Refused(" ".join(str(error).split()))
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        if first["loc"][0] == "path" and first.get("ctx", {}).get("pattern") == IDENTIFIER:
            return WrongAddress(
                f"{first['loc'][-1]} = {shorten(first['input'])}: an identifier has 8-4-4-4-12 "
                "hex digits, all lower-case: copy all of it, from its page or the list"
            )
        return Refused(problem_line(first, first["loc"]))
    if isinstance(error, ValidationError):  # requests are read elsewhere
        why = first_problem(error, "its key ")
        return Conflict(f"this was stored by another version, and cannot be read by this: {why}")
    if isinstance(error, HTTPException) and error.status_code == NotFound.status:
        return NotFound("there is nothing at this address")
    if isinstance(error, HTTPException):
        problem = ServiceProblem(str(error.detail))
        problem.status = error.status_code
        return problem
    if isinstance(error, DataError | OverflowError):
        return Refused("a number or a text is larger than the service can store")
    if isinstance(error, OperationalError | InterfaceError | PoolTimeoutError):
        return Unavailable("the database does not answer just now; try again")
    if short := shortage(error):  # of a thread or a process for this request
        return Unavailable(
            f"the machine is short of processes, files or memory: {short}; try again"
        )
    return Broken("something went wrong inside the service; its log says what")
