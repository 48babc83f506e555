"""Finds the checkpoint that a run goes on from: the newest that any worker can read."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchwright.distributed.group import Group
from batchwright.errors import BatchwrightError, FileError
from batchwright.records.run_folder import BEST, KEPT, LAST, PREVIOUS, has_had_last
from batchwright.records.text.problems import to_stderr
from batchwright.training.checkpoints.checkpoint import load_checkpoint
from batchwright.training.recorder import Recorder
from batchwright.training.step.epoch_totals import is_better

_NONE = -math.inf, math.inf
"""Score and loss that any evaluation beats."""


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint, the same on all workers.

    Attributes:
        path: The file, on a machine that could read it.
        content: Its content.
        problems: Why newer files could not be used, on any machine.
        last_is_damaged: Whether this worker can read its ``previous.pt`` and not its ``last.pt``.
        last_steps: Steps of the run in this worker's ``last.pt``; 0 if it cannot be read.
        best: Score and loss of the model in worker 0's ``best.pt``, which a better one replaces.
            Any one does where there is none, or one of epochs that the checkpoint does not know.
    """

    path: Path
    content: dict[str, Any]
    problems: list[str]
    last_is_damaged: bool
    last_steps: int
    best: tuple[float, float]

    @property
    def source(self) -> str:
        """Words behind where the run goes on, if that is not what it usually goes on from."""
        return f", from {self.path.name}, the newest" if self.path.stem == BEST else ""

    def tell_problems(self, recorder: Recorder, where: str) -> None:
        """Note, and print on worker 0, that this checkpoint stands in for an unreadable one."""
        if self.problems:
            text = f"{'; '.join(self.problems)}; {self.path} is used instead: {where}"
            recorder.note(text)
            if recorder.folder is not None:  # only the run's writer has one
                to_stderr(f"batchwright: {text}")


def find_checkpoint(folder: Path, group: Group) -> FoundCheckpoint | None:
    """Read ``last.pt``, else ``previous.pt``, or ``best.pt`` if that is newer or alone.

    All workers call this together. ``best.pt`` is written more often: with ``last.pt`` its epoch
    would be lost, and its weights would be those of an epoch that the run has never had. Where a
    ``last.pt`` has been lost, an older ``best.pt`` is not taken: of the lost one there may be a
    copy.

    Machines that share no disk may hold checkpoints of different age, or none. The one with the
    most steps wins, of equals the one made last, and goes to the workers that lack it.

    Args:
        folder: Folder of the checkpoints.
        group: The workers.

    Returns:
        The checkpoint; ``None`` if there is none anywhere, and never was.

    Raises:
        FileError: There are checkpoints, or have been, and no worker can read any.
    """
    own = _read_newest(folder)
    position = _position(own.content) if own.content is not None else None
    everyone = group.gather((position, str(own.path), own.problems, own.best))
    known = [theirs for theirs, *_ in everyone if theirs is not None]
    problems = list(dict.fromkeys(text for _, _, texts, _ in everyone for text in texts))
    if not known:
        if problems:
            said, which = "; ".join(problems), ""
            with suppress(BatchwrightError):
                _load_whole(folder / f"{BEST}.pt", mapped=True)
                which = " (or best.pt in the place of last.pt, though it is older)"
            raise FileError(
                f"{said}; put a copy of one back{which}, or begin again in another folder"
            )
        return None
    newest, content = max(known), own.content
    source = next(rank for rank, (theirs, *_) in enumerate(everyone) if theirs == newest)
    if any(theirs != newest for theirs, *_ in everyone):
        content = group.hand_out(content, source)
    assert content is not None  # noqa: S101 - it is the newest, or has just been handed out
    best = everyone[0][3]
    if is_better(best, _best_in(content)):
        best = _NONE
    return FoundCheckpoint(
        Path(everyone[source][1]), content, problems, own.last_is_damaged, own.last_steps, best
    )


@dataclass
class _Read:
    """What a worker can read: the newest checkpoint, and the score in ``best.pt``."""

    path: Path | None = None
    content: dict[str, Any] | None = None
    problems: list[str] = field(default_factory=list)
    last_is_damaged: bool = False
    last_steps: int = 0
    best: tuple[float, float] = _NONE


def _read_newest(folder: Path) -> _Read:
    found = _Read()
    for name in (LAST, PREVIOUS):
        path = folder / f"{name}.pt"
        try:
            found.content = _load_whole(path)
        except FileError as error:
            found.problems.append(str(error))
        else:
            found.path, found.last_is_damaged = path, name == PREVIOUS
            if name == LAST:
                found.last_steps = found.content["state"]["steps"]
            _read_best(folder, found)
            return found
    if any((folder / f"{name}.pt").exists() for name in (LAST, PREVIOUS)):
        return found
    # metrics.jsonl does not tell a run that was killed before its first ``last.pt``, which goes on
    # from its ``best.pt`` or begins again, from one that has lost it.
    if has_had_last(folder.parent):
        found.problems = [f"{folder} holds no readable checkpoint (last.pt) any more"]
        return found
    path, found.problems = folder / f"{BEST}.pt", []
    if path.exists():
        try:
            content = _load_whole(path)
        except FileError as error:
            found.problems = [str(error)]
        else:
            found.path, found.content, found.best = path, content, _best_in(content)
    return found


def _read_best(folder: Path, found: _Read) -> None:
    """Look at ``best.pt``, and take it instead of the checkpoint that was found if it is newer."""
    path = folder / f"{BEST}.pt"
    with suppress(FileError):
        best = load_checkpoint(path, mapped=True)  # of most only the score is wanted
        found.best = _best_in(best)
        assert found.content is not None  # noqa: S101 - the caller has found one
        if _is_whole(best) and _position(best) > _position(found.content):
            _take_best(path, found)


def _take_best(path: Path, found: _Read) -> None:
    """Take ``best.pt`` instead of what was found; where it is damaged, what was found again."""
    other = found.path
    assert other is not None  # noqa: S101 - the content was read from it
    found.content = None  # a machine may have no room for both, in each of its workers
    try:
        found.path, found.content = path, load_checkpoint(path)
    except FileError as error:
        found.problems.append(str(error))
        found.best, found.content = _NONE, load_checkpoint(other)


def _load_whole(path: Path, *, mapped: bool = False) -> dict[str, Any]:
    """As `load_checkpoint`; a checkpoint that a run cannot go on from is a `FileError`, too."""
    content = load_checkpoint(path, mapped=mapped)
    if not _is_whole(content):
        raise FileError(
            f"{path} holds the weights alone, as a parameter server's {KEPT}N.pt does, and an "
            "earlier version's best.pt"
        )
    return content


def _is_whole(content: dict[str, Any]) -> bool:
    """Whether a run can go on from a checkpoint: with a parameter server, some have weights alone.

    They are those of single epochs, and an earlier version's ``best.pt``.
    """
    return content.get("server") != {}


def _position(content: dict[str, Any]) -> tuple[int, int, int, int]:
    state = content["state"]
    return state["epoch"], state["step"], state["steps"], content["written"]


def _best_in(content: dict[str, Any]) -> tuple[float, float]:
    """Score and loss of the best model that a checkpoint knows."""
    state = content["state"]
    # An earlier version kept no loss, and the first of equal epochs stays its best.
    return state["best_score"], state.get("best_loss", -math.inf)
