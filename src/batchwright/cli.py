"""The command line: the same verbs as the library, reading and writing JSON files.

What a person reads goes to standard error, JSON to standard output, so commands pipe:

    batchwright probe data=digits | batchwright plan - | batchwright train - --out runs/a

Everything heavy is imported inside the command that needs it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchwright import cli_client, cli_service
from batchwright.errors import BatchwrightError, PlanError, TrainingError

if TYPE_CHECKING:
    from batchwright.records import Job, Plan, Profile, Record, RunSummary

app = typer.Typer(
    name="batchwright",
    help="Decides how an image-training job should use its workers, runs it, and checks itself.",
    epilog="Job keys, such as epochs=3 or data=cifar100:PATH, are explained in docs/job.md.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

JobWords = Annotated[
    list[str] | None,
    typer.Argument(metavar="JOB.yaml|KEY=VALUE", help="A job file, and job keys that change it."),
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Job keys to change.")
]
ReportTo = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Service that is told how the run goes; else what BATCHWRIGHT_REPORT_TO says.",
    ),
]
FollowAdvice = Annotated[
    bool,
    typer.Option("--follow-advice", help="Take a new plan from there at the end of an epoch."),
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


def _print_version(asked: bool) -> None:
    if asked:
        from batchwright import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    del version  # printed by its callback


@app.command()
def run(
    words: JobWords = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; must be new or empty.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    report_to: ReportTo = None,
    follow_advice: FollowAdvice = False,
    as_json: JsonFlag = False,
    explain: Annotated[bool, typer.Option("--explain", help="Show every reason.")] = False,
) -> None:
    """Probe, plan, train and report."""
    from batchwright import verbs

    def show(plan: Plan) -> None:
        _print_plan(plan, explain=explain)

    told: dict[str, Any] = {"report_to": report_to, "follow_advice": follow_advice}
    if resume:
        told |= {"resume": True, "overrides": words or ()}
        summary = verbs.run(run_folder=out, on_plan=show, **told)
    else:
        summary = verbs.run(_job(words), run_folder=out, on_plan=show, **told)
    _finish(summary, as_json)


@app.command()
def probe(
    words: JobWords = None,
    out: Annotated[Path | None, typer.Option(help="File for the profile; - is stdout.")] = None,
) -> None:
    """Measure: step times, memory, exchange times, gradient noise."""
    from batchwright import verbs
    from batchwright.reporting.tables import profile_table

    _refuse_bad_target(out)
    profile = verbs.probe(_job(words))
    _show(profile_table(profile))
    _write(profile, out)


@app.command()
def plan(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="PROFILE.json... [KEY=VALUE]...",
            help="From probe, one or more; - is stdin. Then job keys to change.",
        ),
    ],
    run: Annotated[
        list[str] | None,
        typer.Option(
            help="Finished run of this workload, or sweep, to learn epochs from; may be repeated."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File for the plan; - is stdout.")] = None,
    figure: Annotated[
        Path | None, typer.Option(help="File for a figure of time and cost: .png, .pdf or .svg.")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show every reason.")] = False,
) -> None:
    """Decide, and predict: workers, batch, rate and why. Needs no torch."""
    from batchwright import verbs
    from batchwright.documents import read_record
    from batchwright.records import Profile

    places, overrides = _files_and_keys(words)
    if not places:
        raise PlanError("plan needs a profile: give its file, or - for standard input")
    profiles = [read_record(place, Profile) for place in places]
    decided = verbs.plan(profiles, overrides, runs=run or ())
    if explain or out is not None:
        _print_plan(decided, explain=explain)
    if figure is not None:
        from batchwright.reporting.plan_figure import write_plan_figure

        drawn, numbers = write_plan_figure(decided, profiles, figure)
        print(f"figure: {drawn} (its numbers: {numbers})", file=sys.stderr)
    if out is not None or not (explain and sys.stdout.isatty()):
        _write(decided, out)


@app.command()
def check(
    plan: Annotated[str, typer.Argument(metavar="PLAN.json", help="From plan; - is stdin.")],
    overrides: Overrides = None,
    profile: Annotated[
        str | None,
        typer.Option(metavar="PROFILE.json", help="What the plan was made from, to add to."),
    ] = None,
    points: Annotated[
        int | None, typer.Option(help="Most steps to measure; without it, all that it predicts.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="File for the profile with the new points; needs --profile.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure steps that a plan predicted and nobody measured, and compare."""
    from batchwright import verbs
    from batchwright.documents import read_record
    from batchwright.preparing import refuse_unconfirmed_code
    from batchwright.records import Plan
    from batchwright.reporting.reading import check_words
    from batchwright.reporting.tables import check_table

    if out is not None and profile is None:
        raise PlanError(f"nothing to write to {out}: name the profile to add to with --profile")
    _refuse_bad_target(out)
    words = list(overrides or ())
    decided = read_record(plan, Plan)
    refuse_unconfirmed_code(decided.job, (), words)
    found = verbs.check(decided, profile=profile, points=points, overrides=words)
    _show(check_table(found))
    print(check_words(found), file=sys.stderr)
    if found.profile is not None:
        print(_new_choice(decided, found.profile), file=sys.stderr)
        if out is not None:
            _write(found.profile, out)
    if as_json:
        print(found.model_dump_json(indent=2))


