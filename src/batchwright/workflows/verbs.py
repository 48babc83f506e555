"""The verbs as functions: probe, plan, check, schedule, train, report; run is most in a row.

The command line calls these very functions. Whatever needs torch is imported inside, so that
``plan`` and ``report`` start without it.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from batchwright.client.trackers.companion import wanted_trackers
from batchwright.distributed.fork_server import imported_once
from batchwright.distributed.joining.environments import joined
from batchwright.distributed.processes import refuse_unguarded_script
from batchwright.errors import ArgumentError, FileError, Interrupted, PlanError, WorkerError
from batchwright.planning.planner import make_plan
from batchwright.planning.schedule import rate_schedule
from batchwright.records import (
    Check,
    HeldOut,
    Job,
    Plan,
    Profile,
    RateSchedule,
    RoundCheck,
    RunSummary,
)
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
    read_summary,
    resuming_command,
    telling_how_to_resume,
    write_inputs,
)
from batchwright.records.text.formatting import counted
from batchwright.records.text.load_text import busy_warning
from batchwright.records.text.problems import described
from batchwright.reporting.data.comparison import RunComparison, compared
from batchwright.reporting.pages.page import write_page
from batchwright.reporting.pages.page_comparison import comparison_page
from batchwright.reporting.render.figures import draw_comparison, write_figures
from batchwright.reporting.render.image import file_bytes
from batchwright.reporting.render.progress import steps
from batchwright.storage.files import make_folder, write_whole
from batchwright.workflows.check_plan import (
    chosen_points,
    compare,
    open_again,
    own_steps,
    refuse_other_machine,
)
from batchwright.workflows.engines import (
    hand_over,
    hands_over,
    refuse_to_hand_over,
    resumed_by_engine,
    with_workers,
)
from batchwright.workflows.match_rounds import pair_measurer_for, pairs_of, round_checks, settle
from batchwright.workflows.prepare_job import (
    check_training,
    check_workload,
    job_of,
    measured_before,
    ready,
    refuse_another,
    refuse_unconfirmed_code,
    tell_doubts,
    tell_idle,
    tell_shortfall,
    with_job,
)
from batchwright.workflows.prices import priced_here, priced_job
from batchwright.workflows.run_training import checked_destination, conduct, with_refit
from batchwright.workflows.scheduling import Source, plan_to_show
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

    With ``step=`` a training step of your own is measured as it is, whatever it computes, by all
    workers of a launcher such as torchrun, or by this process alone.

    Args:
        job: A job, the path of its YAML file, or ``None`` for the defaults.
        out: File for the profile. It is written before each trial, too: the same probe again goes
            on with the trials if it was stopped there.
        step: Called with a batch; does all that a step does, without the exchange of gradients.
            Weights and the optimizers' states are put back.
        batch: With ``step``: f(n) makes a batch of n samples.
        loader: The same: f(n) makes an iterable of such batches, whose loading is timed, too.
        samples: With ``step``: of the training set.
        keys: Job keys to change, such as ``data="cifar100:PATH"`` or ``probe={"budget": 10}``.

    Returns:
        The profile, input of `plan`.

    Raises:
        BatchwrightError: What is wrong, in one line.
        Interrupted: A stop signal came; what had been measured before trials is in ``out``.
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
    """Decide how to train what was measured. Needs no torch.

    Args:
        profile: From `probe`, or the path of its file; several of one workload are merged, those
            of different kinds of workers are chosen from.
        overrides: ``key=value`` texts, as on the command line.
        runs: Finished runs of the same task, their folders, or those of sweeps over it: they tell
            epochs and accuracy.
        keys: Job keys to change; only those that do not change what was measured.

    Returns:
        The plan, with predictions and reasons; ``print(plan.explain())`` shows them.

    Raises:
        PlanError: The profile does not fit the job, or nothing fits the limits.
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
    told: list[RunSummary] = []
    for one in runs:
        if isinstance(one, str | Path):
            found = read_summaries(one)
        else:
            found = [record_of(one, RunSummary, "plan", "runs")]
        # A run that is named twice, as with its sweep, would count as two seeds.
        told += [run for run in found if all(run.epochs != other.epochs for other in told)]
    job = priced_job(profiles, keys, texts_of(overrides))
    decided = make_plan(profiles, job, runs=told)
    tell_doubts(decided.job, decided.data)
    tell_idle(decided.job)
    tell_shortfall(decided)
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
    """Measure the plan's own step, then steps that it predicted and nobody measured, and compare.

    Of a plan with two batch sizes, they are measured side by side, too; with ``profile``, planned
    again and measured until both groups end their rounds together.

    Args:
        plan: From `plan`, or the path of its file.
        profile: What the plan was made from, or its file: comes back with the new points.
        points: How many steps to measure, at most, the plan's own among them; unset: all that it
            predicts.
        overrides: ``key=value`` texts, as on the command line.
        keys: Job keys to change; only those that `train` takes.

    Returns:
        Predicted and measured, point by point.

    Raises:
        BatchwrightError: What is wrong, in one line.
    """
    from batchwright.probing.probe import Measured, measure_points

    refuse_unguarded_script()
    plan = _received(plan, keys, texts_of(overrides), "check")
    refuse_to_hand_over(plan.job, "check")
    if profile is not None:
        profile = record_of(profile, Profile, "check", "profile")
    own = own_steps(plan)
    chosen = chosen_points(plan, len(own) + len(plan.held_out) if points is None else points)
    # A probe leaves `auto` at SGD: what the plan trains with is measured apart from its points.
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


