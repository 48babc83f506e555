"""The folder of a run: making it, finding it again, writing a run's inputs, reading its results."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import count
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from batchwright.errors import (
    ArgumentError,
    BatchwrightError,
    DeadlineReached,
    FileError,
    Interrupted,
    WorkerError,
    stopped_by,
)
from batchwright.records import (
    Check,
    Job,
    Plan,
    Profile,
    RateSchedule,
    RunSummary,
    Simulation,
    Sweep,
)
from batchwright.records.documents import (
    TRAINED,
    job_yaml,
    kind_in,
    load_job,
    read_one_of,
    read_record,
    write_record,
    write_text,
)
from batchwright.records.registries.data_sources import is_remote, source_of
from batchwright.records.text.formatting import counted, data_name
from batchwright.records.text.problems import described, to_stderr
from batchwright.storage.files import (
    beginning,
    is_file,
    is_folder,
    is_there,
    is_unfinished,
    make_folder,
    refusal,
)
from batchwright.storage.locks import LOCK_FILE, RESTART_SECONDS, writing

LAUNCH_FILE = "launch.json"
"""File with the launches that have opened the folder."""

CHECKPOINTED = "checkpointed"
"""Marker of a run that has had a ``last.pt``; outside ``checkpoints/``, to survive its loss."""

LAST, BEST, PREVIOUS = "last", "best", "previous"
"""Names of the checkpoints that a run can continue from; from ``best`` if it is newer than the
others, or if there never was another."""

KEPT = "epoch-"
"""Beginning of the names of checkpoints that stay, before the number of epochs trained."""

GOES_ON_BY_ITSELF = "continue the run as it was begun (Session(resume=True))"
"""Hint for the folder of a session, which only its own script can continue."""

_LONGEST_WORDS = 200  # bytes of a folder's default name before the time
_SHORTEST_DEADLINE = 60.0  # seconds, the least that a message suggests

_WHOLE = ("sweep.json", "summary.json", "plan.json")  # files of a folder, the fullest record first


@contextmanager
def new_run_folder(wanted: str | Path | None, job: Job) -> Iterator[Path]:
    """Make the folder of a run and print its path; inside, nobody else writes there.

    Args:
        wanted: The folder, new or empty; `None`: a new one under ``runs``.
        job: The job, for the folder's name.

    Raises:
        FileError: The folder is not empty, cannot be made, or another process writes there.
    """
    with new_folder(wanted, job) as folder:
        # Printed at once, so that the run can be found while it goes on.
        to_stderr(f"{job.network} on {job.data}, {counted(job.epochs, 'epoch')}, in {folder}")
        yield folder


@contextmanager
def new_folder(wanted: str | Path | None, job: Job, kind: str = "") -> Iterator[Path]:
    """Make a new folder and lock it; its default name consists of ``kind``, job and time.

    Raises:
        FileError: The folder is not empty, cannot be made, another process writes there, or what is
            written there would be taken for the job's data.
    """
    _refuse_among_data(Path("runs" if wanted is None else wanted), job)
    if wanted is None:
        data, network = data_name(job.data), job.network.replace(":", ".").replace("/", ".")
        what = beginning("-".join(filter(None, (kind, data, network))), _LONGEST_WORDS)
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        make_folder(Path("runs"))
        for number in count(1):  # several runs may begin in one second
            folder = Path("runs", f"{what}-{stamp}" + f"-{number}" * (number > 1))
            try:
                folder.mkdir()
            except FileExistsError:
                continue
            except OSError as error:
                raise refusal(folder, error, "name another with --out") from error
            break
    else:
        folder = Path(wanted)
    _refuse_filled(folder)
    with writing(folder):
        _refuse_filled(folder)  # again, since another process may have written before the lock
        yield folder


def _refuse_among_data(folder: Path, job: Job) -> None:
    """Refuse a folder that the job's data would take in: its workers would find other data."""
    source, place = source_of(job.data), job.data.partition(":")[2]
    if not (source.takes_in and place) or is_remote(place):
        return
    target = Path(os.path.realpath(folder))
    try:
        root = Path(os.path.realpath(Path(place).expanduser()))
    except RuntimeError:  # ~NAME of a user who is gone: opening the data refuses it
        return
    if root in target.parents and resolve_name(source.takes_in)(root, target, job):
        raise FileError(
            f"{folder} lies among the images of data={job.data}, where its figures would be taken "
            "for images: name a folder elsewhere with --out, such as --out ../run, or one that the "
            "data leaves out, as its name begins with a dot: --out .runs/1"
        )


def _refuse_filled(folder: Path) -> None:
    if not is_there(folder):
        return
    known = {LOCK_FILE, LAUNCH_FILE}
    # A process that was killed before its first file was complete has begun no run.
    if not is_folder(folder) or any(
        path.name not in known and not is_unfinished(path) for path in folder.iterdir()
    ):
        run = any(is_there(folder / name) for name in ("job.yaml", *_WHOLE))
        how = ", or continue its run with --resume" if run else ""
        raise FileError(f"{folder} exists and is not empty: choose another --out{how}")


