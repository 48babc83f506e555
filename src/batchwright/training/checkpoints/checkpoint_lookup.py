"""Finds the checkpoint that a run goes on from: the newest that any worker can read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchwright.distributed.group import Group
from batchwright.errors import FileError
from batchwright.records.run_folder import CHECKPOINTED, LAST, PREVIOUS
from batchwright.records.text.problems import to_stderr
from batchwright.training.checkpoints.checkpoint import load_checkpoint
from batchwright.training.recorder import Recorder


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint, the same on all workers.

    Attributes:
        path: The file, on a machine that could read it.
        content: Its content.
        problems: Why newer files could not be used, on any machine.
        last_is_damaged: Whether this worker can read its ``previous.pt`` and not its ``last.pt``.
    """

    path: Path
    content: dict[str, Any]
    problems: list[str]
    last_is_damaged: bool

    def tell_problems(self, recorder: Recorder, where: str) -> None:
        """Note, and print on worker 0, that this checkpoint stands in for an unreadable one."""
        if self.problems:
            text = f"{'; '.join(self.problems)}; {self.path} is used instead: {where}"
            recorder.note(text)
            if recorder.folder is not None:  # only the run's writer has one
                to_stderr(f"batchwright: {text}")


def find_checkpoint(folder: Path, group: Group) -> FoundCheckpoint | None:
    """Read ``last.pt``, else ``previous.pt``; all workers call this together.

    Machines that share no disk may hold checkpoints of different age, or none. The one with the
    most steps wins, of equals the one written last, and goes to the workers that lack it.

    Args:
        folder: Folder of the checkpoints.
        group: The workers.

    Returns:
        The checkpoint; ``None`` if there is none anywhere, and never was.

    Raises:
        FileError: There are checkpoints, or have been, and no worker can read any.
    """
    path, content, problems = _read_newest(folder)
    position = _position(content) if content is not None else None
    everyone = group.gather((position, str(path), problems))
    known = [theirs for theirs, _, _ in everyone if theirs is not None]
    problems = list(dict.fromkeys(text for _, _, texts in everyone for text in texts))
    if not known:
        if problems:
            raise FileError(
                "; ".join(problems) + "; put a copy of one back, or begin again in another folder"
            )
        return None
    newest = max(known)
    source = next(rank for rank, (theirs, _, _) in enumerate(everyone) if theirs == newest)
    if any(theirs != newest for theirs, _, _ in everyone):
        content = group.hand_out(content, source)
    assert content is not None  # noqa: S101 - it is the newest, or has just been handed out
    last_is_damaged = path is not None and path.stem == PREVIOUS
    return FoundCheckpoint(Path(everyone[source][1]), content, problems, last_is_damaged)


def _read_newest(folder: Path) -> tuple[Path | None, dict[str, Any] | None, list[str]]:
    """Path and content of the newest checkpoint that this worker can read, and problems."""
    problems: list[str] = []
    for name in (LAST, PREVIOUS):
        path = folder / f"{name}.pt"
        try:
            return path, load_checkpoint(path), problems
        except FileError as error:
            problems.append(str(error))
    if any((folder / f"{name}.pt").exists() for name in (LAST, PREVIOUS)):
        return None, None, problems
    # Neither metrics.jsonl nor best.pt tells a run that was killed before its first checkpoint,
    # which begins again, from one whose checkpoints were lost. A summary follows the last one.
    if any((folder.parent / name).exists() for name in (CHECKPOINTED, "summary.json")):
        return None, None, [f"{folder} holds no readable checkpoint (last.pt) any more"]
    return None, None, []


def _position(content: dict[str, Any]) -> tuple[int, int, int]:
    state = content["state"]
    return state["epoch"], state["step"], content["written"]
