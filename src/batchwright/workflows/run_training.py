"""Runs a training: starts the workers, shows progress, reports, and continues under new plans."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from pkgutil import resolve_name
from shutil import disk_usage
from typing import Any, NamedTuple

from batchwright.algorithms.checkpointing import assumed_bytes
from batchwright.client.reporter_process import ReporterProcess, destination, reported
from batchwright.client.trackers.companion import tracked
from batchwright.distributed.joining.environments import joined, outside_of_group
from batchwright.distributed.launch import run_workers
from batchwright.distributed.launch_with_server import run_with_server
from batchwright.distributed.worker_processes import Companion
from batchwright.errors import BatchwrightError, BrokenStepError, NewPlan, PlanError, one_line
from batchwright.planning.gradient_scaling import unmeasured_noise
from batchwright.planning.schedule import rate_schedule
from batchwright.planning.validation import least_local
from batchwright.records import Job, Plan, Profile, RunSummary
from batchwright.records.documents import read_record, write_record
from batchwright.records.lines.line_files import METRICS, lines_of, sound_line
from batchwright.records.lines.run_lines import RunLine, note
from batchwright.records.run_folder import read_summary
from batchwright.records.text.formatting import counted, size
from batchwright.records.text.problems import to_stderr
from batchwright.reporting.data.schedule_words import start_lines
from batchwright.reporting.render.progress import RunProgress, progress
from batchwright.storage.follow_lines import Tail, following
from batchwright.storage.locks import Lock, writing
from batchwright.workflows.lengthen import lengthened
from batchwright.workflows.replan import for_other_workers, refit
from batchwright.workflows.stopwatch import Stopwatch


def checked_destination(
    folder: str | Path | None,
    what: Plan | Job,
    report_to: str | None,
    *,
    resume: bool,
    follow_advice: bool,
) -> str | None:
    """The service that a run will report to; refuses options that contradict each other.

    Args:
        folder: The run folder, if one was named.
        what: The plan, or the job if there is no plan yet.
        report_to: The user's choice, see `client.reporter_process.destination`.
        resume: Whether the run is continued.
        follow_advice: Whether training takes a new plan of the service at the end of an epoch.

    Returns:
        The service's address; `None`: no reports.

    Raises:
        BatchwrightError: The address is wrong, or the job cannot follow advice.
    """
    url = destination(Path(folder) if folder is not None and resume else None, report_to)
    if not follow_advice:
        return url
    if url is None:
        raise PlanError("--follow-advice follows a service: name it with --report-to URL")
    job = what.job if isinstance(what, Plan) else what
    if job.launcher.simulated:
        raise PlanError(
            "--follow-advice with launch=virtual: its seconds are simulated, so they cannot miss "
            "the prediction; leave it out"
        )
    if job.batch_growth != "off":
        raise PlanError(
            f"--follow-advice with batch_growth={job.batch_growth}: both change the batch; leave "
            "one of them out"
        )
    if job.method_spec.served:
        raise PlanError(
            f"--follow-advice with method={job.method}: its rounds keep their batches; leave it "
            "out, or train with method=plain"
        )
    return url


def conduct(
    folder: Path,
    plan: Plan,
    watch: Stopwatch,
    *,
    resume: bool,
    report_to: str | None = None,
    follow_advice: bool = False,
    trackers: tuple[str, ...] = (),
) -> RunSummary:
    """Train in a run folder that already holds the plan; nobody else writes there meanwhile.

    Args:
        folder: The run folder.
        plan: The plan to follow.
        watch: Stopwatch of the command's parts so far.
        resume: Whether to continue from the folder's last checkpoint.
        report_to: The service to report to; ``None``: none.
        follow_advice: Whether to take a new plan of that service at the end of an epoch.
        trackers: From `client.trackers.companion.wanted_trackers`.

    Returns:
        The run's summary.

    Raises:
        BatchwrightError: The training failed; the run folder keeps its files.
        Interrupted: A stop signal came; a checkpoint was written.
    """
    path = folder / "plan.json"
    with (
        writing(folder) as lock,
        reported(folder, report_to, follow_advice=follow_advice, tell=to_stderr) as reporter,
        tracked(folder, trackers, tell=to_stderr) as tracking,
    ):
        companions = [one for one in (reporter, tracking) if one is not None]
        if resume and _is_done(folder, plan):
            to_stderr("the run was finished already: nothing is left to train")
            told = read_summary(folder)
            whole = _completed(told, folder)
            if whole != told:  # the command was killed between the end of its workers and its own
                write_record(whole, folder / "summary.json")
            return whole
        if resume and plan.job.launcher.resizes:
            plan = _planned_for_started_workers(folder, plan)
        _print_rate(plan)
        logs = folder / "logs" / "train"
        logs.mkdir(parents=True, exist_ok=True)
        while True:
            before = path.read_bytes()
            _train_once(folder, plan, companions, lock, resume=resume, follow_advice=follow_advice)
            resume = True
            if path.read_bytes() != before:  # the training has switched to an advised plan
                plan = read_record(path, Plan)
                continue
            # A run that reports to a service ends with the plan that it was introduced with.
            may_grow = reporter is None and plan.max_epochs is not None
            longer = lengthened(read_summary(folder)) if may_grow else None
            if longer is None:
                return _summarized(folder, watch)
            to_stderr(f"going on: {longer.reasons[-1].why}")
            # A run that is killed from here on has not finished, and goes on when it is resumed.
            (folder / "summary.json").rename(folder / f"summary-{plan.epochs}-epochs.json")
            write_record(plan, folder / f"plan-{plan.epochs}-epochs.json")
            write_record(longer, path)
            plan = longer


def _planned_for_started_workers(folder: Path, plan: Plan) -> Plan:
    """The plan of a resumed run, made again if its engine has started another number of workers.

    The epoch in progress keeps the batch that it has begun with.
    """
    started = joined()
    epoch = 1 + len({one.record.epoch for one in lines_of(folder) if one.kind == "epoch"})
    if started is None or epoch >= plan.epochs:
        return plan
    now, found = plan.stages[plan.stage_of(epoch)].workers, started.size
    if found == now:
        return plan
    measured = folder / "profile.json"
    try:
        if not measured.exists():
            raise PlanError(f"there is no {measured}")
        again = for_other_workers(plan, read_record(measured, Profile), epoch, found)
    except BatchwrightError as error:  # these workers can follow the old plan, too
        to_stderr(f"not planned again for {counted(found, 'worker')}: {one_line(error)}")
        return plan
    to_stderr(f"planned again from epoch {epoch + 1} on: {again.reasons[0].value}")
    write_record(plan, folder / f"plan-before-epoch-{epoch + 1}.json")
    write_record(again, folder / "plan.json")
    return again


def with_refit(summary: RunSummary) -> RunSummary:
    """The summary with a `Refit`, if its epochs missed the prediction by too much."""
    if summary.refit is not None:
        return summary
    try:
        return summary.model_copy(update={"refit": refit(summary)})
    except (BatchwrightError, ArithmeticError) as error:  # no reason to fail the finished run
        to_stderr(f"not planned again: {one_line(error)}")
        return summary


def _is_done(folder: Path, plan: Plan) -> bool:
    """Whether training with the plan has ended, so that no workers need to be started."""
    try:
        summary = read_record(folder / "summary.json", RunSummary)
    except BatchwrightError:  # there is none, or a damaged one, which training will write again
        return False
    return summary.model_copy(update={"plan": plan}).ended


class Begun(NamedTuple):
    """A training that its launcher is to carry out; see `conduct`."""

    folder: Path
    plan: Plan
    lock: Lock  # of the folder; worker processes inherit it
    look: Callable[[], None]  # shows new lines of the run; to be called again and again
    shown: RunProgress  # the progress display, for notes
    resume: bool
    follow_advice: bool


def _train_once(
    folder: Path,
    plan: Plan,
    companions: Sequence[ReporterProcess | Companion],
    lock: Lock,
    *,
    resume: bool,
    follow_advice: bool,
) -> None:
    """Train until the end, a stop, or a switch to another plan, and show the progress."""
    if not resume:
        warn_of_kept(folder, plan)
    lines: Tail[RunLine] = Tail(folder / METRICS, sound_line, from_end=resume)
    with progress(epochs=plan.epochs, plan=plan) as shown:

        def look() -> None:
            lines(shown.update)
            for line in chain.from_iterable(one.lines() for one in companions):
                shown.update(note(line))

        begun = Begun(folder, plan, lock, look, shown, resume, follow_advice)
        resolve_name(plan.job.launcher.train)(begun)


def warn_of_kept(folder: Path, plan: Plan) -> None:
    """Print a line if the disk lacks room for the checkpoints of `checkpoint_epochs`."""
    count = sum(map(plan.keeps_after, range(plan.epochs)))
    each = assumed_bytes(
        plan.network,
        plan.update,
        averages=plan.average_epochs is not None,
        served=plan.server is not None,
    )
    free = disk_usage(folder).free
    if count * each > free:
        to_stderr(
            f"warning: checkpoint_epochs={plan.job.checkpoint_epochs} keeps "
            f"{counted(count, 'checkpoint')} of some {size(each)}, and the disk of {folder} has "
            f"{size(free)} left: free some, or give a larger checkpoint_epochs"
        )


def train_where_started(run: Begun) -> None:
    """Train with the processes that another launcher has started, or else launch workers."""
    if joined() is None:
        launch_workers(run)
        return
    from batchwright.workflows.together import train_together

    with following(run.look):
        train_together(run.plan, run.folder, resume=run.resume, follow_advice=run.follow_advice)


def train_here(run: Begun) -> None:
    """Train with one worker, in this process."""
    from batchwright.training.loop import train

    resume = run.resume
    with outside_of_group(), following(run.look):
        for left in reversed(range(run.plan.job.restarts + 1)):
            try:
                train(
                    run.plan,
                    run_folder=run.folder,
                    resume=resume,
                    follow_advice=run.follow_advice,
                )
            except NewPlan:
                return  # `conduct` sees that the folder's plan has changed
            except BrokenStepError as error:
                if not left:
                    raise
                run.shown.update(note(f"{one_line(error)}; the training was started again"))
            else:
                return
            resume = True
            gc.collect()  # frees the memory of the failed attempt, which reference cycles hold


def train_simulated(run: Begun) -> None:
    """Train all workers in this process, in simulated time."""
    from batchwright.training.simulated.simulated_training import train_virtually

    with outside_of_group(), following(run.look):
        train_virtually(run.plan, run.folder, resume=run.resume)


def launch_workers(run: Begun) -> None:
    """Train with a process for each worker, and one for the server if the plan has one."""
    from batchwright.workload.host import worker_threads

    plan = run.plan
    options: dict[str, Any] = {
        "workers": plan.workers,
        "threads": worker_threads(plan.workers),
        "folder": run.folder / "logs" / "train",
        "restarts": plan.job.restarts,
        "lock": run.lock,
        "poll": run.look,
        "tell": lambda line: run.shown.update(note(line)),
    }
    loop = "batchwright.training.loop"
    flags = ["--resume"] * run.resume + ["--follow-advice"] * run.follow_advice
    arguments = [str(run.folder), *flags]
    if plan.server is None:
        run_workers(loop, arguments, port=plan.job.port, **options)
    else:
        values = plan.model_dump(mode="json")
        served: dict[str, Any] = {"plan": values, "run_folder": run.folder, "resume": run.resume}
        run_with_server(loop, arguments, **served, **options)


def _summarized(folder: Path, watch: Stopwatch) -> RunSummary:
    """The run's summary, with the parts of the command before and after the training."""
    path, before = folder / "summary.json", tuple(watch.parts)
    summary = _completed(read_record(path, RunSummary), folder)
    watch.lap_since(path.stat().st_mtime, "end of the workers")  # worker 0 wrote it at the end
    summary = summary.model_copy(update={"before": before, "after": (watch.parts[-1],)})
    write_record(summary, path)
    return summary


def _completed(summary: RunSummary, folder: Path) -> RunSummary:
    """The summary with the profile that the folder keeps, if any, and a `Refit` by it."""
    measured = folder / "profile.json"
    if not measured.exists():
        return summary
    return with_refit(summary.model_copy(update={"profile": read_record(measured, Profile)}))


def _print_rate(plan: Plan) -> None:
    """Print rate, batch, warm-up and decay with their sources, and warnings about them."""
    schedule, least = rate_schedule(plan), least_local(plan.network)
    noise = unmeasured_noise(plan.stages, least, served=plan.server is not None)
    warnings = (f"warning: {doubt}" for doubt in schedule.doubts)
    for line in (*warnings, *start_lines(schedule), noise):
        if line:
            to_stderr(line)
