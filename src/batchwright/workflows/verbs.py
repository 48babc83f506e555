"""The verbs as functions: probe, plan, check, train, report, and run for all in a row.

The command line calls these functions. Modules that need torch are imported inside, so that
``plan`` and ``report`` start without it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from batchwright.client.trackers.companion import wanted_trackers
from batchwright.distributed.fork_server import imported_once
from batchwright.distributed.joining.environments import joined
from batchwright.distributed.processes import refuse_unguarded_script
from batchwright.errors import ArgumentError, Interrupted, LostWorkerError, PlanError, WorkerError
from batchwright.planning.planner import make_plan
from batchwright.records import Check, HeldOut, Job, Plan, Profile, RoundCheck, RunSummary
from batchwright.records.documents import (
    change_job,
    job_yaml,
    load_job,
    read_record,
    record_of,
    refuse_no_path,
    refuse_other,
    texts_of,
    write_record,
    write_text,
)
from batchwright.records.registries.optimizers import OPTIMIZERS
from batchwright.records.run_folder import (
    existing_run,
    new_run_folder,
    read_summaries,
    resuming_command,
    telling_how_to_resume,
    write_inputs,
)
from batchwright.records.text.formatting import counted
from batchwright.records.text.load_text import busy_warning
from batchwright.records.text.problems import described, to_stderr
from batchwright.reporting.pages.reports import compare_runs, summary_of, write_report
from batchwright.reporting.render.progress import steps
from batchwright.storage.files import is_there, make_folder
from batchwright.workflows.check_plan import (
    chosen_points,
    compare,
    open_again,
    own_steps,
    refuse_other_machine,
)
from batchwright.workflows.engines import (
    check_engine,
    hand_over,
    hands_over,
    refuse_to_hand_over,
    resumed_by_engine,
    with_workers,
)
from batchwright.workflows.job_changes import (
    measured_before,
    named_code,
    received,
    refuse_another,
    refuse_unconfirmed_code,
)
from batchwright.workflows.match_rounds import pair_measurer_for, pairs_of, round_checks, settle
from batchwright.workflows.prepare_job import (
    check_training,
    check_workload,
    job_of,
    ready,
    warn_of_doubts,
    warn_of_idle_keys,
    warn_of_shortfall,
)
from batchwright.workflows.prices import job_here, priced_job
from batchwright.workflows.run_training import checked_destination, conduct, with_refit
from batchwright.workflows.stopwatch import Stopwatch
from batchwright.workflows.together import begun_before, note_begun, together

_OPENING, _REPORT = "opening data and network", "report"


@together(Profile, unless="step")
def probe(
    job: Job | str | Path | None = None,
    *,
    out: str | Path | None = None,
    step: Callable[[Any], Any] | None = None,
    batch: Callable[[int], Any] | None = None,
    loader: Callable[[int], Any] | None = None,
    samples: int = 0,
    **keys: Any,
) -> Profile:
    """Measure a job on this machine: step times, memory, exchange times, gradient noise.

    With ``step=`` a training step of your own is measured, whatever it computes: by all workers of
    a launcher such as torchrun, or by this process alone.

    Args:
        job: A job, the path of its YAML file, or ``None`` for the defaults.
        out: File for the profile. It is also written before each trial: a probe that was stopped
            during its trials continues with them when it is started again.
        step: A function of a batch that does a whole training step, except the exchange of
            gradients. Weights and optimizer states are restored afterwards.
        batch: With ``step``: a function f(n) that returns a batch of n samples.
        loader: With ``step``, in place of ``batch``: a function f(n) that returns an iterable of
            such batches; their loading is timed, too.
        samples: With ``step``: number of training samples.
        keys: Job keys to change, such as ``data="cifar100:PATH"`` or ``probe={"budget": 10}``.

    Returns:
        The profile, input of `plan`.

    Raises:
        BatchwrightError: The job is wrong, or measuring failed; the message is one line.
        Interrupted: A stop signal came; ``out`` has the profile if trials had begun.
    """
    refuse_unguarded_script()
    refuse_no_path(out, "out")
    kept = None if out is None else Path(out)
    if kept is not None:
        refuse_other(kept, Profile)
    if step is not None:
        if job is not None:
            raise ArgumentError("probe takes either a job or step=, not both: job keys by name")
        return _probe_own_step(step, batch, loader, samples, kept, keys)
    if batch or loader or samples:
        raise ArgumentError("batch=, loader= and samples= of probe go with step=, the step to time")
    job = job_of(job, keys)
    refuse_to_hand_over(job, "probe")
    with _workers_of(job):
        job = ready(job)
        with _logs() as folder, _telling_what_is_kept(kept, job):
            return _probe_in(folder, job, kept)


def plan(
    profile: Profile | str | Path | Sequence[Profile | str | Path],
    overrides: Iterable[str] = (),
    *,
    runs: Iterable[RunSummary | str | Path] = (),
    **keys: Any,
) -> Plan:
    """Choose workers, batch, rate and more for a measured job. Needs no torch.

    Args:
        profile: From `probe`, or the path of its file. Several profiles of one workload are merged;
            if they are of different kinds of workers, the plan chooses among the kinds.
        overrides: ``key=value`` texts, as on the command line.
        runs: Finished runs of the same task, their folders, or folders of sweeps over it. Their
            epochs and accuracies improve the predictions.
        keys: Job keys to change; only those that do not change what was measured.

    Returns:
        The plan, with predictions and reasons; ``print(plan.explain())`` shows them.

    Raises:
        PlanError: The profile does not suit the job, or no candidate is within the limits.
    """
    several = isinstance(profile, Sequence) and not isinstance(profile, str)
    given: Sequence[Any] = profile if several else [profile]  # type: ignore[assignment]
    if not given:
        raise PlanError("a plan needs at least one profile: `batchwright probe` makes one")
    profiles = [record_of(one, Profile, "plan") for one in given]
    if isinstance(runs, RunSummary | str | Path) or not isinstance(runs, Iterable):
        raise ArgumentError(
            f"runs= of plan takes a list of runs, not {described(runs)}: write runs=[...] with "
            "summaries or run folders in it"
        )
    summaries: list[RunSummary] = []
    for one in runs:
        if isinstance(one, str | Path):
            found = read_summaries(one)
        else:
            found = [record_of(one, RunSummary, "plan", "runs")]
        # A run that is given twice, for example also by its sweep, must not count as two seeds.
        summaries += [
            run for run in found if all(run.epochs != other.epochs for other in summaries)
        ]
    job = priced_job(profiles, keys, texts_of(overrides))
    decided = make_plan(profiles, job, runs=summaries)
    warn_of_doubts(decided.job, decided.data)
    warn_of_idle_keys(decided.job)
    warn_of_shortfall(decided)
    return decided


@together(Check)
def check(
    plan: Plan | str | Path,
    *,
    profile: Profile | str | Path | None = None,
    points: int | None = None,
    overrides: Iterable[str] = (),
    **keys: Any,
) -> Check:
    """Measure a plan's own step, and other steps that it predicts, and compare.

    A plan's two batch sizes are also measured side by side. With ``profile`` it is then planned
    again and measured until both groups end their rounds together.

    Args:
        plan: From `plan`, or the path of its file.
        profile: The plan's profile, or its file; the result holds it with the new points.
        points: Most steps to measure, the plan's own among them; unset: all that it predicts.
        overrides: ``key=value`` texts, as on the command line.
        keys: Job keys to change; only those that `train` takes.

    Returns:
        Predicted and measured values of each point.

    Raises:
        BatchwrightError: The plan cannot be checked here; the message is one line.
    """
    from batchwright.probing.probe import Measured, measure_points

    refuse_unguarded_script()
    plan = received(plan, keys, texts_of(overrides), "check")
    refuse_to_hand_over(plan.job, "check")
    if profile is not None:
        profile = record_of(profile, Profile, "check", "profile")
    own = own_steps(plan)
    chosen = chosen_points(plan, len(own) + len(plan.held_out) if points is None else points)
    # A probe measures `optimizer=auto` with SGD. If the plan has another optimizer, its own steps
    # are measured with that one, apart from the other points.
    changed = plan.update != OPTIMIZERS[plan.job.optimizer].name
    alone = [one for one in chosen if one in own and changed]
    others = [one for one in chosen if one not in alone]
    accept = None if profile is None else partial(refuse_other_machine, profile)
    with _workers_of(plan.job), _logs() as folder:
        check_workload(plan)

        def measure_at(points: Sequence[HeldOut], place: Path, **keys: Any) -> Measured | None:
            places = [(one.workers, one.resolution, one.local_batch_size) for one in points]
            if not places:
                return None
            make_folder(place)
            job = plan.job.model_copy(update=keys)
            with steps() as show:
                return measure_points(job, places, place, accept=accept, progress=show)

        apart = measure_at(alone, folder / "own", optimizer=plan.update)
        measured = measure_at(others, folder)
        rounds: tuple[RoundCheck, ...] = ()
        if pairs_of(plan):
            with pair_measurer_for(plan, folder / "pairs") as measure:
                if profile is None:
                    rounds = round_checks(plan, measure(pairs_of(plan)))
                else:
                    job = open_again(plan, profile)
                    settled = settle(plan, profile, measure, lambda known: make_plan(known, job))
                    profile, rounds = settled.profile, settled.rounds
    return compare(plan, chosen, measured, profile, rounds=rounds, apart=apart)


@together(RunSummary)
def train(
    plan: Plan | str | Path | None = None,
    *,
    run_folder: str | Path | None = None,
    resume: bool = False,
    profile: Profile | str | Path | None = None,
    report_to: str | None = None,
    follow_advice: bool = False,
    trackers: Iterable[str] | None = None,
    overrides: Iterable[str] = (),
    **keys: Any,
) -> RunSummary:
    """Train as a plan says, with real worker processes.

    Args:
        plan: From `plan`, or the path of its file. With ``resume`` the run folder's own plan is
            followed, and a given plan must be for the same job.
        run_folder: Folder for all files of the run; unset: a new folder under ``runs``.
        resume: Continue the run in ``run_folder``.
        profile: The plan's profile, or its file: kept with the run, for the report.
        report_to: Address of a service to report the run to, such as ``http://127.0.0.1:8400``.
            Unset: that of ``BATCHWRIGHT_REPORT_TO``, or for a resumed run the service that it
            reported to before; empty: none.
        follow_advice: Take a new plan from that service at the end of an epoch.
        trackers: Trackers that show the run, such as ``["tensorboard:runs/tb", "mlflow"]``. Unset:
            those of ``BATCHWRIGHT_TRACKERS``, which are separated by commas.
        overrides: ``key=value`` texts, as on the command line.
        keys: Job keys to change; only `TRAINING_KEYS` and ``goal``'s deadline. If a plan from a
            file names a function to import, the name has to be repeated here, for example
            ``network="torchvision.models:resnet50"``: a file alone must not run code.

    Returns:
        The run's summary.

    Raises:
        BatchwrightError: The training failed; the message is one line, and the run folder keeps
            its files.
        Interrupted: A stop signal came; a checkpoint was written.
    """
    refuse_unguarded_script()
    refuse_no_path(run_folder, "run_folder")
    watch, overrides = Stopwatch(), texts_of(overrides)
    if profile is not None:
        profile = record_of(profile, Profile, "train", "profile")
    reporting: dict[str, Any] = {
        "report_to": report_to,
        "follow_advice": follow_advice,
        "trackers": wanted_trackers(trackers),
    }
    if resume and plan is not None and run_folder and is_there(Path(run_folder, "plan.json")):
        kept = read_record(Path(run_folder) / "plan.json", Plan)
        refuse_another(record_of(plan, Plan, "train"), kept, run_folder)
    if resume and (done := resumed_by_engine(run_folder, keys, overrides, **reporting)):
        return done
    again = None if resume else begun_before(run_folder)
    if again is not None and plan is not None:
        keys, overrides = named_code(received(plan, keys, overrides, "train").job), []
        run_folder, resume = again, True
    with ExitStack() as held:
        if resume:
            folder = held.enter_context(existing_run(run_folder, "plan.json", again=bool(again)))
            plan = folder / "plan.json"
        elif plan is None:
            raise PlanError("train needs a plan: give its file, or resume a run folder")
        plan = received(plan, keys, overrides, "train", folder if resume else None)
        watch.lap("reading the plan")  # a pipe may keep it waiting for the probe
        reporting["report_to"] = checked_destination(
            run_folder, plan, report_to, resume=resume, follow_advice=follow_advice
        )
        if hands_over(plan.job):
            job = with_workers(plan.job, plan)
            check_engine(job)
            with new_run_folder(run_folder, job) as folder:
                write_inputs(folder, plan, profile)
            return hand_over(folder, job, **reporting)
        held.enter_context(_workers_of(plan.job))
        check_training(plan, resumed=folder if resume else None)
        if not resume:
            folder = held.enter_context(new_run_folder(run_folder, plan.job))
            note_begun(folder)
        write_inputs(folder, plan, profile)
        watch.lap(_OPENING)
        held.enter_context(_resumable(folder, plan.job))
        return conduct(folder, plan, watch, resume=resume, **reporting)


def report(
    run: RunSummary | str | Path,
    *others: RunSummary | str | Path,
    out: str | Path | None = None,
) -> Path:
    """Write the figures and ``report.html`` of a run, or compare several. Needs no torch.

    Args:
        run: The summary, its file, or the run folder.
        others: More runs on the same data; with them the result is that of `compare_runs`.
        out: Folder for page and figures; unset: the run folder, or for several runs the working
            folder.

    Returns:
        The path of the page.

    Raises:
        FileError: There is no summary, the data differ, or the folder cannot be written.
    """
    refuse_no_path(out, "out")
    if others:
        return compare_runs([run, *others], out or ".")[1]
    return write_report(with_refit(summary_of(run)), out)


@together(RunSummary)
def run(
    job: Job | str | Path | None = None,
    *,
    run_folder: str | Path | None = None,
    resume: bool = False,
    on_plan: Callable[[Plan], None] | None = None,
    report_to: str | None = None,
    follow_advice: bool = False,
    trackers: Iterable[str] | None = None,
    overrides: Iterable[str] = (),
    **keys: Any,
) -> RunSummary:
    """Probe, plan, train and report.

    Args:
        job: As for `probe`.
        run_folder: Folder for all files of the run; unset: a new folder under ``runs``.
        resume: Continue the run in ``run_folder``.
        on_plan: Called with the plan before training starts.
        report_to: As for `train`.
        follow_advice: As for `train`.
        trackers: As for `train`.
        overrides: ``key=value`` texts, as on the command line.
        keys: Job keys to change; with ``resume`` as for `train`.

    Returns:
        The run's summary; the report is ``report.html`` in the run folder.

    Raises:
        BatchwrightError: The job is wrong, or the run failed; the message is one line.
        Interrupted: A stop signal came.
    """
    refuse_unguarded_script()
    refuse_no_path(run_folder, "run_folder")
    overrides = texts_of(overrides)
    reporting: dict[str, Any] = {
        "report_to": report_to,
        "follow_advice": follow_advice,
        "trackers": wanted_trackers(trackers),
    }
    if resume and (done := resumed_by_engine(run_folder, keys, overrides, **reporting)):
        if not is_there(Path(done.run_folder, "report.html")):  # the engine did not write it
            report(done)
        return done
    again = None
    if not resume:
        job, keys, overrides = job_of(job, keys, overrides), {}, []
        asked = job.model_dump_json()
        if (again := begun_before(run_folder, asked)) is not None:
            keys, run_folder, resume = named_code(job), again, True
    with ExitStack() as held:
        if resume:
            kept = existing_run(run_folder, "plan.json", "job.yaml", again=bool(again))
            folder = held.enter_context(kept)
            if is_there(folder / "plan.json"):
                done = train(
                    run_folder=folder, resume=True, overrides=overrides, **reporting, **keys
                )
                held.enter_context(_resumable(folder, done.plan.job))
                return _reported(done)
            # The run was stopped before it had a plan.
            job = load_job(folder / "job.yaml")
            refuse_unconfirmed_code(job, keys, overrides)
            job = change_job(job, keys, overrides)
        else:
            assert isinstance(job, Job)  # noqa: S101 - made above
        watch = Stopwatch()
        reporting["report_to"] = checked_destination(
            run_folder, job, report_to, resume=resume, follow_advice=follow_advice
        )
        if hands_over(job):
            check_engine(job)
            with new_run_folder(run_folder, job) as folder:
                write_text(job_yaml(job), folder / "job.yaml")
            return hand_over(folder, job, **reporting)
        held.enter_context(_workers_of(job))
        job = ready(job, judged=True)
        before = measured_before(folder, job) if resume else None
        if before is not None:  # an earlier version may have normalized images by another rule
            job = job.model_copy(update={"normalize": before.job.normalize})
        if not resume:
            folder = held.enter_context(new_run_folder(run_folder, job))
            note_begun(folder, asked)
        watch.lap(_OPENING)
        write_text(job_yaml(job), folder / "job.yaml")
        held.enter_context(_resumable(folder, job))
        decided = _planned_in(folder, job, watch, before)
        if on_plan is not None:
            on_plan(decided)
        write_inputs(folder, decided, None)
        watch.lap("plan")
        return _reported(conduct(folder, decided, watch, resume=False, **reporting))


def _planned_in(folder: Path, job: Job, watch: Stopwatch, before: Profile | None) -> Plan:
    """Measure a resolved job in its run folder, which keeps the profile, and make the plan.

    ``before`` is the profile of an earlier start of the same run, if there is one.
    """
    logs, kept = folder / "logs" / "probe", folder / "profile.json"
    make_folder(logs)
    if before is not None:
        write_record(before, kept)
    # The probe writes the profile, which is kept even if no plan can be made of it.
    whole = before is not None and not before.trials_open
    profile = before if before is not None and whole else _probe_in(logs, job, kept)
    priced = job_here(profile.job, profile)
    if priced != profile.job:
        profile = profile.model_copy(update={"job": priced})
        write_record(profile, kept)
    watch.lap("probe")
    try:
        decided = make_plan(profile)
    except PlanError as error:
        again = resuming_command(folder, job)
        error.args = (f"{error}; `{again} KEY=VALUE` plans again with what was measured",)
        raise
    if pairs_of(decided):
        with pair_measurer_for(decided, folder / "logs" / "pairs") as measure:
            settled = settle(decided, profile, measure, make_plan)
        decided = settled.plan
        write_record(settled.profile, kept)
    warn_of_shortfall(decided)
    return decided


def _reported(summary: RunSummary) -> RunSummary:
    """Write figures and page, and add to the summary how long that took."""
    watch = Stopwatch()
    write_report(summary)
    watch.lap(_REPORT)
    others = (one for one in summary.after if one.name != _REPORT)  # replaces an earlier command's
    summary = summary.model_copy(update={"after": (*others, watch.parts[-1])})
    write_record(summary, Path(summary.run_folder) / "summary.json")
    return summary


def _resumable(folder: Path, job: Job) -> AbstractContextManager[None]:
    """Inside, the message of a stop or a loss names the command that continues the run."""
    command, deadline = resuming_command(folder, job), job.goal.deadline
    return telling_how_to_resume(command, LostWorkerError, deadline=deadline)


def _workers_of(job: Job) -> AbstractContextManager[None]:
    """Inside, workers of the job start quickly: they are forked from a process with its imports."""
    others = job.launcher.one_worker or (job.launcher.joins and joined() is not None)
    return nullcontext() if others else imported_once()


# --------------------------------------------------------------------------------------- launching


@contextmanager
def _logs() -> Iterator[Path]:
    """A temporary folder for the workers' files; kept after a `WorkerError`, which names it."""
    folder = Path(tempfile.mkdtemp(prefix="batchwright-"))
    keep = False
    try:
        yield folder
    except WorkerError:
        keep = True
        raise
    finally:
        if not keep:
            shutil.rmtree(folder)