def schedule(source: Source = None, *, overrides: Iterable[str] = (), **keys: Any) -> RateSchedule:
    """The learning rate against epochs: of a plan, a run, a profile, or a job. Trains nothing.

    Args:
        source: A plan, profile, summary or job, the path of its file, or a run folder. A profile
            is planned first. A job needs its global batch; its data and network are opened.
        overrides: ``key=value`` texts, as on the command line.
        keys: Job keys to change; of a plan only those that do not change it.

    Returns:
        The rate's rule, its value at some 240 places, the plan's rows, and where all comes from.

    Raises:
        BatchwrightError: What is wrong, in one line.
    """
    return rate_schedule(plan_to_show(source, keys, overrides))


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
        plan: From `plan`, or the path of its file. With ``resume`` the run folder's own is
            followed, and one that is given has to be of the same job.
        run_folder: Where everything goes; unset: a new folder under ``runs``.
        resume: Continue the run in ``run_folder``.
        profile: What the plan was made from, or its file: kept beside it, for the report.
        report_to: Address of a service that is told how the run goes, such as
            ``http://127.0.0.1:8400``. Unset: what ``BATCHWRIGHT_REPORT_TO`` says, and for a run
            that goes on where it reported before; empty: none.
        follow_advice: Take a new plan from there at the end of an epoch.
        trackers: What shows the run besides, such as ``["tensorboard:runs/tb", "mlflow"]``. Unset:
            what ``BATCHWRIGHT_TRACKERS`` says, with commas between them.
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
    refuse_unguarded_script()
    refuse_no_path(run_folder, "run_folder")
    watch, overrides = Stopwatch(), texts_of(overrides)
    if profile is not None:
        profile = record_of(profile, Profile, "train", "profile")
    telling: dict[str, Any] = {
        "report_to": report_to,
        "follow_advice": follow_advice,
        "trackers": wanted_trackers(trackers),
    }
    if resume and plan is not None and run_folder and (Path(run_folder) / "plan.json").exists():
        kept = read_record(Path(run_folder) / "plan.json", Plan)
        refuse_another(record_of(plan, Plan, "train"), kept, run_folder)
    if resume and (done := resumed_by_engine(run_folder, keys, overrides, **telling)):
        return done
    again = None if resume else begun_before(run_folder)
    if again is not None and plan is not None:
        keys, overrides = _allowed(_received(plan, keys, overrides, "train").job), []
        run_folder, resume = again, True
    with ExitStack() as held:
        if resume:
            folder = held.enter_context(existing_run(run_folder, "plan.json"))
            plan = folder / "plan.json"
        elif plan is None:
            raise PlanError("train needs a plan: give its file, or resume a run folder")
        plan = _received(plan, keys, overrides, "train")
        watch.lap("reading the plan")  # it may come out of a pipe, from a probe
        telling["report_to"] = checked_destination(
            run_folder, plan, report_to, resume=resume, follow_advice=follow_advice
        )
        if hands_over(plan.job):
            job = with_workers(plan.job, plan)
            with new_run_folder(run_folder, job) as folder:
                write_inputs(folder, plan, profile)
            return hand_over(folder, job, **telling)
        held.enter_context(_workers_of(plan.job))
        check_training(plan, resume=resume)
        if not resume:
            folder = held.enter_context(new_run_folder(run_folder, plan.job))
            note_begun(folder)
        write_inputs(folder, plan, profile)
        watch.lap(_OPENING)
        held.enter_context(_resumable(folder, plan.job))
        return conduct(folder, plan, watch, resume=resume, **telling)


