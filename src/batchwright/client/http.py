"""Requests to a service: with a token, and with a one-line error for whatever may go wrong.

A token comes from a file, the environment, or this machine's own service. Nothing here repeats a
request; callers that do wait between attempts as `Backoff` says.
"""

from __future__ import annotations

import ipaddress
import json
import os
import random
import ssl
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from batchwright.errors import BatchwrightError, FileError

TOKEN = "BATCHWRIGHT_TOKEN"  # noqa: S105 - the name of a variable
LOCAL_TOKEN = "local-token"  # noqa: S105 - the name of a file
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 30.0
FILE_SECONDS = 60.0  # without a byte of a file, or of the answer to its upload
_PIECE = 2**18  # bytes of a file that are in memory
_MAX_TEXT = 300  # characters of a server's message that are passed on


class ServiceError(BatchwrightError):
    """A service could not be reached, or refused a request.

    Args:
        message: One line.
        status: HTTP status of the service's answer; 0: the service did not answer.
        next_sequence: Number of the record that the service wants next, if the answer names it.
        retry_seconds: Seconds that the service asks us to wait, if it does.
        sent: Whether the request may have arrived.
        by_another: Whether another program may have answered: a proxy in front of a service that is
            away, or what else is at a wrong address. A 404 with a line may be the service's.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 0,
        next_sequence: int | None = None,
        retry_seconds: float | None = None,
        sent: bool = True,
        by_another: bool = False,
    ) -> None:
        super().__init__(message)
        self.status, self.next_sequence = status, next_sequence
        self.retry_seconds, self.sent, self.by_another = retry_seconds, sent, by_another

    @property
    def passing(self) -> bool:
        """Whether the same request may succeed later: the service did not answer, or is busy or
        broken.
        """
        return self.status in (0, 408, 425, 429) or self.status >= 500


class Backoff:
    """Waits that double from attempt to attempt, of random length, so that not all clients come
    back at once.

    Args:
        first: Maximum of the first wait, in seconds.
        most: Maximum of any wait, in seconds.
    """

    def __init__(self, first: float = 0.5, most: float = 30.0) -> None:
        self._first, self._most = first, most
        self._next = first

    def reset(self) -> None:
        """Begin anew, after a request that succeeded."""
        self._next = self._first

    def seconds(self, error: ServiceError | None = None) -> float:
        """Seconds to wait now; at least as long as the service asked for with ``error``, within
        twice the maximum.
        """
        wait = self._next * (0.5 + 0.5 * random.random())
        self._next = min(2 * self._next, self._most)
        asked = error.retry_seconds if error is not None else None
        return wait if asked is None else max(wait, min(asked, 2 * self._most))


class Service:
    """A service at an address; safe to use from several threads. Each request raises `ServiceError`
    where there is no answer, the service refuses, or another program answers.

    Args:
        url: Address of the service, from `checked_url`.
        token: Token that is sent with every request; ``None``: no token.
        answer_seconds: How long an answer may take.
    """

    def __init__(
        self, url: str, token: str | None, *, answer_seconds: float = ANSWER_SECONDS
    ) -> None:
        import httpx

        self.url = url
        local = is_loopback(url)
        trusted: ssl.SSLContext | bool = True
        if local and url.startswith("http:"):  # no TLS: all certificates need not be read
            trusted = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # trusts nobody
        headers = {"Accept": "application/json"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        self._client = httpx.Client(
            base_url=url,
            headers=headers,
            timeout=httpx.Timeout(answer_seconds, connect=CONNECT_SECONDS),
            verify=trusted,
            trust_env=not local,  # a proxy cannot reach this machine's own services
        )
        self._httpx = httpx

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def get(self, path: str, headers: dict[str, str] | None = None) -> Any:
        """GET ``path``; returns the parsed JSON of the answer."""
        return self._request("GET", path, headers=headers)

    def put(self, path: str, body: bytes | dict[str, Any] | None = None) -> dict[str, Any]:
        """PUT JSON to ``path``, which may be repeated; returns the answer's JSON, an object."""
        return object_in(self._request("PUT", path, body), self.url)

    def post(self, path: str, body: bytes | dict[str, Any] | None = None) -> Any:
        """POST JSON to ``path``; returns the parsed JSON of the answer, `None` if it is empty."""
        return self._request("POST", path, body)

    def put_file(self, path: str, pieces: Iterable[bytes], headers: dict[str, str]) -> None:
        """PUT a file to ``path``, piece by piece; ``headers`` have the length of the file."""
        headers = {"Content-Type": "application/octet-stream", **headers}
        with self._errors_in_a_line():
            answer = self._client.request(
                "PUT", path, content=pieces, headers=headers, timeout=FILE_SECONDS
            )
        object_in(self._value_of(answer), self.url)

    def get_file(self, path: str, headers: dict[str, str] | None = None) -> Iterator[bytes]:
        """GET the file at ``path``, piece by piece."""
        accepted = {"Accept": "application/octet-stream", "Accept-Encoding": "identity"}
        headers = accepted | (headers or {})
        with (
            self._errors_in_a_line(),
            self._client.stream("GET", path, headers=headers, timeout=FILE_SECONDS) as answer,
        ):
            kind = answer.headers.get("content-type")
            if not answer.is_success or kind != accepted["Accept"]:
                answer.read()
                if answer.is_success:
                    raise _strange(self.url)
                self._value_of(answer)  # raises
            yield from answer.iter_bytes(_PIECE)

    def _request(
        self,
        method: str,
        path: str,
        body: bytes | dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> Any:
        content, headers = None, dict(headers or {})
        if body is not None:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        with self._errors_in_a_line():
            answer = self._client.request(method, path, content=content, headers=headers)
        return self._value_of(answer)

    @contextmanager
    def _errors_in_a_line(self) -> Iterator[None]:
        """Inside, an error of the connection is raised as a `ServiceError`."""
        try:
            yield
        except (self._httpx.ConnectError, self._httpx.ConnectTimeout) as error:
            raise ServiceError(
                f"cannot reach {self.url} ({_cause(error)}): is `batchwright serve` running there?",
                sent=False,
            ) from None
        except self._httpx.TimeoutException:
            raise ServiceError(f"{self.url} did not answer in time: try again later") from None
        except (self._httpx.HTTPError, self._httpx.InvalidURL, OSError) as error:
            raise ServiceError(f"lost {self.url} ({_cause(error)}): try again later") from None

    def _value_of(self, answer: Any) -> Any:
        """The parsed JSON of an answer; `None` of one that has no content (204).

        Raises:
            ServiceError: The service refuses, or the answer is not JSON.
        """
        if answer.status_code == 204:
            return None
        values, is_json = None, True
        try:
            values = json.loads(answer.content)
        except (ValueError, RecursionError):
            is_json = False
        if answer.is_success and is_json:
            return values
        status, retry = answer.status_code, answer.headers.get("retry-after")
        problem = values if isinstance(values, dict) else {}
        detail = " ".join(str(problem.get("detail", "")).split())[:_MAX_TEXT]
        following = problem.get("next")
        if status < 400 or (status in (403, 404) and not detail):  # the service's have a line
            raise _strange(self.url)
        if status == 401:
            text = (
                f"{self.url} does not know the token: set BATCHWRIGHT_TOKEN to one that "
                "`batchwright token create` made there"
            )
        elif detail:
            text = f"{self.url}: {detail}"
        else:
            text = f"{self.url} answered {status}: see its log"
        raise ServiceError(
            text,
            status=status,
            next_sequence=following if isinstance(following, int) and following >= 0 else None,
            retry_seconds=float(retry) if retry and retry.isdecimal() else None,
            by_another=status == 404,
        )


def object_in(answer: Any, url: str) -> dict[str, Any]:
    """The answer of the service at ``url``, which is an object.

    Raises:
        ServiceError: It is none, as of a proxy whose service is away.
    """
    if isinstance(answer, dict):
        return answer
    raise _strange(url)


def _strange(url: str) -> ServiceError:
    """The error for an answer at ``url`` that no service gives."""
    return ServiceError(
        f"{url} does not answer as `batchwright serve` does: check the address", by_another=True
    )


def _cause(error: Exception) -> str:
    """The operating system's message behind an error, or that of TLS."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, ssl.SSLError):
            return f"TLS: {inner.reason or inner}"
        if isinstance(inner, OSError) and inner.strerror:
            return inner.strerror
        inner = inner.__cause__ or inner.__context__
    return " ".join(str(error).split())[:_MAX_TEXT] or type(error).__name__


def checked_url(url: str) -> str:
    """The address of a service, without a slash at its end.

    Raises:
        BatchwrightError: The address is invalid, or has a name or password in it.
    """
    try:
        parts = urlsplit(url.strip())
        host = parts.hostname or ""
        whole = parts.scheme in ("http", "https") and host and parts.port != 0
        host.encode("idna")  # refuse an impossible name here, not with the first request
        if host.count(".") == 3 and host.replace(".", "").isdecimal():
            ipaddress.IPv4Address(host)
    except ValueError:
        whole = False
    if not whole or parts.query or parts.fragment or not url.strip().isprintable():
        raise BatchwrightError(
            f"{url!r} is no address of a service: write it as http://127.0.0.1:8400"
        )
    if parts.username is not None or parts.password is not None:
        raise BatchwrightError(
            "an address of a service with a name or password in it would be kept in files: give "
            "the token in BATCHWRIGHT_TOKEN instead"
        )
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"


def is_loopback(url: str) -> bool:
    """Whether an address is one of this machine's loopback."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def find_token(url: str, file: Path | None = None) -> str | None:
    """The token for a service; ``None`` if there is none.

    Args:
        url: Address of the service. A service on this machine has left a token in a file of its
            user, which is used where the environment names no token.
        file: File with the token; `None`: the environment has it.

    Raises:
        FileError: The file cannot be read, or what it or the environment holds is not a token.
    """
    if file is not None:
        return _token_in(file)
    token = os.environ.get(TOKEN, "").strip()
    if token:
        return _checked_token(token, TOKEN)
    if not is_loopback(url):
        return None
    try:
        return _token_in(local_token_path())
    except FileError:
        return None


def local_token_path() -> Path:
    """Where `batchwright serve` keeps the token for clients of the same user on this machine."""
    from platformdirs import user_data_path

    return user_data_path("batchwright") / LOCAL_TOKEN


def _token_in(file: Path) -> str:
    try:
        token = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or "it is not text"
        raise FileError(f"cannot read the token in {file}: {cause}") from None
    return _checked_token(token, file)


def _checked_token(token: str, place: str | Path) -> str:
    """The token, if its text can be a token; the text is a secret, so no message holds it."""
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise FileError(f"{place} holds no token: `batchwright token create` prints one")
    return token
