"""The folder of a run: made, found again, filled with what went in, read when it is over."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from batchwright.documents import job_yaml, load_job, read_record, write_record, write_text
from batchwright.errors import BatchwrightError, FileError, Interrupted
from batchwright.files import make_folder
from batchwright.preparing import code_keys
from batchwright.records import Job, Plan, Profile, RunSummary, Sweep
from batchwright.records.words import counted, data_name


def new_run_folder(wanted: str | Path | None, job: Job) -> Path:
    """Make the run's folder, under ``runs`` unless one is wanted.

    Raises:
        FileError: It holds anything, or cannot be made.
    """
    folder = new_folder(wanted, job)
    epochs = counted(job.epochs, "epoch")
    told = f"{job.network} on {job.data}, {epochs}, in {folder}"
    print(told, file=sys.stderr)  # noqa: T201 - so that it can be found while it runs
    return folder


def new_folder(wanted: str | Path | None, job: Job, kind: str = "") -> Path:
    """Make the folder that is wanted, or one under ``runs`` named by ``kind``, job and time.

    Raises:
        FileError: It holds anything, or cannot be made.
    """
    if wanted is None:
        data, network = data_name(job.data), job.network.replace(":", ".")
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        wanted = Path("runs") / "-".join(filter(None, (kind, data, network, stamp)))
    folder = Path(wanted)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileError(
            f"{folder} exists and is not empty: choose another --out, or continue its run "
            "with --resume"
        )
    make_folder(folder)
    return folder


def existing_run(wanted: str | Path | None, needed: str) -> Path:
    """The folder of a run to resume, which holds the file ``needed``.

    Raises:
        FileError: None was named, or it does not hold that file.
    """
    if wanted is None:
        raise FileError("resume which run? name its folder with --out")
    folder = Path(wanted)
    if not (folder / needed).exists():
        raise FileError(f"{folder} holds no {needed}, so no run to resume; start it anew")
    return folder


def write_inputs(folder: Path, plan: Plan, profile: Profile | None) -> None:
    """Write job, plan and profile into the run folder."""
    write_text(job_yaml(plan.job), folder / "job.yaml")
    write_record(plan, folder / "plan.json")
    if profile is not None:
        write_record(profile, folder / "profile.json")


@contextmanager
def telling_how_to_resume(folder: Path, job: Job) -> Iterator[None]:
    """Add to the message of a stop that was asked for how to go on from it."""
    try:
        yield
    except Interrupted as stop:
        stop.args = (f"{stop}; continue with `{resuming_command(folder, job)}`",)
        raise


def resuming_command(folder: str | Path, job: Job) -> str:
    """The command line that goes on with a run; it names again what the job imports."""
    named = (f"{key}={getattr(job, key)}" for key in code_keys(job))
    return shlex.join(["batchwright", "run", "--resume", "--out", str(folder), *named])


def _how_to_go_on(folder: Path) -> str:
    """With a run that has not finished."""
    try:
        return f"continue it with `{resuming_command(folder, load_job(folder / 'job.yaml'))}`"
    except BatchwrightError:  # a loop of somebody's own leaves no job there
        return "continue it as it was begun; in a loop of your own, with Session(resume=True)"


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
        if not path.exists():
            raise FileError(
                f"{run} holds no summary.json: the run has not finished; {_how_to_go_on(Path(run))}"
            )
    return read_record(path, RunSummary).model_copy(update={"run_folder": str(path.parent)})


def read_summaries(run: str | Path) -> list[RunSummary]:
    """As `read_summary`; of a sweep's folder those of all its finished runs.

    Raises:
        FileError: There is none, or one is not a summary.
    """
    folder = Path(run)
    if not (folder / "sweep.json").exists():
        return [read_summary(run)]
    found = read_record(folder / "sweep.json", Sweep).done
    if not found:
        raise FileError(
            f"no run of the sweep in {run} has finished yet; go on with "
            f"`batchwright sweep --resume --out {run}`"
        )
    return [read_summary(folder / "cells" / cell.name) for cell in found]
