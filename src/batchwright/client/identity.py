"""By what a service knows an agent again: its folder, and this process."""

from __future__ import annotations

import json
import re
import socket
import uuid
from pathlib import Path

from batchwright.storage.files import write_whole

FILE = "agent.json"


def folder_id(folder: Path) -> str:
    """Identifier of an agent's folder, which stays; a copy of the folder gets one of its own.

    Raises:
        FileError: It cannot be written.
    """
    path, place = folder / FILE, folder.stat().st_ino
    try:
        values = json.loads(path.read_bytes())
        if values["inode"] == place:
            return str(uuid.UUID(values["id"]))
    except (OSError, ValueError, KeyError, TypeError):
        pass  # new, or a copy, or none of ours
    made = str(uuid.uuid4())
    write_whole(path, json.dumps({"id": made, "inode": place}).encode())
    return made


def usual_name(folder: Path) -> str:
    """What an agent is called where nobody says otherwise: by its machine and its folder."""
    words = re.sub(r"[^\w.-]+", "-", f"{socket.gethostname()}-{folder.resolve().name}")
    return words.strip("-")[:100] or "agent"
