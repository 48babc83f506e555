"""Default places of a service's files on this machine, and the token for clients of its user."""

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
"""Scopes of the local token: clients on this machine report runs, carry out jobs and submit them.
"""


def data_folder() -> Path:
    """The user's folder for the default database, and for the local token."""
    return user_data_path("batchwright")


def default_database() -> str:
    """URL of the default database."""
    return URL.create("sqlite", database=str(data_folder() / "service.sqlite")).render_as_string()


def default_artifacts(database: str) -> str | None:
    """Default folder of artifacts: beside a SQLite file; `None` for other databases, as services
    that share a database may not share a disk.
    """
    place = read_url(database)
    if place.get_backend_name() != "sqlite" or not place.database:
        return None
    return str(Path(place.database).absolute().parent / "artifacts")


def local_token_file(database: str) -> Path:
    """File of a database's local token: beside a SQLite file, else in the user's folder."""
    place = read_url(database)
    folder = data_folder()
    if place.get_backend_name() == "sqlite" and place.database:
        folder = Path(place.database).parent
    return folder / "local-token"


def local_name(database: str) -> str:
    """Name of a database's local token. Services that share a database have one each, with machine
    and folder in its name, so that none revokes another's.
    """
    if read_url(database).get_backend_name() == "sqlite":
        return LOCAL
    host, machine = socket.gethostname()[:40], ""
    with suppress(OSError):
        machine = Path("/etc/machine-id").read_text(encoding="ascii").strip()
    place = f"{machine} {host} {local_token_file(database).resolve()}"
    return f"{LOCAL}@{host}-{hashlib.sha256(place.encode()).hexdigest()[:8]}"


def is_local(name: str) -> bool:
    """Whether a token, by its name, is a local one."""
    return name.partition("@")[0] == LOCAL


def keep_local_token(store: Store) -> Path | None:
    """Make sure that there is a local token, and that its file holds it.

    Returns:
        The file; `None` where an operator has revoked the token, which stays revoked.

    Raises:
        FileError: The file cannot be written.
    """
    file, name = local_token_file(store.settings.database), local_name(store.settings.database)
    known = {token.name: token for token in store.tokens.list()}.get(name)
    if known is not None:
        if known.revoked is not None:
            return None
        with suppress(OSError, ValueError):
            caller = store.tokens.find(file.read_text(encoding="ascii").strip())
            if caller is not None and caller.name == name:
                if caller.scopes != set(LOCAL_SCOPES):  # an older version gave it more
                    store.tokens.limit(name, LOCAL_SCOPES)
                return file
        try:
            store.tokens.revoke(name)  # the file has lost its secret: no client can use it
        except NotFound:
            return None
    try:
        secret = store.tokens.create(name, LOCAL_SCOPES)
    except Conflict:  # another process that starts at the same time was quicker, and writes it
        return file
    # Only its owner may read the file, from its first moment on.
    make_folder(file.parent)
    try:
        descriptor, aside = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")  # mode 0600
        with os.fdopen(descriptor, "w", encoding="ascii") as opened:
            opened.write(f"{secret}\n")
        Path(aside).replace(file)
    except OSError as error:
        raise FileError(f"cannot write {file}: {error.strerror}") from None
    return file
