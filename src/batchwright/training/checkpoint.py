"""Checkpoints: one file, written aside, synced and renamed; enough to continue exactly.

Only tensors and plain Python values inside, so ``torch.load(path, weights_only=True)`` opens it
without this package, and ``checkpoint["model"]`` is a plain ``state_dict``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from batchwright.errors import FileError

FORMAT = "batchwright-checkpoint/1"


def save_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Write a checkpoint whole or not at all.

    Raises:
        FileError: It cannot be written; the previous file is still there.
    """
    aside = path.with_name(f".{path.name}.writing")
    try:
        with aside.open("wb") as file:
            torch.save({"format": FORMAT, **content}, file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except (OSError, RuntimeError) as error:
        aside.unlink(missing_ok=True)
        raise FileError(
            f"cannot write the checkpoint {path}: {_cause(error)}; "
            "the previous one, if any, is unharmed; free some space and use --resume"
        ) from error


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint; tensors on the CPU.

    Raises:
        FileError: There is none, it is damaged, or it is something else.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise FileError(f"there is no checkpoint {path} to resume from") from None
    except Exception as error:  # noqa: BLE001 - torch.load raises whatever its unpickler meets
        raise FileError(f"{path} is no readable checkpoint: {_cause(error)}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise FileError(f"{path} is not a checkpoint of batchwright ({FORMAT})")
    return content


def _cause(error: BaseException) -> str:
    """The first line of a message; of the system's own where torch has put another over it."""
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, OSError):
        inner = inner.__context__
    if isinstance(inner, OSError) and inner.strerror:
        return inner.strerror
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