@app.command()
def schedule(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="PLAN.json|RUN|PROFILE.json|JOB.yaml [KEY=VALUE]...",
            help="A plan, a run folder, a profile, a job with its global batch, or - for stdin.",
        ),
    ],
    figure: Annotated[
        Path | None, typer.Option(help="File for a figure of the rate: .png, .pdf or .svg.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show the learning rate over the epochs, and what it comes from. Trains nothing."""
    from batchwright import verbs
    from batchwright.reporting.schedule_figure import check_figure, write_schedule_figure
    from batchwright.reporting.schedule_table import schedule_table

    places, overrides = _files_and_keys(words)
    if len(places) > 1:
        raise PlanError(f"schedule shows one thing at a time, not {' and '.join(places)}")
    if figure is not None:
        check_figure(figure)
    told = verbs.schedule(places[0] if places else None, overrides=overrides)
    for doubt in told.doubts:
        print(f"warning: {doubt}", file=sys.stderr)
    _show(schedule_table(told))
    if figure is not None:
        print(f"figure: {write_schedule_figure(told, figure)}", file=sys.stderr)
    if as_json:
        print(told.model_dump_json(indent=2))


@app.command()
def train(
    plan: Annotated[
        str | None, typer.Argument(metavar="PLAN.json", help="From plan; - is stdin.")
    ] = None,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; must be new or empty.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="PROFILE.json", help="What the plan was made from; kept with the run."
        ),
    ] = None,
    report_to: ReportTo = None,
    follow_advice: FollowAdvice = False,
    as_json: JsonFlag = False,
) -> None:
    """Train as a plan says, with real worker processes."""
    from batchwright import verbs
    from batchwright.documents import read_record
    from batchwright.records import Profile

    words = list(overrides or ())
    if plan is not None and "=" in plan and not Path(plan).exists():
        words.insert(0, plan)
        plan = None
    summary = verbs.train(
        plan,
        run_folder=out,
        resume=resume,
        profile=None if profile is None else read_record(profile, Profile),
        report_to=report_to,
        follow_advice=follow_advice,
        overrides=words,
    )
    _finish(summary, as_json)


