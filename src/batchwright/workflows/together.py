"""Verbs in processes that another launcher has started: worker 0 leads, the others help.

    torchrun --nproc-per-node 2 -m batchwright run job.yaml
    srun batchwright run job.yaml

Only worker 0 reads arguments and files, plans, prints and writes. The others take part in what
needs all of them: timing steps and exchanges, and training. All end with the same exit code.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from batchwright.distributed.joining.environments import (
    Started,
    adopt,
    found,
    joined,
    note_opened,
    read_opened,
)
from batchwright.errors import (
    BatchwrightError,
    DeadlineReached,
    FileError,
    Interrupted,
    LostWorkerError,
    NewPlan,
    PlanError,
    WorkerError,
    one_line,
)
from batchwright.records import Plan, Record
from batchwright.storage.files import is_there, look_again

if TYPE_CHECKING:
    from batchwright.distributed.joining.gathering import Ended, Gathering

TOGETHER = ("run", "probe", "check", "train", "sweep")
"""Verbs of the command line in which all processes take part."""
BY_ONE = (
    *("plan", "explain", "schedule", "simulate", "report", "export", "deliver", "predict", "keys"),
    *("submit", "fetch", "send", "serve", "token", "sign-in", "backup"),
)
"""Verbs that worker 0 carries out alone, since their output is needed only once."""
ONCE_A_HOST = ("doctor", "agent")
"""Verbs that one process of each host carries out, since hosts differ."""

_SHARED_SECONDS = 10.0  # until a file that worker 0 has written must be visible on a shared disk
_MARK = ".shared-"  # beginning of the name of such a file

P = ParamSpec("P")
R = TypeVar("R", bound=Record)


def together(
    kind: type[R], *, unless: str | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator for a verb that all processes of a launcher's start carry out together.

    Worker 0 runs the verb, the others help, and all return its result. Where no other launcher has
    started this process the verb is simply called.

    Args:
        kind: The type of the verb's result.
        unless: Keyword argument with which each process calls the verb itself.
    """

    def decorate(verb: Callable[P, R]) -> Callable[P, R]:
        @wraps(verb)
        def begun(*arguments: P.args, **keys: P.kwargs) -> R:
            by_all = unless is not None and keys.get(unless) is not None
            started = found() if joined() is None and not by_all else None
            if started is None:
                return verb(*arguments, **keys)
            if started.rank == 0:
                led: R = lead(started, lambda: verb(*arguments, **keys), verb.__name__)
                return led
            ended = follow(started, verb.__name__)
            if ended.code:
                raise _error_of(ended)
            return kind.model_validate_json(ended.result)

        return begun

    return decorate


def lead(started: Started, work: Callable[[], Any], words: str) -> Any:
    """Carry out a verb as worker 0 of several processes; the others end as it does.

    Args:
        started: This process.
        work: Carries out the verb.
        words: The command line, or the verb, which must be the same in all processes.

    Raises:
        BatchwrightError: What ``work`` raises, or what keeps the processes from working together.
    """
    adopt(started)  # before torch is loaded, which reads variables that this sets
    from batchwright.distributed.joining.gathering import Ended

    with _gathered(started, words) as gathering:
        try:
            result = work()
        except BaseException as error:
            gathering.end(Ended(_code_of(error), one_line(error)))
            raise
        gathering.end(Ended(0, result=result.model_dump_json() if result is not None else ""))
        return result


def follow(started: Started, words: str) -> Ended:
    """Help worker 0 until it has ended.

    Args:
        started: This process.
        words: As for `lead`.

    Returns:
        How worker 0 has ended, with its result.

    Raises:
        BatchwrightError: Worker 0 cannot be reached, is gone, or could not be notified of an
            error here.
    """
    adopt(started)  # as above
    from batchwright.distributed.joining.gathering import Ended
    from batchwright.distributed.supervisor import noting_signals

    try:
        gathering = _gathered(started, words)
    except PlanError as error:  # all processes have found it: worker 0 reports it
        return Ended(error.exit_code, one_line(error))
    # Usually worker 0 gets the same stop signal and announces it to all, or is gone at once.
    with gathering, noting_signals() as gathering.noted:
        try:
            return gathering.follow(_Work(gathering))
        except LostWorkerError:
            if stops := gathering.stops():
                return Ended(128 + stops[0])
            raise