@contextmanager
def _telling_what_is_kept(kept: Path | None, job: Job) -> Iterator[None]:
    """Inside, a probe that ends during its trials adds to its message how to continue them."""
    from batchwright.probing.probe import unfinished

    try:
        yield
    except (Interrupted, WorkerError) as stop:
        if kept is not None and unfinished(kept, job):
            stop.args = (f"{stop}; {kept} has what was measured: probe again to go on with trials",)
        raise


def _probe_own_step(
    step: Callable[[Any], Any],
    batch: Callable[[int], Any] | None,
    loader: Callable[[int], Any] | None,
    samples: int,
    kept: Path | None,
    keys: dict[str, Any],
) -> Profile:
    """Measure a step of the user's own; worker 0 shows the progress and writes the profile."""
    from batchwright.probing.own_step import probe_step
    from batchwright.training.batches.unequal import place_among_workers

    first = place_among_workers()[0] == 0
    notes: list[str] = []
    with steps() if first else nullcontext() as show:
        profile = probe_step(step, batch, loader, samples, keys, progress=show, tell=notes.append)
    if first:
        _print_notes(profile, notes)
        if kept is not None:
            write_record(profile, kept)
    return profile


def _probe_in(folder: Path, job: Job, kept: Path | None) -> Profile:
    """Measure a resolved job.

    Args:
        folder: Folder for the workers' files.
        job: The job.
        kept: File for the profile, which trials are added to if it is there already.
    """
    from batchwright.probing.probe import probe as measure
    from batchwright.probing.probe import unfinished

    if kept is not None and (begun := unfinished(kept, job)):
        made = counted(len(begun.trials), "trial")
        to_stderr(f"{kept} has all but trials, and {made}: going on with them")
    notes: list[str] = []
    with steps() as show:
        profile = measure(job, folder, kept=kept, progress=show, tell=notes.append)
    _print_notes(profile, [*notes, profile.trials_note])
    return profile


def _print_notes(profile: Profile, notes: Sequence[str]) -> None:
    """Print the probe's notes, and a warning if the machine was busy; empty ones are left out."""
    if warning := busy_warning(profile.load):
        to_stderr(f"warning: {warning}")
    for line in filter(None, notes):
        to_stderr(f"note: {line}")