@contextmanager
def existing_run(wanted: str | Path | None, *needed: str, again: bool = False) -> Iterator[Path]:
    """The folder of a run to resume; inside, nobody else writes there.

    Args:
        wanted: The folder; `None` is an error.
        *needed: Names of files of which the folder must hold one.
        again: Whether a launcher has started the command again.

    Raises:
        FileError: No folder was named, it does not exist, holds none of the files ``needed`` or has
            lost the plan that it was trained by, or another process writes there.
    """
    if wanted is None:
        raise FileError("resume which run? name its folder with --out")
    folder = Path(wanted)
    if "plan.json" in needed:
        _refuse_lost_plan(folder)
    if not any(is_there(folder / name) for name in needed):
        if not is_there(folder):
            raise FileError(
                f"there is no folder {folder}, so no run to resume: name another with --out, or "
                "start it anew without --resume"
            )
        how = "so no run to resume; start it anew"
        if any(is_there(folder / name) for name in TRAINED) and "plan.json" in needed:
            how = f"as of a loop of your own: {GOES_ON_BY_ITSELF}"
        raise FileError(f"{folder} holds no {needed[-1]}, {how}")
    with writing(folder, seconds=RESTART_SECONDS if again else None):
        yield folder


def _refuse_lost_plan(folder: Path) -> None:
    """Refuse a run that has trained and lost its plan: it can only continue with that plan."""
    begun = any(is_there(folder / name) for name in TRAINED)
    if is_there(folder / "plan.json") or not (begun and is_there(folder / "job.yaml")):
        return
    how = "put it back from a copy"
    if is_there(folder / "summary.json"):
        run, plan = (json.dumps(str(place)) for place in (folder, folder / "plan.json"))
        code = f"import batchwright as bw; bw.load({run}).plan.save({plan})"
        restoring = shlex.join(["python", "-c", code])
        how = f"summary.json holds it, and `{restoring}` puts it back"
    raise FileError(
        f"{folder} holds no plan.json, by which its run was trained: {how}; or begin another run "
        "in another folder (--out)"
    )


def write_inputs(folder: Path, plan: Plan, profile: Profile | None) -> None:
    """Write plan, profile and job into the run folder.

    A run can be resumed once its plan is there, and any other file makes the folder that of a run:
    so the plan comes first.
    """
    write_record(plan, folder / "plan.json")
    if profile is not None:
        write_record(profile, folder / "profile.json")
    write_text(job_yaml(plan.job), folder / "job.yaml")


@contextmanager
def telling_how_to_resume(
    command: str, *errors: type[WorkerError], deadline: float | None = None
) -> Iterator[None]:
    """Inside, add to the message of a stop the command that continues the run.

    The command line's signal handler raises a `KeyboardInterrupt` with the signal's number. One
    without a number, in a program without our handler, is raised again unchanged.

    Args:
        command: The command that continues.
        errors: Other errors after which the command continues the run.
        deadline: The job's ``goal.deadline``, in seconds: after a run that it has ended, the
            command gets a later one.
    """
    try:
        yield
    except KeyboardInterrupt as stop:
        if not stop.args:
            raise
        number = stop.args[0]
        said = f"{stopped_by(number)}; continue with `{command}`"
        raise Interrupted(number, said) from None
    except BatchwrightError as stop:
        if isinstance(stop, DeadlineReached) and deadline is not None:
            # Starting counts, too: with a deadline already over, the run would end at once.
            command += f" goal.deadline={max(2 * deadline, _SHORTEST_DEADLINE):.10g}"
        if isinstance(stop, (Interrupted, *errors)):
            stop.args = (f"{stop}; continue with `{command}`",)
        raise


def resuming_command(folder: str | Path, job: Job) -> str:
    """The command that continues a run; it repeats the import strings that the job names."""
    return shlex.join(["batchwright", *resuming_words(folder, job)])


def resuming_words(folder: str | Path, job: Job) -> list[str]:
    """The words of `resuming_command` after the program's name."""
    named = (f"{key}={getattr(job, key)}" for key in job.code_keys)
    return ["run", "--resume", "--out", str(folder), *named]


def has_begun(folder: Path) -> bool:
    """Whether a folder holds what training has written: lines, a summary, or any checkpoint."""
    return any((folder / name).exists() for name in ("metrics.jsonl", "summary.json")) or any(
        is_checkpoint(one.stem) for one in (folder / "checkpoints").glob("*.pt")
    )


def is_checkpoint(name: str) -> bool:
    """Whether training gives this name to a checkpoint, and not a user to a file of their own."""
    return name in (LAST, BEST, PREVIOUS) or re.fullmatch(f"{KEPT}[0-9]+", name) is not None