def report(
    run: RunSummary | str | Path,
    *others: RunSummary | str | Path,
    out: str | Path | None = None,
) -> Path:
    """Write the figures and ``report.html`` of a run, or compare several. Needs no torch.

    Args:
        run: The summary, its file, or the run folder.
        others: More of the same data: then it is `compare_runs` that writes.
        out: Folder for page and figures; unset: the run folder, or the current one for several.

    Returns:
        The page.

    Raises:
        FileError: There is no summary, the data differ, or the folder cannot be written.
    """
    refuse_no_path(out, "out")
    if others:
        return compare_runs([run, *others], out=out or ".")[1]
    summary = with_refit(_summary_of(run))
    folder = Path(out or summary.run_folder)
    write_figures(summary, folder / "figures")
    page = folder / "report.html"
    write_page(summary, page)
    return page


def compare_runs(
    runs: Iterable[RunSummary | str | Path], *, out: str | Path = "."
) -> tuple[RunComparison, Path]:
    """Write ``comparison.html`` and ``comparison.png`` of several runs. Needs no torch.

    Args:
        runs: Two or more of the same data: summaries, their files, or run folders.
        out: Folder for both.

    Returns:
        The comparison, and the page.

    Raises:
        FileError: There is no summary, a run is named twice, the data differ, or the folder cannot
            be written.
    """
    summaries = [_summary_of(one) for one in runs]
    folders = [one.run_folder for one in summaries]
    if again := next((one for one in folders if folders.count(one) > 1), None):
        raise FileError(f"{again} is named twice: a comparison needs another run beside it")
    told = compared(summaries)
    folder = Path(out)
    make_folder(folder)
    write_whole(folder / "comparison.png", file_bytes(draw_comparison(told)))
    page = folder / "comparison.html"
    write_whole(page, comparison_page(told).encode())
    return told, page


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
        run_folder: Where everything goes; unset: a new folder under ``runs``.
        resume: Continue the run in ``run_folder``.
        on_plan: Called with the plan before training starts.
        report_to: As for `train`.
        follow_advice: As for `train`.
        trackers: As for `train`.
        overrides: ``key=value`` texts, as on the command line.
        keys: Job keys to change; with ``resume`` as for `train`.

    Returns:
        What happened; the page is ``report.html`` in the run folder.
    """
    refuse_unguarded_script()
    refuse_no_path(run_folder, "run_folder")
    overrides = texts_of(overrides)
    telling: dict[str, Any] = {
        "report_to": report_to,
        "follow_advice": follow_advice,
        "trackers": wanted_trackers(trackers),
    }
    if resume and (done := resumed_by_engine(run_folder, keys, overrides, **telling)):
        if not (Path(done.run_folder) / "report.html").exists():  # lost once training had ended
            report(done)
        return done
    if not resume:
        job, keys, overrides = job_of(job, keys, overrides), {}, []
        asked = job.model_dump_json()
        if (again := begun_before(run_folder, asked)) is not None:
            keys, run_folder, resume = _allowed(job), again, True
    with ExitStack() as held:
        if resume:
            folder = held.enter_context(existing_run(run_folder, "plan.json", "job.yaml"))
            if (folder / "plan.json").exists():
                done = train(run_folder=folder, resume=True, overrides=overrides, **telling, **keys)
                held.enter_context(_resumable(folder, done.plan.job))
                return _reported(done)
            # stopped before there was a plan
            job = load_job(folder / "job.yaml")
            refuse_unconfirmed_code(job, keys, overrides)
            job = change_job(job, keys, overrides)
        else:
            assert isinstance(job, Job)  # noqa: S101 - made above
        watch = Stopwatch()
        telling["report_to"] = checked_destination(
            run_folder, job, report_to, resume=resume, follow_advice=follow_advice
        )
        if hands_over(job):
            with new_run_folder(run_folder, job) as folder:
                write_text(job_yaml(job), folder / "job.yaml")
            return hand_over(folder, job, **telling)
        held.enter_context(_workers_of(job))
        job = ready(job, judged=True)
        before = measured_before(folder, job) if resume else None
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
        return _reported(conduct(folder, decided, watch, resume=False, **telling))


def _planned_in(folder: Path, job: Job, watch: Stopwatch, before: Profile | None) -> Plan:
    """Measure a resolved job and decide, all in its run folder, which keeps the profile.

    ``before`` is what an earlier start has measured of it, if anything.
    """
    logs, kept = folder / "logs" / "probe", folder / "profile.json"
    make_folder(logs)
    if before is not None:
        write_record(before, kept)
    # The profile is of use even if no plan comes of it.
    whole = before is not None and not before.trials_open
    profile = before if before is not None and whole else _probe_in(logs, job, kept)
    planned = priced_here(profile.job, profile)
    if planned != profile.job:
        profile = profile.model_copy(update={"job": planned})
        write_record(profile, folder / "profile.json")
    watch.lap("probe")
    try:
        decided = make_plan(profile)
    except PlanError as error:
        again = resuming_command(folder, job)  # other keys may do
        error.args = (f"{error}; `{again} KEY=VALUE` plans again with what was measured",)
        raise
    if pairs_of(decided):
        with pair_measurer_for(decided, folder / "logs" / "pairs") as measure:
            settled = settle(decided, profile, measure, make_plan)
        decided = settled.plan
        write_record(settled.profile, folder / "profile.json")
    tell_shortfall(decided)
    return decided


def _reported(summary: RunSummary) -> RunSummary:
    """Write figures and page, and into the summary how long that took."""
    watch = Stopwatch()
    report(summary)
    watch.lap(_REPORT)
    others = (one for one in summary.after if one.name != _REPORT)  # of an earlier command
    summary = summary.model_copy(update={"after": (*others, watch.parts[-1])})
    write_record(summary, Path(summary.run_folder) / "summary.json")
    return summary


def _resumable(folder: Path, job: Job) -> AbstractContextManager[None]:
    """Inside, a stop says what goes on with the run; its folder holds the job."""
    return telling_how_to_resume(resuming_command(folder, job), deadline=job.goal.deadline)


def _workers_of(job: Job) -> AbstractContextManager[None]:
    """Inside, the job's workers start quickly; its own imports take place beside this process's."""
    others = job.launcher.one_worker or (job.launcher.joins and joined() is not None)
    return nullcontext() if others else imported_once()


def _allowed(job: Job) -> dict[str, Any]:
    """What a job imports, as keys that allow a run folder's job to do so, too."""
    return {key: getattr(job, key) for key in job.code_keys}


