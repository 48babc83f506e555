"""The five verbs as functions: probe, plan, train, report, and run, which is all of them in a row.

The command line calls these very functions. Whatever needs torch is imported inside, so that
``plan`` and ``report`` start without it.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchwright.documents import (
    change_job,
    job_yaml,
    load_job,
    read_record,
    write_record,
    write_text,
)
from batchwright.errors import DataError, FileError, Interrupted, JobError, PlanError
from batchwright.files import make_folder
from batchwright.launch import POLL_SECONDS, refuse_busy_port, run_workers
from batchwright.planning.learning_rate import make_rule
from batchwright.planning.planner import make_plan
from batchwright.records import Job, Plan, Profile, RunSummary
from batchwright.reporting.figures import write_figures
from batchwright.reporting.page import write_page
from batchwright.reporting.progress import progress, steps

if TYPE_CHECKING:
    from batchwright.records import DataFacts
    from batchwright.workload.sources import ImageData

TRAINING_KEYS = ("checkpoint_seconds", "data", "launch", "port", "restarts", "timeout")
"""Job keys that may change after planning; ``data`` only to another place of the same images."""

_CODE_KEYS = ("data", "network", "loss")  # may name a function to import


def probe(job: Job | str | Path | None = None, **keys: Any) -> Profile:
    """Measure a job on this machine: step times, memory, exchange times, gradient noise.

    Args:
        job: A job, the path of its YAML file, or ``None`` for the defaults.
        keys: Job keys to change, such as ``data="cifar100:PATH"`` or ``probe={"budget": 10}``.

    Returns:
        The profile, input of `plan`.

    Raises:
        BatchwrightError: What is wrong, in one line.
    """
    job = _ready(_job_of(job, keys))
    with tempfile.TemporaryDirectory(prefix="batchwright-") as folder:
        return _probe_in(Path(folder), job)


def plan(profile: Profile | str | Path, overrides: Iterable[str] = (), **keys: Any) -> Plan:
    """Decide how to train what was measured. Needs no torch.

    Args:
        profile: From `probe`, or the path of its file.
        overrides: ``key=value`` texts, as on the command line.
        keys: Job keys to change; only those that do not change what was measured.

    Returns:
        The plan, with predictions and reasons; ``print(plan.explain())`` shows them.

    Raises:
        PlanError: The profile does not fit the job, or nothing fits the limits.
    """
    profile = profile if isinstance(profile, Profile) else read_record(profile, Profile)
    return make_plan(profile, change_job(profile.job, keys, overrides))


def train(
    plan: Plan | str | Path | None = None,
    *,
    run_folder: str | Path | None = None,
    resume: bool = False,
    profile: Profile | None = None,
    overrides: Iterable[str] = (),
    **keys: Any,
) -> RunSummary:
    """Train as a plan says, with real worker processes.

    Args:
        plan: From `plan`, or the path of its file; with ``resume`` the run folder's own.
        run_folder: Where everything goes; unset: a new folder under ``runs``.
        resume: Continue the run in ``run_folder``.
        profile: Kept beside the plan, for the report.
        overrides: ``key=value`` texts, as on the command line.
        keys: Job keys to change; only `TRAINING_KEYS`. A plan read from a file that names a
            function to import needs that name repeated here, for example
            ``network="torchvision.models:resnet50"``: files do not get to run code by themselves.

    Returns:
        What happened.

    Raises:
        BatchwrightError: What is wrong, in one line; the run folder keeps what there is.
        Interrupted: A stop signal came; a checkpoint was written.
    """
    received = not isinstance(plan, Plan)
    if resume:
        folder = _existing_run(run_folder, "plan.json")
        plan = folder / "plan.json"
    elif plan is None:
        raise PlanError("train needs a plan: give its file, or resume a run folder")
    plan = plan if isinstance(plan, Plan) else read_record(plan, Plan)
    overrides = list(overrides)
    if received:
        _refuse_unconfirmed_code(plan.job, keys, overrides)
    plan = _with_job(plan, change_job(plan.job, keys, overrides))
    _check_training(plan)
    if not resume:
        folder = _new_run_folder(run_folder, plan.job)
    _write_inputs(folder, plan, profile)
    return _train_in(folder, plan, resume=resume)


def report(run: RunSummary | str | Path, *, out: str | Path | None = None) -> Path:
    """Write the figures and ``report.html`` of a run. Needs no torch.

    Args:
        run: The summary, its file, or the run folder.
        out: Folder for page and figures; unset: the run folder.

    Returns:
        The page.

    Raises:
        FileError: There is no summary, or the folder cannot be written.
    """
    summary = run if isinstance(run, RunSummary) else read_summary(run)
    folder = Path(out or summary.run_folder)
    write_figures(summary, folder / "figures")
    page = folder / "report.html"
    write_page(summary, page)
    return page


def run(
    job: Job | str | Path | None = None,
    *,
    run_folder: str | Path | None = None,
    resume: bool = False,
    on_plan: Callable[[Plan], None] | None = None,
    overrides: Iterable[str] = (),
    **keys: Any,
) -> RunSummary:
    """Probe, plan, train and report.

    Args:
        job: As for `probe`.
        run_folder: Where everything goes; unset: a new folder under ``runs``.
        resume: Continue the run in ``run_folder``.
        on_plan: Called with the plan before training starts.
        overrides: ``key=value`` texts, as on the command line.
        keys: Job keys to change; with ``resume`` as for `train`.

    Returns:
        What happened; the page is ``report.html`` in the run folder.
    """
    if resume and run_folder is not None and (Path(run_folder) / "plan.json").exists():
        summary = train(run_folder=run_folder, resume=True, overrides=overrides, **keys)
    else:
        overrides = list(overrides)
        if resume:  # stopped before there was a plan
            folder = _existing_run(run_folder, "job.yaml")
            job = load_job(folder / "job.yaml")
            _refuse_unconfirmed_code(job, keys, overrides)
            job = _ready(change_job(job, keys, overrides))
        else:
            job = _ready(_job_of(job, keys, overrides))
            folder = _new_run_folder(run_folder, job)
        logs = folder / "logs" / "probe"
        make_folder(logs)
        write_text(job_yaml(job), folder / "job.yaml")
        with _telling_how_to_resume(folder):
            profile = _probe_in(logs, job)
        write_record(profile, folder / "profile.json")  # of use even if no plan comes of it
        decided = make_plan(profile)
        if on_plan is not None:
            on_plan(decided)
        _write_inputs(folder, decided, profile)
        summary = _train_in(folder, decided, resume=False)
    report(summary)
    return summary


def read_summary(run: str | Path) -> RunSummary:
    """The summary of a run folder, or of a summary file; ``-`` is stdin.

    Its ``run_folder`` is where it was found, also after the folder has moved.
    """
    if str(run) == "-":
        return read_record("-", RunSummary)
    path = Path(run)
    if path.is_dir():
        path = path / "summary.json"
        if not path.exists():
            raise FileError(
                f"{run} holds no summary.json: the run has not finished; "
                f"continue it with `batchwright run --resume --out {run}`"
            )
    return read_record(path, RunSummary).model_copy(update={"run_folder": str(path.parent)})


# ----------------------------------------------------------------------------------- jobs and data


def _job_of(
    job: Job | str | Path | None, keys: Mapping[str, Any], overrides: Iterable[str] = ()
) -> Job:
    job = job if isinstance(job, Job) else load_job(job)
    return change_job(job, keys, overrides)


def _open_data(job: Job) -> ImageData:
    from batchwright.workload.sources import open_data

    with steps() as show:
        return open_data(job, progress=show)


def _ready(job: Job) -> Job:
    """Make the job concrete for this machine; refuse at once what cannot come to a plan."""
    refuse_busy_port(job.port)
    make_rule(job, job.base_batch, job.epochs)
    facts = _open_data(job).facts
    if not facts.val_samples:
        raise DataError(f"data={job.data} has no held-out images: set val=0.1 to hold some out")
    if job.global_batch != "auto" and job.global_batch > facts.train_samples:
        raise JobError(
            f"global_batch={job.global_batch} is larger than the {facts.train_samples} training "
            f"images of data={job.data}: choose {facts.train_samples} or less"
        )
    job = resolve(job, facts)
    _check_network(job, facts)
    return job


def resolve(job: Job, data: DataFacts) -> Job:
    """The job with every ``auto`` that needs no measuring made concrete."""
    from batchwright.workload.host import default_workers, resolve_device

    device = resolve_device(job.device)
    workers = default_workers(device.type) if job.workers == "auto" else job.workers
    if job.launch == "in-process":
        if job.workers not in ("auto", 1):
            raise JobError(f"workers={job.workers} with launch=in-process: that is one worker")
        workers = 1
    return job.model_copy(
        update={
            "device": device.type,
            "workers": workers,
            "augment": job.augmentation,
            "resolutions": (data.side,) if job.resolutions == "auto" else job.resolutions,
        }
    )


def _check_training(plan: Plan) -> None:
    """Whatever can be refused is refused here, before anything is written or started."""
    refuse_busy_port(plan.job.port)
    if plan.workers > 1 and plan.job.launch == "in-process":
        raise PlanError(f"the plan is for {plan.workers} workers: launch=in-process is one")
    if isinstance(plan.job.workers, int) and plan.job.workers != plan.workers:
        raise PlanError(
            f"the plan's table has {plan.workers} workers and its job {plan.job.workers}: "
            "plan again"
        )
    facts = _open_data(plan.job).facts
    if facts.digest != plan.data.digest:
        raise PlanError(
            f"the plan was made for other data than data={plan.job.data}: "
            f"{plan.data.train_samples} training images of {plan.data.name} "
            f"(digest {plan.data.digest[:12]}), here {facts.train_samples} of {facts.name} "
            f"({facts.digest[:12]}); probe and plan again, or say data=KIND:PATH"
        )
    _check_network(plan.job, facts)


def _check_network(job: Job, data: DataFacts) -> None:
    """Build the network here, so that a wrong name, file or pattern is refused at once."""
    from batchwright.workload.task import build_loss, build_network, freeze, load_weights

    network = build_network(
        job.network,
        classes=len(data.classes),
        side=data.side if job.resolutions == "auto" else max(job.resolutions),
        dropout=job.dropout,
        seed=job.seed,
    )
    if job.weights is not None:
        left = load_weights(network, job.weights)
        if left:
            shown = ", ".join(left[:4]) + (", ..." if len(left) > 4 else "")
            print(f"not in {job.weights}, so trained from scratch: {shown}", file=sys.stderr)  # noqa: T201
    freeze(network, job.frozen)
    build_loss(job)


def _with_job(plan: Plan, job: Job) -> Plan:
    """The plan with a job that differs in `TRAINING_KEYS` only."""
    for key in Job.model_fields:
        planned, asked = getattr(plan.job, key), getattr(job, key)
        if planned != asked and key not in TRAINING_KEYS:
            raise PlanError(
                f"{key}={asked} differs from the plan's {key}={planned}: plan again with it "
                f"(training itself takes {', '.join(TRAINING_KEYS)})"
            )
    return plan.model_copy(update={"job": job})


def _refuse_unconfirmed_code(job: Job, keys: Iterable[str], overrides: Iterable[str]) -> None:
    """A file may not make us import what the caller has not named."""
    named = {*keys, *(text.partition("=")[0].strip() for text in overrides)}
    for key in _CODE_KEYS:
        name = getattr(job, key)
        if _is_import_string(key, name) and key not in named:
            raise PlanError(
                f"{key}={name} in a file would run code: repeat {key}={name} on the command line "
                "to allow it"
            )


def _is_import_string(key: str, name: str) -> bool:
    if key == "data":
        return ":" in name and name.partition(":")[0] not in ("cifar10", "cifar100", "imagefolder")
    return ":" in name


# ------------------------------------------------------------------------------------- run folders


def _new_run_folder(wanted: str | Path | None, job: Job) -> Path:
    """Make the run's folder; one that holds anything is refused."""
    if wanted is None:
        kind = job.data.partition(":")[0]
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        wanted = Path("runs") / f"{kind}-{job.network.replace(':', '.')}-{stamp}"
    folder = Path(wanted)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileError(
            f"{folder} exists and is not empty: choose another --out, or continue its run "
            "with --resume"
        )
    make_folder(folder)
    told = f"{job.network} on {job.data}, {job.epochs} epochs, in {folder}"
    print(told, file=sys.stderr)  # noqa: T201 - so that it can be found while it runs
    return folder