def has_checkpoint(folder: Path) -> bool:
    """Whether the folder of a run holds a checkpoint that it can continue from."""
    names = (LAST, PREVIOUS) if has_had_last(folder) else (LAST, PREVIOUS, BEST)
    return any((folder / "checkpoints" / f"{name}.pt").exists() for name in names)


def has_had_last(folder: Path) -> bool:
    """Whether a run has had a ``last.pt``, which may be lost by now; a summary follows one."""
    return any((folder / name).exists() for name in (CHECKPOINTED, "summary.json"))


def read_summary(run: str | Path) -> RunSummary:
    """The summary in a run folder or a summary file; ``-`` is stdin.

    Its ``run_folder`` is where the file was found, also after the folder was moved.

    Raises:
        FileError: There is no summary, or the file is something else.
    """
    if str(run) == "-":
        return read_record("-", RunSummary)
    path = Path(run)
    if is_folder(path):
        path = path / "summary.json"
        if is_there(path.parent / "sweep.json"):
            raise FileError(
                f"{run} is the folder of a sweep: its page is sweep.html, its runs are in cells/"
            )
        if not is_there(path):
            how = f"name a run's folder, or {GOES_ON_BY_ITSELF}"
            with suppress(BatchwrightError):  # a run of a `Session` leaves no job there
                job = load_job(Path(run) / "job.yaml")
                how = f"continue it with `{resuming_command(run, job)}`"
            raise FileError(f"{run} holds no summary.json: no run has finished there; {how}")
    return read_record(path, RunSummary).model_copy(update={"run_folder": str(path.parent)})


def read_plan(place: str | Path) -> Plan:
    """The plan in a plan's file, a summary's file, or a run folder; ``-`` is stdin.

    Raises:
        FileError: There is no plan, or the file is something else.
    """
    path = Path(place)
    if str(place) != "-" and is_folder(path) and not is_there(path / "plan.json"):
        if is_there(path / "summary.json"):
            path = path / "summary.json"
        elif any(is_there(path / name) for name in TRAINED):
            raise FileError(
                f"{place} holds no plan.json, as of a loop of your own: explain the plan's file "
                "that the loop was given (Session(plan=...)), or this folder once its run has ended"
            )
    if str(place) != "-" and is_file(path) and kind_in(path) == "summary":
        return read_record(path, RunSummary).plan
    return read_record(place, Plan)


def load(path: str | Path) -> Any:
    """Load the record in a file or a run folder, as the verbs returned it. Runs no code.

    Args:
        path: A file that a verb or ``save`` wrote, or a job's YAML file. Or a folder: of a run,
            for its summary, or its plan if the run has not finished; of a sweep, for the sweep.
            After the folder was moved, summary and sweep name the place where it is now.

    Returns:
        A `Plan`, `Profile`, `RunSummary`, `Sweep`, `Check`, `RateSchedule`, `Simulation` or `Job`.

    Raises:
        ArgumentError: ``path`` is not a path.
        FileError: There is no such file, or it holds something else, which the message names.
    """
    if not isinstance(path, str | Path):
        raise ArgumentError(f"load takes the path of a file or run folder, not {described(path)}")
    place = Path(path)
    if place.suffix.lower() in (".yaml", ".yml"):
        return load_job(place)
    if place.suffix.lower() in (".pt", ".pth"):
        raise FileError(
            f"{path} is a checkpoint by its name: a job starts from it with weights={path}, and "
            "torch.load(..., weights_only=True) opens it"
        )
    if is_folder(place):
        found = next((name for name in _WHOLE if is_there(place / name)), None)
        if found is None:
            raise FileError(f"{path} holds none of {', '.join(_WHOLE)}: it is no run folder")
        place = place / found
    record = read_one_of(place, (Plan, Profile, RunSummary, Sweep, Check, RateSchedule, Simulation))
    if isinstance(record, Sweep) and place.name == "sweep.json":
        return record.model_copy(update={"folder": str(place.parent)})
    return read_summary(place) if isinstance(record, RunSummary) else record


def read_summaries(run: str | Path) -> list[RunSummary]:
    """The summary of a run, or those of all finished runs of a sweep's folder.

    Raises:
        FileError: There is no summary, or a file is something else.
    """
    folder = Path(run)
    if not is_there(folder / "sweep.json"):
        return [read_summary(run)]
    sweep = read_record(folder / "sweep.json", Sweep)
    found, beside = sweep.done, [one for one in sweep.failed if sweep.runs_of(one.values)]
    if beside:
        to_stderr(
            f"warning: {counted(len(beside), 'run')} of the sweep in {run} failed where other "
            "seeds of the same setting did not: plans judge such a setting by the latter alone, so "
            "it may look better than it is"
        )
    if not found:
        command = shlex.join(["batchwright", "sweep", "--resume", "--out", str(run)])
        raise FileError(f"no run of the sweep in {run} has finished yet; go on with `{command}`")
    return [read_summary(folder / "cells" / cell.name) for cell in found]