def take_part(words: list[str], command: Callable[[], Any]) -> None:
    """Carry out a command line, or help with it if another launcher has started several processes.

    Args:
        words: The command line.
        command: Carries it out in this process; never returns.

    Raises:
        BatchwrightError: As `lead` and `follow` raise.
        SystemExit: As ``command`` does, in all processes.
    """
    verb = next((word for word in words if not word.startswith("-")), "")
    alone = {"-h", "--help"} & {*words} or verb not in (*TOGETHER, *BY_ONE, *ONCE_A_HOST)
    started = None if alone else found()
    if started is None:
        command()
    elif verb not in TOGETHER:
        if not (started.local_rank if verb in ONCE_A_HOST else started.rank):
            command()
    else:
        # A host that joins later may be started with --resume, unlike the others.
        same_words = " ".join(word for word in words if word != "--resume")
        if started.rank:
            raise SystemExit(follow(started, same_words).code)
        lead(started, command, same_words)


# ------------------------------------------------------------------------------- worker 0's part


def train_together(plan: Plan, folder: Path, *, resume: bool, follow_advice: bool) -> None:
    """Train with all processes of the start, until the training ends or switches to another plan.

    Raises:
        BatchwrightError: The training failed on some host; the message is one line.
        Interrupted: A stop signal came; a checkpoint was written.
    """
    from batchwright.distributed.joining.gathering import Gathering
    from batchwright.probing.together import ask_for_places

    gathering = Gathering.current
    assert gathering is not None  # noqa: S101 - `joined` has returned this start
    found = ask_for_places(gathering, plan.job, plan.data.digest)
    places = list(range(gathering.started.size))
    if not resume or plan.workers == gathering.started.size:
        planned = [one.kind for one in plan.kinds]
        named = plan.job.probe.kind
        places = places_in(plan, [one.kind_in_plan(planned, named) for one in found])
        if plan.server is None:  # a server's groups of workers would have to stay together
            plan, places = arranged(plan, places), sorted(places)
    find_everywhere(folder)
    gathering.order(
        "train",
        plan=plan.model_dump_json(),
        folder=str(folder.absolute()),
        resume=resume,
        follow_advice=follow_advice,
        places=places,
    )
    with gathering.explaining():
        _train(plan, folder, places[0], resume=resume, follow_advice=follow_advice)


def find_everywhere(folder: Path) -> None:
    """Check that all processes of the start see a folder under the same path.

    Raises:
        FileError: The folder is not on a disk that all of them share.
    """
    from batchwright.distributed.joining.gathering import Gathering

    gathering = Gathering.current
    if gathering is None:
        return
    token = folder / f"{_MARK}{secrets.token_hex(8)}"
    try:
        token.write_bytes(b"")
        gathering.ask("find", path=str(token.absolute()))
    finally:
        token.unlink(missing_ok=True)


def places_in(plan: Plan, kinds: Sequence[str]) -> list[int]:
    """The place of each started worker in the plan's lists of local batches.

    Args:
        plan: The plan; its lists of local batches are in the order of its kinds.
        kinds: Kind of each started worker, in rank order.

    Raises:
        PlanError: Workers of other kinds were started than the plan is for.
    """
    if len(plan.kinds) < 2:
        return list(range(len(kinds)))
    planned = [one.kind for one in plan.kinds for _ in range(one.count)]
    if sorted(planned) != sorted(kinds):
        wanted, found = (
            ", ".join(f"{names.count(name)} of {name}" for name in dict.fromkeys(names))
            for names in (planned, list(kinds))
        )
        raise PlanError(
            f"the plan is for {wanted}, and started are {found}: start those, say on each host "
            "which kind it is (BATCHWRIGHT_KIND=NAME), or plan again"
        )
    open_: dict[str, list[int]] = {}
    for place, name in enumerate(planned):
        open_.setdefault(name, []).append(place)
    return [open_[name].pop(0) for name in kinds]


def arranged(plan: Plan, places: Sequence[int]) -> Plan:
    """The plan with its local batches in rank order; ``places`` are from `places_in`."""
    if list(places) == sorted(places):
        return plan
    rows = [
        row.model_copy(
            update={"local_batch_sizes": tuple(row.local_batch_sizes[place] for place in places)}
        )
        for row in plan.stages
    ]
    return plan.model_copy(update={"stages": tuple(rows)})


def begun_before(folder: str | Path | None, asked: str = "") -> Path | None:
    """The folder of a run or sweep that an earlier start of this very launch has opened, if any.

    A launcher starts all processes again with the same command line when one was lost, or when a
    host joins or leaves. A run without a named folder is searched for under ``runs``. A script may
    do several runs in a row, so only a run of the same request is continued.

    Args:
        folder: The run folder, if one was named.
        asked: The request: job and grid as a text; empty for a plan, which the script may have
            made again.
    """
    starts = _starts()
    if starts is None:
        return None
    what = _asked(asked)
    places = [Path(folder)] if folder is not None else sorted(Path("runs").glob("*"), reverse=True)
    named = ("plan.json", "job.yaml", "sweep.json")
    return next(
        (
            place
            for place in places
            if any(is_there(place / name) for name in named)
            and (opened := read_opened(place)).by_an_earlier_start(*starts)
            and opened.asked == what
        ),
        None,
    )


