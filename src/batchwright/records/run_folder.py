"""The folder of a run: made, found again, filled with what went in, read when it is over."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

from batchwright.errors import (
    ArgumentError,
    BatchwrightError,
    DeadlineReached,
    FileError,
    Interrupted,
    WorkerError,
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
from batchwright.records.text.formatting import counted, data_name
from batchwright.records.text.problems import described
from batchwright.storage.files import make_folder, refusal
from batchwright.storage.locks import LOCK_FILE, writing

LAUNCH_FILE = "launch.json"
"""Which launches have opened the folder."""

CHECKPOINTED = "checkpointed"
"""That there has been a ``last.pt``; outside ``checkpoints/``, to outlast it."""

LAST, PREVIOUS = "last", "previous"
"""Checkpoints that a run goes on from, by their files' stems; it does not from ``best.pt``."""

GOES_ON_BY_ITSELF = "continue the run as it was begun (Session(resume=True))"
"""What to do with the folder of a session, which is no command's to go on with."""

_SHORTEST_DEADLINE = 60.0  # seconds, of those that are suggested

_WHOLE = ("sweep.json", "summary.json", "plan.json")  # what tells most of a folder, in order


@contextmanager
def new_run_folder(wanted: str | Path | None, job: Job) -> Iterator[Path]:
    """Make the run's folder, under ``runs`` unless one is wanted; inside, nobody else writes there.

    Raises:
        FileError: It holds anything, cannot be made, or somebody else writes there.
    """
    with new_folder(wanted, job) as folder:
        epochs = counted(job.epochs, "epoch")
        told = f"{job.network} on {job.data}, {epochs}, in {folder}"
        print(told, file=sys.stderr)  # noqa: T201 - so that it can be found while it runs
        yield folder


@contextmanager
def new_folder(wanted: str | Path | None, job: Job, kind: str = "") -> Iterator[Path]:
    """A new folder, locked; if none is wanted, its name is made of ``kind``, job and time.

    Raises:
        FileError: It holds anything, cannot be made, or somebody else writes there.
    """
    if wanted is None:
        data, network = data_name(job.data), job.network.replace(":", ".").replace("/", ".")
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        folder = _of_its_own(Path("runs"), "-".join(filter(None, (kind, data, network, stamp))))
    else:
        folder = Path(wanted)
    _refuse_filled(folder)
    with writing(folder):
        _refuse_filled(folder)  # somebody else may have been quicker
        yield folder


def _of_its_own(place: Path, name: str) -> Path:
    """A new folder of that name, or with a number behind it: several may begin in one second."""
    make_folder(place)
    for number in count(1):
        folder = place / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        except OSError as error:
            raise refusal(folder, error, "name another with --out") from error
        return folder
    raise AssertionError  # numbers do not end


def _refuse_filled(folder: Path) -> None:
    if not folder.exists():
        return
    known = {LOCK_FILE, LAUNCH_FILE}
    if not folder.is_dir() or any(path.name not in known for path in folder.iterdir()):
        run = any((folder / name).exists() for name in ("job.yaml", *_WHOLE))
        how = ", or continue its run with --resume" if run else ""
        raise FileError(f"{folder} exists and is not empty: choose another --out{how}")


@contextmanager
def existing_run(wanted: str | Path | None, *needed: str) -> Iterator[Path]:
    """The folder of a run to resume; inside, nobody else writes there.

    Raises:
        FileError: None was named, it is not there, holds none of the files ``needed`` or has lost
            the plan that it was trained by, or somebody else writes.
    """
    if wanted is None:
        raise FileError("resume which run? name its folder with --out")
    folder = Path(wanted)
    if "plan.json" in needed:
        _refuse_lost_plan(folder)
    if not any((folder / name).exists() for name in needed):
        if not folder.exists():
            raise FileError(
                f"there is no folder {folder}, so no run to resume: name another with --out, or "
                "start it anew without --resume"
            )
        how = "so no run to resume; start it anew"
        if any((folder / name).exists() for name in TRAINED) and "plan.json" in needed:
            how = f"as of a loop of your own: {GOES_ON_BY_ITSELF}"
        raise FileError(f"{folder} holds no {needed[-1]}, {how}")
    with writing(folder):
        yield folder


def _refuse_lost_plan(folder: Path) -> None:
    """Refuse to measure and plan anew what was trained already: only its own plan goes on with it.

    Raises:
        FileError: The folder has a job and what training leaves, and no plan.
    """
    begun = any((folder / name).exists() for name in TRAINED)
    if (folder / "plan.json").exists() or not (begun and (folder / "job.yaml").exists()):
        return
    how = "put it back from a copy"
    if (folder / "summary.json").exists():
        run, plan = (json.dumps(str(place)) for place in (folder, folder / "plan.json"))
        code = f"import batchwright as bw; bw.load({run}).plan.save({plan})"
        restoring = shlex.join(["python", "-c", code])
        how = f"summary.json holds it, and `{restoring}` puts it back"
    raise FileError(
        f"{folder} holds no plan.json, by which its run was trained: {how}; or begin another run "
        "in another folder (--out)"
    )


