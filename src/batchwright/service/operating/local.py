"""Where a service on this machine keeps its things, and the token for clients of the same user."""

from __future__ import annotations

import hashlib
import os
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

from platformdirs import user_data_path
from sqlalchemy import URL

from batchwright.errors import FileError
from batchwright.records.service import Scope
from batchwright.service.database.engine import read_url
from batchwright.service.problems import Conflict, NotFound
from batchwright.service.store import Store
from batchwright.service.store.tokens import LOCAL
from batchwright.storage.files import make_folder

LOCAL_SCOPES: tuple[Scope, ...] = ("read", "report", "submit")
"""What clients on this machine need: to report runs, to carry out jobs and to submit them."""


def data_folder() -> Path:
    """The user's folder for a database that is not named, and for the local token."""
    return user_data_path("batchwright")


def default_database() -> str:
    """URL of the database where none is named."""
    return URL.create("sqlite", database=str(data_folder() / "service.sqlite")).render_as_string()


def default_artifacts(database: str) -> str | None:
    """Where the artifacts of a service lie unless it is said: beside a SQLite file; else nowhere,
    as services that share a database may not share a disk.
    """
    place = read_url(database)
    if place.get_backend_name() != "sqlite" or not place.database:
        return None
    return str(Path(place.database).absolute().parent / "artifacts")


def local_token_file(database: str) -> Path:
    """Where the local token of a database is: beside a SQLite file, else in the user's folder."""
    place = read_url(database)
    folder = data_folder()
    if place.get_backend_name() == "sqlite" and place.database:
        folder = Path(place.database).parent
    return folder / "local-token"


def local_name(database: str) -> str:
    """Name of the local token. Services on several machines that share a database have one each,
    of the machine and the folder that its file is in: none makes another's void.
    """
    if read_url(database).get_backend_name() == "sqlite":
        return LOCAL
    host, machine = socket.gethostname()[:40], ""
    with suppress(OSError):
        machine = Path("/etc/machine-id").read_text(encoding="ascii").strip()
    place = f"{machine} {host} {local_token_file(database).resolve()}"
    return f"{LOCAL}@{host}-{hashlib.sha256(place.encode()).hexdigest()[:8]}"


def is_local(name: str) -> bool:
    """Whether a token is one that a service made for its own machine."""
    return name.partition("@")[0] == LOCAL


def keep_local_token(store: Store) -> Path | None:
    """See to it that the local token is there, and that its file holds it.

    Returns:
        The file; `None` where an operator has revoked the token, which stays so.

    Raises:
        FileError: The file cannot be written.
    """
    file, name = local_token_file(store.settings.database), local_name(store.settings.database)
    known = {token.name: token for token in store.tokens.list()}.get(name)
    if known is not None:
        if known.revoked is not None:
            return None
        with suppress(OSError, ValueError):
            found = store.tokens.find(file.read_text(encoding="ascii").strip())
            if found is not None and found.name == name:
                if found.scopes != set(LOCAL_SCOPES):  # an older version gave it more
                    store.tokens.limit(name, LOCAL_SCOPES)
                return file
        try:
            store.tokens.revoke(name)  # its secret is lost, so nobody can hold it rightly
        except NotFound:
            return None
    try:
        secret = store.tokens.create(name, LOCAL_SCOPES)
    except Conflict:  # another process that starts at the same time was quicker, and writes it
        return file
    # Nobody but its owner may read it, not for a moment.
    make_folder(file.parent)
    try:
        descriptor, aside = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")  # mode 0600
        with os.fdopen(descriptor, "w", encoding="ascii") as opened:
            opened.write(f"{secret}\n")
        Path(aside).replace(file)
    except OSError as error:
        raise FileError(f"cannot write {file}: {error.strerror}") from None
    return file
