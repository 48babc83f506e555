"""What the service answers where it cannot do what was asked: one line, and a status.

Every `ServiceProblem` becomes a `records.service.Problem` in one place, `app.create_app`; its
`values` stand beside the line, for a client that can act on them.
"""

from __future__ import annotations

from batchwright.errors import BatchwrightError


class ServiceProblem(BatchwrightError):  # noqa: N818 - no mistake of ours
    """A request that is answered with a line and a status.

    Args:
        detail: One line, for a person: what is wrong, and what to try.
        **values: What a client may act on; JSON values.
    """

    status = 400

    def __init__(self, detail: str, **values: object) -> None:
        super().__init__(detail)
        self.detail = detail
        self.values = values


class Unauthorized(ServiceProblem):
    """No token, or none that is known."""

    status = 401


class Forbidden(ServiceProblem):
    """Known, but not allowed to do this."""

    status = 403


class NotFound(ServiceProblem):
    """There is no such thing, or no longer."""

    status = 404


class Conflict(ServiceProblem):
    """It does not fit what is stored."""

    status = 409


class TooLarge(ServiceProblem):
    """A body beyond `Limits.body_bytes`."""

    status = 413


class Refused(ServiceProblem):
    """Well formed, and wrong."""

    status = 422


class TooMany(ServiceProblem):
    """Faster than `Limits` allows; `retry_after` says in how many seconds to come again."""

    status = 429

    def __init__(self, detail: str, retry_after: float = 1.0) -> None:
        super().__init__(detail, retry_after=round(retry_after, 3))
        self.retry_after = retry_after


class Unavailable(ServiceProblem):
    """The database does not answer just now; the same request may pass later."""

    status = 503