def _received(
    given: Plan | str | Path, keys: Mapping[str, Any], overrides: list[str], verb: str
) -> Plan:
    """A plan that is there or in a file, with job keys changed that do not change the plan."""
    plan = record_of(given, Plan, verb)
    if plan is not given:
        refuse_unconfirmed_code(plan.job, keys, overrides)
    return with_job(plan, change_job(plan.job, keys, overrides))


def _summary_of(run: RunSummary | str | Path) -> RunSummary:
    """A summary that is there, or that of a run folder or file."""
    return (
        read_summary(run) if isinstance(run, str | Path) else record_of(run, RunSummary, "report")
    )


# --------------------------------------------------------------------------------------- launching


@contextmanager
def _logs() -> Iterator[Path]:
    """A folder for the workers' files; it stays where a worker's end is told, which names it."""
    folder = Path(tempfile.mkdtemp(prefix="batchwright-"))
    told = False
    try:
        yield folder
    except WorkerError:
        told = True
        raise
    finally:
        if not told:
            shutil.rmtree(folder)


@contextmanager
def _telling_what_is_kept(kept: Path | None, job: Job) -> Iterator[None]:
    """Add to the message of a probe that ends during its trials where they go on from."""
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
    """Measure a step of the user's own; worker 0 shows how far it is and writes the profile."""
    from batchwright.probing.own_step import probe_step
    from batchwright.training.batches.unequal import place_among_workers

    first = place_among_workers()[0] == 0
    said: list[str] = []
    with steps() if first else nullcontext() as show:
        profile = probe_step(step, batch, loader, samples, keys, progress=show, tell=said.append)
    if first:
        _say(profile, said)
        if kept is not None:
            write_record(profile, kept)
    return profile


def _probe_in(folder: Path, job: Job, kept: Path | None) -> Profile:
    """Measure a resolved job; ``folder`` takes the workers' files, ``kept`` the profile."""
    from batchwright.probing.probe import probe as measure
    from batchwright.probing.probe import unfinished

    if kept is not None and (begun := unfinished(kept, job)):
        made = counted(len(begun.trials), "trial")
        told = f"{kept} has all but trials, and {made}: going on with them"
        print(told, file=sys.stderr)  # noqa: T201 - for the person who waits
    said: list[str] = []
    with steps() as show:
        profile = measure(job, folder, kept=kept, progress=show, tell=said.append)
    _say(profile, [*said, profile.trials_note])
    return profile


def _say(profile: Profile, notes: Sequence[str]) -> None:
    """What to know of a profile, beside it."""
    for word, told in (
        ("warning", busy_warning(profile.load)),
        *(("note", line) for line in notes),
    ):
        if told:
            print(f"{word}: {told}", file=sys.stderr)  # noqa: T201 - for the person who waits
