"""Weights & Biases: a run in a project, offline where ``WANDB_MODE`` says so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import wandb
from google.protobuf.message import DecodeError
from wandb.proto.wandb_internal_pb2 import Record

from batchwright.client.trackers.following import TrackedRun

_BLOCK, _HEAD = 32 * 1024, 7  # bytes of a block of wandb's files, and of a record's head in it
_EXIT_CODES = {"finished": 0, "failed": 1}
_KILLED = 255  # as wandb's own hook reports Ctrl-C


class _WandB:
    lasts_after = 30.0
    """Seconds: wandb's own process writes and sends values later, and ends with this one."""

    def __init__(self, project: str, run: TrackedRun) -> None:
        self._last = run.after
        # Read before wandb opens a new file.
        earlier = _last_row(run.folder / "wandb", project, run.id)
        self._run = wandb.init(
            project=project,
            id=run.id,
            name=run.name,
            config=dict(run.facts),
            resume="allow",
            dir=str(run.folder),
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )
        # A server accepts no step twice. Files of an offline run have all that is written.
        self._written = earlier if self._run.offline else (-1, frozenset[str]())

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log values; a late accuracy gets the newest step, as wandb's steps never go back."""
        self._last = max(self._last, step)
        newest, names = self._written
        if self._last < newest:
            return
        known = names if self._last == newest else ()
        new = {name: value for name, value in values.items() if name not in known}
        if new:
            self._run.log(new, step=self._last)

    def flush(self) -> None:
        """Do nothing: wandb cannot flush; see `lasts_after`."""

    def close(self, outcome: str) -> None:
        self._run.finish(exit_code=_EXIT_CODES.get(outcome, _KILLED))


def open_tracker(place: str, run: TrackedRun) -> _WandB:
    """The run in a project."""
    return _WandB(place or "batchwright", run)


def _last_row(folder: Path, project: str, run: str) -> tuple[int, frozenset[str]]:
    """Highest step that an offline run's files hold, and the names that it has there; -1: none.

    A process that was killed may have written more than trackers.json says. wandb writes the values
    of a step together, once the next step begins or the run ends.
    """
    newest, names = -1, frozenset[str]()
    # Of folders in one second all but the first have a number behind the name.
    for path in folder.glob(f"offline-run-*-{run}*/*.wandb"):
        for record in _records(path.read_bytes()):
            if record.HasField("run") and record.run.project != project:
                break
            row = {".".join(one.nested_key) or one.key: one for one in record.history.item}
            if not row:
                continue
            step = int(row["_step"].value_json) if "_step" in row else record.history.step.num
            if step > newest:
                newest, names = step, frozenset(row)
            elif step == newest:
                names |= row.keys()
    return newest, names


def _records(content: bytes) -> Iterator[Record]:
    """The whole records of a wandb file, which has blocks as LevelDB's logs have them."""
    at, parts = _HEAD, b""
    while at + _HEAD <= len(content):
        if (left := _BLOCK - at % _BLOCK) < _HEAD:  # no head fits into the rest of a block
            at += left
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        begin, at = at + _HEAD, at + _HEAD + length
        if at > len(content) or not kind:  # a process was killed while it wrote
            return
        parts += content[begin:at]
        if kind in (1, 4):  # whole, or its last part
            try:
                record, parts = Record.FromString(parts), b""
            except DecodeError:
                return
            yield record