def _existing_run(wanted: str | Path | None, needed: str) -> Path:
    if wanted is None:
        raise FileError("resume which run? name its folder with --out")
    folder = Path(wanted)
    if not (folder / needed).exists():
        raise FileError(f"{folder} holds no {needed}, so no run to resume; start it anew")
    return folder


def _write_inputs(folder: Path, plan: Plan, profile: Profile | None) -> None:
    write_text(job_yaml(plan.job), folder / "job.yaml")
    write_record(plan, folder / "plan.json")
    if profile is not None:
        write_record(profile, folder / "profile.json")


@contextmanager
def _telling_how_to_resume(folder: Path) -> Iterator[None]:
    """Add to the message of a stop that was asked for how to go on from it."""
    try:
        yield
    except Interrupted as stop:
        how = f"continue with `batchwright run --resume --out {folder}`"
        raise Interrupted(stop.signal_number, f"{stop}; {how}") from None


# --------------------------------------------------------------------------------------- launching


def _probe_in(folder: Path, job: Job) -> Profile:
    """Measure a resolved job; ``folder`` takes the workers' files."""
    from batchwright.workload.host import prepare_process, worker_threads

    write_record(job, folder / "job.json")
    out, lines = folder / "profile.json", _Tail(folder / "progress.jsonl")
    with steps() as show:
        if job.launch == "in-process":
            from batchwright.probing.probe import measure

            allocator = prepare_process(worker_threads(1))
            measured = measure(
                job, rank=0, world_size=1, local_rank=0, allocator=allocator, progress=show
            )
            assert measured is not None  # noqa: S101 - rank 0 returns the profile
            return measured
        run_workers(
            "batchwright.probing.worker",
            [str(folder)],
            workers=_count(job),
            threads=worker_threads(_count(job)),
            folder=folder,
            port=job.port,
            poll=lambda: lines(lambda line: show(line["done"], line["total"], line["what"])),
        )
    return read_record(out, Profile)


