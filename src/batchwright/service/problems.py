"""Errors of the service, each with a line for a person and an HTTP status.

`app.create_app` has every `ServiceProblem` answered as a `records.service.Problem`, with its
`values` beside the line, for a client that can act on them.
"""

from __future__ import annotations

from batchwright.errors import BatchwrightError


class ServiceProblem(BatchwrightError):  # noqa: N818 - no mistake of ours
    """A request that is answered with a line and a status.

    Args:
        detail: One line, for a person: what is wrong, and what to try.
        **values: JSON values that a client may act on.
    """

    status = 400
    retry_after: float | None = None
    """Seconds after which the same request may succeed; `None`: it will not."""

    def __init__(self, detail: str, **values: object) -> None:
        super().__init__(detail)
        self.detail = detail
        self.values = values


class Unauthorized(ServiceProblem):
    """A token is needed, or it is unknown."""

    status = 401


class Forbidden(ServiceProblem):
    """The token may not do this."""

    status = 403


class NotFound(ServiceProblem):
    """There is no such thing."""

    status = 404


class Late(ServiceProblem):
    """The body did not arrive in time: send it again."""

    status = 408


class Conflict(ServiceProblem):
    """It does not fit what is stored."""

    status = 409


class Overtaken(Conflict):
    """Another request has come in between, or it took too long: the same one may succeed now."""

    retry_after = 1.0


class TooLarge(ServiceProblem):
    """The body is too large."""

    status = 413


class Refused(ServiceProblem):
    """A value is wrong; the line says which."""

    status = 422


class WrongAddress(Refused):
    """The address has something else where the identifier of a run or job stands."""


class TooMany(ServiceProblem):
    """Too many requests: come again after `retry_after`."""

    status = 429
    retry_after: float

    def __init__(self, detail: str, retry_after: float = 1.0) -> None:
        super().__init__(detail, retry_after=round(retry_after, 3))
        self.retry_after = retry_after


class Unavailable(ServiceProblem):
    """The database, the place of artifacts, or the machine, does not keep up: come again."""

    status = 503
    retry_after = 5.0


class NoRoom(ServiceProblem):
    """There is no room for it, on the disk or within the limits."""

    status = 507


DESCRIPTIONS = {400: "It cannot be read."} | {
    kind.status: str(kind.__doc__) for kind in ServiceProblem.__subclasses__()
}
"""What each status says, for the API's description."""