@app.command()
def report(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Run folder or summary.json; several: compared."),
    ],
    out: Annotated[Path | None, typer.Option(help="Folder for page and figures.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Tell: predicted against measured, accuracy, where the time went. Needs no torch."""
    from batchwright import verbs
    from batchwright.conducting import with_refit
    from batchwright.run_folder import read_summary

    if len(runs) > 1:
        _compare(runs, out or Path(), as_json)
        return
    summary = with_refit(read_summary(runs[0]))
    page = verbs.report(summary, out=out)
    _finish(summary, as_json, page=page)


@app.command()
def sweep(
    words: JobWords = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=V1,V2,...",
            help="Values of a job key; may be repeated. YAML where values hold commas.",
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(help="Runs of each setting, with seeds from the job's on; else 3.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder; must be new or empty.")] = None,
    at_once: Annotated[
        str, typer.Option(metavar="auto|N", help="Most runs at the same time.")
    ] = "auto",
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the sweep in --out, and widen it.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Run a job over a grid of its keys and several seeds, and compare."""
    from batchwright.reporting.sweep_tables import sweep_table
    from batchwright.reporting.sweep_words import best_setting, progress_words
    from batchwright.sweeping.grid import words_of_grid
    from batchwright.sweeping.verb import sweep as run_sweep

    varied = words_of_grid(grid or ())
    options: dict[str, Any] = {"seeds": seeds, "out": out, "at_once": at_once}
    if resume:
        found = run_sweep(None, varied, resume=True, overrides=words or (), **options)
    else:
        found = run_sweep(_job(words), varied, **options)
    _show(sweep_table(found))
    for line in (best_setting(found), f"page: {Path(found.folder) / 'sweep.html'}"):
        if line:
            print(line, file=sys.stderr)
    if as_json:
        print(found.model_dump_json(indent=2))
    if found.failed:
        told = "; ".join(f"{cell.name}: {cell.error}" for cell in found.failed[:3])
        raise TrainingError(f"{progress_words(found)}: {told}")


@app.command()
def doctor(as_json: JsonFlag = False) -> None:
    """Say what this machine offers to training, and what is wrong with it."""
    from batchwright.doctor import examine

    findings = examine()
    if as_json:
        problems = sum(bool(finding.problem) for finding in findings)
        found = [finding._asdict() for finding in findings]
        print(json.dumps({"problems": problems, "findings": found}, indent=2))
    else:
        for finding in findings:
            print(f"{'!' if finding.problem else ' '} {finding.name:<20} {finding.value}")
            if finding.problem:
                print(f"  {'':<20} {finding.problem}")
    if any(finding.problem for finding in findings):
        raise typer.Exit(1)


cli_client.add_to(app)
cli_service.add_to(app)


def main() -> None:
    """Entry point: every known mistake is one line on stderr and exit code 2."""
    from batchwright.documents import one_line
    from batchwright.processes import spinning_shortly

    os.environ.update(spinning_shortly(os.environ))  # before torch, for launch=in-process

    if sys.platform == "win32":
        print("error: batchwright does not run on Windows; use Linux or WSL 2", file=sys.stderr)
        sys.exit(2)
    sys.path.append(str(Path.cwd()))  # import strings find the user's modules, as `python -m` does
    try:
        app()
    except BatchwrightError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("error: stopped by signal 2", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _job(words: list[str] | None) -> Job:
    """The job of ``[JOB.yaml] [KEY=VALUE]...``."""
    from batchwright.documents import load_job

    words = list(words or ())
    is_file = bool(words) and ("=" not in words[0] or Path(words[0]).exists())
    path = words.pop(0) if is_file else None
    return load_job(path, words)


def _files_and_keys(words: list[str]) -> tuple[list[str], list[str]]:
    """Words that are files, and those that are ``KEY=VALUE``; a file may have = in its name."""
    files = [word for word in words if "=" not in word or Path(word).exists()]
    return files, [word for word in words if word not in files]


def _new_choice(plan: Plan, profile: Profile) -> str:
    """What planning again would choose, in a line."""
    from batchwright.checking import open_again
    from batchwright.planning.planner import make_plan
    from batchwright.records.words import counted

    try:
        again = make_plan(profile, open_again(plan, profile))
    except BatchwrightError as error:
        return f"no new plan comes of it: {error}"
    before, now = (
        f"{counted(one.workers, 'worker')} with global batch {one.stages[0].global_batch_size}"
        for one in (plan, again)
    )
    return f"planned again with these points: {now}" + (
        ", as before" if now == before else f"; before, {before}"
    )


def _refuse_bad_target(out: Path | None) -> None:
    """Better now than after measuring for half a minute."""
    if out is None or str(out) == "-":
        return
    if out.is_dir():
        raise BatchwrightError(f"cannot write {out}: it is a folder; name a file in it")
    if not os.access(out.parent, os.W_OK):
        raise BatchwrightError(f"cannot write {out}: no such folder, or not writable")


def _write(record: Record, out: Path | None) -> None:
    """To the file; without one to stdout."""
    from batchwright.documents import write_record

    write_record(record, "-" if out is None else out)


def _print_plan(plan: Plan, *, explain: bool) -> None:
    if explain:
        print(plan.explain(), file=sys.stderr)
        return
    from batchwright.records.words import counted, local_batches

    top = max(plan.stages, key=lambda stage: stage.resolution)
    seconds = top.predicted_epoch_seconds
    expected = f", {seconds.value:.2g} s per epoch" if seconds else ""
    first = " at first" if plan.method == "dynamic-batch" else ""
    batches = f"global batch {top.global_batch_size}"
    if plan.server is not None:
        batches = f"local batches {local_batches(top.local_batch_sizes)}"
    elif plan.workers > 1:
        batches += f" ({local_batches(top.local_batch_sizes)}{first})"
    sides = ", ".join(str(side) for side in sorted({stage.resolution for stage in plan.stages}))
    rows = f" in {len(plan.stages)} stretches" if len(plan.stages) > 1 else ""
    print(
        f"plan: {counted(plan.workers, 'worker')}, {batches}, "
        f"{sides} px{rows}, "
        f"rate {plan.stages[0].learning_rate:.3g}, {plan.precision}{expected}",
        file=sys.stderr,
    )


def _show(table: Any) -> None:
    from rich.console import Console

    Console(stderr=True).print(table)


def _finish(summary: RunSummary, as_json: bool, page: Path | None = None) -> None:
    """What a run comes to: a table for a person, one object for a program."""
    from batchwright.reporting.reading import refit_words
    from batchwright.reporting.run_tables import summary_table

    _show(summary_table(summary))
    if summary.refit is not None:
        print(refit_words(summary), file=sys.stderr)
    found = page or Path(summary.run_folder) / "report.html"
    profile = Path(summary.run_folder) / "profile.json"
    if profile.exists():
        print(f"why this plan: batchwright plan {profile} --explain", file=sys.stderr)
    if found.exists():
        print(f"report: {found}", file=sys.stderr)
    if as_json:
        print(json.dumps(_result(summary), indent=2))


def _compare(runs: list[str], out: Path, as_json: bool) -> None:
    from batchwright import verbs
    from batchwright.reporting.run_tables import comparison_table

    told, page = verbs.compare_runs(runs, out=out)
    _show(comparison_table(told))
    print(f"comparison: {page} (figure: {page.with_suffix('.png')})", file=sys.stderr)
    if as_json:
        results = [
            _result(one.summary)
            | {"training_seconds": one.seconds, "seconds_to_common_accuracy": one.reached}
            for one in told.runs
        ]
        print(json.dumps({"common_accuracy": told.common, "runs": results}, indent=2))


def _result(summary: RunSummary) -> dict[str, Any]:
    from batchwright.reporting.reading import overall

    stage = summary.plan.stages[-1]
    best, whole = summary.best_epoch, overall(summary)
    seconds = whole.predicted
    return {
        "test_accuracy": summary.test_accuracy,
        "best_accuracy": best.top1 if best else None,
        "best_epoch": best.epoch + 1 if best else None,
        "epochs": len(summary.epochs),
        "method": summary.plan.method,
        "workers": summary.plan.workers,
        "global_batch_size": stage.global_batch_size,
        "local_batch_sizes": stage.local_batch_sizes,
        "precision": summary.plan.precision,
        "predicted_epoch_seconds": seconds.value if seconds else None,
        "predicted_epoch_seconds_low": seconds.low if seconds else None,
        "predicted_epoch_seconds_high": seconds.high if seconds else None,
        "measured_epoch_seconds": whole.measured,
        "refit": summary.refit.model_dump(mode="json") if summary.refit else None,
        "simulated": summary.simulated,
        "wall_seconds": summary.wall_seconds,
        "run_folder": summary.run_folder,
    }


if __name__ == "__main__":
    main()