def _train_in(folder: Path, plan: Plan, *, resume: bool) -> RunSummary:
    from batchwright.workload.host import worker_threads

    logs = folder / "logs" / "train"
    logs.mkdir(parents=True, exist_ok=True)
    lines = _Tail(folder / "metrics.jsonl", from_end=resume)
    with _telling_how_to_resume(folder), progress(epochs=plan.epochs) as shown:
        if plan.job.launch == "in-process":
            from batchwright.training.loop import train as train_here

            with lines.followed(shown.update):
                train_here(plan, run_folder=folder, resume=resume)
        else:
            run_workers(
                "batchwright.training.loop",
                [str(folder), *(["--resume"] if resume else [])],
                workers=plan.workers,
                threads=worker_threads(plan.workers),
                folder=logs,
                port=plan.job.port,
                restarts=plan.job.restarts,
                poll=lambda: lines(shown.update),
            )
    summary = read_record(folder / "summary.json", RunSummary)
    measured = folder / "profile.json"
    if measured.exists():
        summary = summary.model_copy(update={"profile": read_record(measured, Profile)})
        write_record(summary, folder / "summary.json")
    return summary


def _count(job: Job) -> int:
    assert job.workers != "auto"  # noqa: S101 - resolved above
    return job.workers


class _Tail:
    """Hands on the JSON lines that other processes append to a file, whole lines only."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._path = path
        self._position = path.stat().st_size if from_end and path.exists() else 0

    def __call__(self, show: Callable[[dict[str, Any]], None]) -> None:
        """Call ``show`` with every line that is new."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._position += len(line)
                show(json.loads(line))

    @contextmanager
    def followed(self, show: Callable[[dict[str, Any]], None]) -> Iterator[None]:
        """Inside, a thread calls ``show`` with every line soon after it was written."""
        done = threading.Event()

        def follow() -> None:
            while not done.wait(POLL_SECONDS):
                self(show)

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            self(show)
