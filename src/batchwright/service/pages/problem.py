"""What went wrong, as a page: what it was, and where to go from there."""

from __future__ import annotations

from fastapi import Request, Response

from batchwright.service.caller import Caller
from batchwright.service.pages.rendering import render
from batchwright.service.problems import ServiceProblem

TITLES = {
    400: "This cannot be read",
    401: "Sign in first",
    403: "This is not allowed",
    404: "There is nothing here",
    405: "This cannot be done here",
    409: "This does not fit what is there",
    413: "This is too large",
    422: "Something in it is wrong",
    429: "Too much at once",
    500: "Something went wrong",
    503: "Not available just now",
}


def error_page(request: Request, problem: ServiceProblem) -> Response:
    """The page that tells of ``problem``; one who is not signed in learns how to."""
    caller: Caller | None = getattr(request.state, "visitor", None)
    return render(
        request,
        "problem.html",
        caller,
        status=problem.status,
        title=TITLES.get(problem.status, "This did not work"),
        detail=problem.detail,
        sign_in=problem.status == 401,
    )
