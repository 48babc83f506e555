"""Checkpoints: one file, written aside, synced and renamed; enough to continue exactly.

The previous file may be kept beside it. Whenever a process is killed, one of the two is whole.

Only tensors and plain Python values inside (see `plain`), so ``torch.load(path,
weights_only=True)`` opens it without this package, and ``checkpoint["model"]`` is a plain
``state_dict``; ``checkpoint["average"]``, where there is one, is that of the averaged weights,
which were evaluated.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from batchwright.errors import BatchwrightError, FileError
from batchwright.records import Plan
from batchwright.storage.files import sync
from batchwright.training.checkpoints.saved_values import from_plain, to_plain
from batchwright.workload.starting_weights import load_tensors

FORMAT = "batchwright-checkpoint/1"


def save_checkpoint(
    path: Path, content: dict[str, Any], *, former: Path | None = None, mark: Path | None = None
) -> None:
    """Write a checkpoint whole or not at all.

    Its ``written`` is the time in ns of Unix time, unless the content says another.

    Args:
        path: The file to write.
        content: Tensors on the CPU, and whatever else `to_plain` takes.
        former: New name of the file that was at ``path``; unset: it is replaced.
        mark: An empty file that is made once the checkpoint is there.

    Raises:
        FileError: It cannot be written, or could not be read back; the previous file is still
            there.
    """
    whole = {"format": FORMAT, "written": time.time_ns(), **content}
    plain = to_plain(whole, f"{path}: checkpoint", lambda tensor: tensor)
    aside = path.with_name(f".{path.name}.writing")
    try:
        with aside.open("wb") as file:
            torch.save(plain, file)
            file.flush()
            os.fsync(file.fileno())
        if former is not None and path.exists():
            path.replace(former)
        aside.replace(path)
        if mark is not None:  # before the sync, which takes long enough to be killed in
            with suppress(OSError):
                mark.touch()
        with suppress(OSError):  # not every system can
            sync(path.parent)
    except (OSError, RuntimeError) as error:
        aside.unlink(missing_ok=True)
        raise FileError(
            f"cannot write the checkpoint {path}: {_cause(error)}; "
            "the previous one, if any, is unharmed; free some space, and resume the run"
        ) from error


def about_network(plan: Plan, description: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a checkpoint for users of its network: name, classes, input and plan."""
    return {
        "network": plan.network.name,
        "classes": list(plan.data.classes),
        "input": dict(description),
        "plan": plan.model_dump_json(),
    }


def load_checkpoint(path: Path, *, mapped: bool = False) -> dict[str, Any]:
    """Read a checkpoint; its tensors are on the CPU, or ``mapped`` from the file and not read yet.

    Raises:
        FileError: There is no such file, it is damaged, or it is no checkpoint.
        BatchwrightError: Memory ran out, which says nothing of the file.
    """
    try:
        content = load_tensors(path, mapped=mapped)
    except FileNotFoundError:
        raise FileError(f"there is no checkpoint {path} to resume from") from None
    except OSError as error:
        raise FileError(f"{path} is no readable checkpoint: {_cause(error)}") from None
    except BatchwrightError:
        raise
    except Exception:  # noqa: BLE001 - torch.load raises whatever its unpickler meets
        # Not torch's message, which advises to read the file in a way that runs code in it.
        raise FileError(
            f"{path} is no readable checkpoint: it is damaged, cut short or of another program"
        ) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise FileError(f"{path} is not a checkpoint of batchwright ({FORMAT})")
    return from_plain(content)  # type: ignore[no-any-return] # a dict stays one


def _cause(error: BaseException) -> str:
    """First line of an error's message, or the system's own where torch has wrapped it."""
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, OSError):
        inner = inner.__context__
    if isinstance(inner, OSError) and inner.strerror:
        return inner.strerror
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