def write_inputs(folder: Path, plan: Plan, profile: Profile | None) -> None:
    """Write job, plan and profile into the run folder."""
    write_text(job_yaml(plan.job), folder / "job.yaml")
    write_record(plan, folder / "plan.json")
    if profile is not None:
        write_record(profile, folder / "profile.json")


@contextmanager
def telling_how_to_resume(
    command: str, *errors: type[WorkerError], deadline: float | None = None
) -> Iterator[None]:
    """Add to the message of a stop that was asked for which command goes on from it.

    The command line's handler of signals unwinds by a `KeyboardInterrupt` with the signal's number;
    that of a program without our handler, which has none, goes on as it is.

    Args:
        command: What goes on.
        errors: Other ends from which it does.
        deadline: The job's ``goal.deadline``, in seconds: when that has ended the run, the command
            needs a later one.
    """
    try:
        yield
    except KeyboardInterrupt as stop:
        if not stop.args:
            raise
        number = stop.args[0]
        said = f"stopped by signal {number}; continue with `{command}`"
        raise Interrupted(number, said) from None
    except BatchwrightError as stop:
        if isinstance(stop, DeadlineReached) and deadline is not None:
            # Starting counts as well, and with less than that the run would end at its first step.
            command += f" goal.deadline={max(2 * deadline, _SHORTEST_DEADLINE):.10g}"
        if isinstance(stop, (Interrupted, *errors)):
            stop.args = (f"{stop}; continue with `{command}`",)
        raise


def resuming_command(folder: str | Path, job: Job) -> str:
    """The command line that goes on with a run; it names again what the job imports."""
    return shlex.join(["batchwright", *resuming_words(folder, job)])


def resuming_words(folder: str | Path, job: Job) -> list[str]:
    """The words of `resuming_command`, without the program's name."""
    named = (f"{key}={getattr(job, key)}" for key in job.code_keys)
    return ["run", "--resume", "--out", str(folder), *named]


def read_summary(run: str | Path) -> RunSummary:
    """The summary of a run folder, or of a summary file; ``-`` is stdin.

    Its ``run_folder`` is where it was found, also after the folder has moved.

    Raises:
        FileError: There is none, or it is not a summary.
    """
    if str(run) == "-":
        return read_record("-", RunSummary)
    path = Path(run)
    if path.is_dir():
        path = path / "summary.json"
        if (path.parent / "sweep.json").exists():
            raise FileError(
                f"{run} is the folder of a sweep: its page is sweep.html, its runs are in cells/"
            )
        if not path.exists():
            how = f"name a run's folder, or {GOES_ON_BY_ITSELF}"
            with suppress(BatchwrightError):  # a loop of somebody's own leaves no job there
                job = load_job(Path(run) / "job.yaml")
                how = f"continue it with `{resuming_command(run, job)}`"
            raise FileError(f"{run} holds no summary.json: no run has finished there; {how}")
    return read_record(path, RunSummary).model_copy(update={"run_folder": str(path.parent)})


def read_plan(place: str | Path) -> Plan:
    """The plan in a plan's file, in a run's summary, or of a run folder; ``-`` is stdin.

    Raises:
        FileError: There is none, or it is something else.
    """
    path = Path(place)
    if str(place) != "-" and path.is_dir() and not (path / "plan.json").exists():
        if (path / "summary.json").exists():
            path = path / "summary.json"
        elif any((path / name).exists() for name in TRAINED):
            raise FileError(
                f"{place} holds no plan.json, as of a loop of your own: explain the plan's file "
                "that the loop was given (Session(plan=...)), or this folder once its run has ended"
            )
    if str(place) != "-" and path.is_file() and kind_in(path) == "summary":
        return read_record(path, RunSummary).plan
    return read_record(place, Plan)


def load(path: str | Path) -> Any:
    """What a file or a run folder holds, as the verbs returned it. Runs no code.

    Args:
        path: A file that a verb or ``save`` wrote, or a job's YAML file; of a run folder the
            summary, or the plan where the run has not finished, and of a sweep's the sweep.

    Returns:
        A `Plan`, `Profile`, `RunSummary`, `Sweep`, `Check`, `RateSchedule`, `Simulation` or `Job`.

    Raises:
        FileError: There is nothing, or something else, which the message names.
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
    if place.is_dir():
        found = next((name for name in _WHOLE if (place / name).exists()), None)
        if found is None:
            raise FileError(f"{path} holds none of {', '.join(_WHOLE)}: it is no run folder")
        place = place / found
    record = read_one_of(place, (Plan, Profile, RunSummary, Sweep, Check, RateSchedule, Simulation))
    return read_summary(place) if isinstance(record, RunSummary) else record


def read_summaries(run: str | Path) -> list[RunSummary]:
    """The summary of a run, or those of all finished runs of a sweep's folder.

    Raises:
        FileError: There is none, or one is not a summary.
    """
    folder = Path(run)
    if not (folder / "sweep.json").exists():
        return [read_summary(run)]
    found = read_record(folder / "sweep.json", Sweep).done
    if not found:
        command = shlex.join(["batchwright", "sweep", "--resume", "--out", str(run)])
        raise FileError(f"no run of the sweep in {run} has finished yet; go on with `{command}`")
    return [read_summary(folder / "cells" / cell.name) for cell in found]