def note_begun(folder: Path, asked: str = "") -> None:
    """Note this launch and the request ``asked`` in a new run folder, for `begun_before`."""
    starts = _starts()
    if starts is not None:
        note_opened(folder, *starts, asked=_asked(asked))


def _asked(asked: str) -> str:
    """The request as one text: the command line, or a verb with the digest of ``asked``.

    A command line counts by its words alone, since files that it names may change while it runs.
    """
    from batchwright.distributed.joining.gathering import Gathering

    gathering = Gathering.current
    assert gathering is not None  # noqa: S101 - callers have checked `_starts`
    words = gathering.members[0].words
    if words not in TOGETHER or not asked:
        return words
    return f"{words} {sha256(asked.encode()).hexdigest()}"


def _starts() -> tuple[set[str], set[str]] | None:
    """Identifiers of the launches and processes of this start; `None` if there is no launcher."""
    if joined() is None:
        return None
    from batchwright.distributed.joining.gathering import Gathering

    gathering = Gathering.current
    assert gathering is not None  # noqa: S101 - this process has joined a start
    launches = {one.launch for one in gathering.members} - {""}
    return (launches, {one.process for one in gathering.members}) if launches else None


# ------------------------------------------------------------------------------ the others' part


class _Work:
    """Carries out the orders of worker 0 in another process."""

    def __init__(self, gathering: Gathering) -> None:
        from batchwright.probing.together import Helper, look
        from batchwright.workflows.sweep.sharing import run_share, seen_gpus

        self._gathering, self._helper = gathering, Helper()
        self._does: dict[str, Callable[[Gathering, Mapping[str, Any]], Any]] = {
            "look": look,
            "find": self._find,
            "train": self._train,
            "cells": run_share,
            "gpus": seen_gpus,
            "measure": self._helper.measure,
            "command": self._helper.command,
            "measured": self._helper.measured,
        }

    def __call__(self, order: Mapping[str, Any]) -> Any:
        try:
            return self._does[order["do"]](self._gathering, order)
        except (Interrupted, NewPlan):
            return None  # all workers have ended so: worker 0 decides what is next
        except BaseException as error:
            if not isinstance(error, BatchwrightError | KeyboardInterrupt):
                traceback.print_exc()
            self._helper.close(error)
            raise

    def _find(self, gathering: Gathering, order: Mapping[str, Any]) -> None:
        path = Path(order["path"])
        limit = time.monotonic() + _SHARED_SECONDS
        while not path.exists():
            if time.monotonic() > limit:
                first = gathering.members[0].host
                raise FileError(
                    f"{path.parent} here is not the run folder that worker 0 ({first}) writes: "
                    "give --out a folder on a disk that all hosts share, under the same path"
                )
            time.sleep(0.1)
            look_again(path.parent)

    def _train(self, gathering: Gathering, order: Mapping[str, Any]) -> None:
        _train(
            Plan.model_validate_json(order["plan"]),
            Path(order["folder"]),
            order["places"][gathering.started.rank],
            resume=order["resume"],
            follow_advice=order["follow_advice"],
        )


def _train(plan: Plan, folder: Path, place: int, *, resume: bool, follow_advice: bool) -> None:
    from batchwright.distributed.server_child import PLACE
    from batchwright.probing.together import own_device
    from batchwright.training.loop import train

    os.environ[PLACE] = str(place)
    try:
        train(
            plan,
            run_folder=folder,
            resume=resume,
            device=own_device(plan.job),
            follow_advice=follow_advice,
        )
    except NewPlan:
        return  # the folder's plan has changed: worker 0 continues with the new one
    finally:
        del os.environ[PLACE]


# ---------------------------------------------------------------------------------------- all


def _gathered(started: Started, words: str) -> Gathering:
    from batchwright.distributed.joining.gathering import Gathering
    from batchwright.distributed.joining.versions import versions
    from batchwright.distributed.processes import ENGINE_PARENT, die_with_agent, die_with_parent

    die_with_agent()
    die_with_parent(ENGINE_PARENT)
    return Gathering(started, versions=versions(), words=words)


def _code_of(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, KeyboardInterrupt):  # raised by a signal handler, with the signal's number
        return 128 + (error.args[0] if error.args else signal.SIGINT)
    return error.exit_code if isinstance(error, BatchwrightError) else 1


def _error_of(ended: Ended) -> BatchwrightError:
    """The error that worker 0 has ended with, to raise in another process."""
    if ended.code > 128:
        return Interrupted(ended.code - 128, ended.message)
    if ended.code == DeadlineReached.exit_code:
        return DeadlineReached(ended.message)
    return BatchwrightError(ended.message) if ended.code == 2 else WorkerError(ended.message)
