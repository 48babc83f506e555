"""Where the token for a service comes from: a file, the environment, or this machine's own."""

from __future__ import annotations

import os
from pathlib import Path

from batchwright.client.http import is_loopback
from batchwright.errors import FileError

TOKEN = "BATCHWRIGHT_TOKEN"  # noqa: S105 - the name of a variable
LOCAL_TOKEN = "local-token"  # noqa: S105 - the name of a file


def find_token(url: str, file: Path | None = None) -> str | None:
    """The token for a service; ``None`` if there is none.

    Args:
        url: The service. One on this machine has left a token where its user finds it.
        file: Holds the token; else the environment does.

    Raises:
        FileError: The file cannot be read, or holds no token.
    """
    if file is not None:
        return _token_in(file)
    given = os.environ.get(TOKEN, "").strip()
    if given:
        return given
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
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise FileError(f"{file} holds no token: `batchwright token create` prints one")
    return token
