"""The command line: the same verbs as the library, reading and writing JSON files.

What a person reads goes to standard error, JSON to standard output, so commands pipe:

    batchwright probe data=digits | batchwright plan - | batchwright train - --out runs/a

Everything heavy is imported inside the command that needs it.
"""

from __future__ import annotations

import difflib
import errno
import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from batchwright.cli import client_commands, completion, service_commands
from batchwright.cli.client_commands import FollowAdvice, JsonFlag
from batchwright.cli.output import (
    compare,
    explained,
    files_and_keys,
    finish,
    finish_run,
    hand_on,
    job_of,
    new_choice,
    print_plan,
    refuse_bad_figure,
    refuse_bad_target,
    refuse_existing,
    show,
    write,
)
from batchwright.errors import (
    ArgumentError,
    BatchwrightError,
    FileError,
    PlanError,
    TrainingError,
)
from batchwright.storage.files import is_there

if TYPE_CHECKING:
    from batchwright.records import Plan


_OTHER_VERBS = {
    "resume": "`batchwright run --resume --out RUN`",
    "compare": "`batchwright report RUN RUN...`, which compares runs",
}
"""What to write in place of a command that there is not."""


class _Commands(TyperGroup):
    """Answers a command line that is wrong in one line, with what was probably meant."""

    def make_context(self, *arguments: Any, **more: Any) -> Any:
        with _usage_refused():
            return super().make_context(*arguments, **more)

    def invoke(self, ctx: Any) -> Any:
        with _usage_refused():
            return super().invoke(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found: Any = super().get_command(ctx, cmd_name)
        for word in found.params if found else ():
            if word.param_type_name == "argument":  # or Typer adds Python's type to its name
                word.display_type_rich = lambda **_: None
        return found

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """With the first sentence of each, whole: Typer cuts what is longer than a line."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, one.get_short_help_str(1000)) for name, one in self.commands.items()]
            )

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands and not ctx.resilient_parsing:  # as a shell completes
            near = difflib.get_close_matches(args[0], self.commands, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(self.commands)}"
            if args[0] in _OTHER_VERBS:
                hint = f"write {_OTHER_VERBS[args[0]]}"
            raise ArgumentError(f"there is no command {args[0]!r}: {hint}")
        return super().resolve_command(ctx, args)


_USAGE = ("NoSuchOption", "MissingParameter", "BadParameter", "BadOptionUsage", "UsageError")
"""What click raises where a command line is wrong; an empty one, which gets help, is none."""


@contextmanager
def _usage_refused() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # Typer brings a click of its own, or takes the one that is installed.
        if type(error).__name__ not in _USAGE:
            raise
        wrong: Any = error
        asked = f"{wrong.ctx.command_path} --help" if wrong.ctx else "batchwright --help"
        if type(error).__name__ != "NoSuchOption":
            said = wrong.format_message().rstrip(".").replace("Value error, ", "")
            raise ArgumentError(f"{said[0].lower()}{said[1:]}: see {asked}") from None
        hint = _key_for(wrong.option_name)
        if not hint and wrong.possibilities:
            hint = f"did you mean {wrong.possibilities[0]}?"
        hint = hint or f"{asked} lists them"
        raise ArgumentError(f"there is no option {wrong.option_name}: {hint}") from None


def _key_for(option: str) -> str:
    """What to write in place of an option; empty where it is like no job key."""
    from batchwright.records import Job
    from batchwright.records.text.job_keys import ABSENT_WORDS, OTHER_WORDS, job_keys, meaning

    word = option.lstrip("-").lower().replace("-", "_")
    known = job_keys(Job)
    if word in known:
        return f"a job key has no dashes: write {word}=..."
    # Of an option that other verbs have there is nothing to say but what this one takes.
    if OTHER_WORDS.get(word, "").startswith(f"{option} "):
        return ""
    return meaning(word, known) if word in {*OTHER_WORDS, *ABSENT_WORDS} else ""


app = typer.Typer(
    name="batchwright",
    cls=_Commands,
    help="Decides how an image-training job should use its workers, runs it, and checks itself.",
    epilog="Job keys, such as epochs=3 or data=cifar100:PATH, are explained in docs/job.md.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_PLAN = typer.Argument(metavar="PLAN.json|RUN", help="From plan, or a run folder; - is stdin.")
JobWords = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="JOB.yaml|KEY=VALUE",
        help="A job file, and job keys that change it.",
        autocompletion=completion.job_words,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", help="Job keys to change.", autocompletion=completion.job_words
    ),
]
ReportTo = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Service that is told how the run goes. Else what BATCHWRIGHT_REPORT_TO says.",
    ),
]
Trackers = Annotated[
    list[str] | None,
    typer.Option(
        "--tracker",
        metavar="NAME[:PLACE]",
        help="Shows the run besides: tensorboard:DIR, mlflow:ADDRESS, wandb:PROJECT, "
        "trackio:PROJECT; may be repeated. Else what BATCHWRIGHT_TRACKERS says.",
        autocompletion=completion.trackers,
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the file if there is one.")]


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
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Run folder; must be new or empty.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    report_to: ReportTo = None,
    follow_advice: FollowAdvice = False,
    tracker: Trackers = None,
    as_json: JsonFlag = False,
    explain: Annotated[bool, typer.Option("--explain", help="Show why, choice by choice.")] = False,
) -> None:
    """Probe, plan, train and report."""
    from batchwright.workflows import verbs

    def tell(plan: Plan) -> None:
        print_plan(plan, explain=explain)

    summary = verbs.run(
        None if resume else job_of(words),
        run_folder=out,
        resume=resume,
        on_plan=tell,
        report_to=report_to,
        follow_advice=follow_advice,
        trackers=tracker,
        overrides=(words or ()) if resume else (),
    )
    finish_run(summary, as_json)


@app.command()
def probe(
    words: JobWords = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File for the profile; - is stdout.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure: step times, memory, exchange times, gradient noise, and how the network learns."""
    from batchwright.records import Profile
    from batchwright.reporting.render.tables import profile_table
    from batchwright.workflows import verbs

    refuse_bad_target(out, Profile)
    piped = out is None or str(out) == "-"
    profile = verbs.probe(job_of(words), out=None if piped else out)
    if piped or as_json:
        write(profile, None)
    show(profile_table(profile))  # below it, where both go to a terminal


@app.command()
def plan(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="PROFILE.json|RUN|KEY=VALUE",
            help="From probe, or run folders, one or more; - is stdin. Then job keys to change.",
            autocompletion=completion.files_first,
        ),
    ],
    run: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RUN",
            help="Finished run of this workload, or sweep, to learn from; may be repeated.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File for the plan; - is stdout.")
    ] = None,
    figure: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="File for a figure of time and cost: .png, .pdf or .svg."
        ),
    ] = None,
    as_json: JsonFlag = False,
    explain: Annotated[bool, typer.Option("--explain", help="Show why, choice by choice.")] = False,
) -> None:
    """Decide, and predict: workers, batch, rate and why. Needs no torch."""
    from batchwright.records import Plan, Profile
    from batchwright.records.documents import read_record
    from batchwright.workflows import verbs

    places, overrides = files_and_keys(words)
    if not places:
        raise PlanError("plan needs a profile: give its file, or - for standard input")
    refuse_bad_target(out, Plan)
    refuse_bad_figure(figure)
    profiles = [read_record(place, Profile) for place in places]
    decided = verbs.plan(profiles, overrides, runs=run or ())
    if explain or out is not None or sys.stdout.isatty():
        print_plan(decided, explain=explain)
    if figure is not None:
        from batchwright.reporting.render.figures import write_plan_figure

        drawn, numbers = write_plan_figure(decided, profiles, figure)
        print(f"figure: {drawn} (its numbers: {numbers})", file=sys.stderr)
    hand_on(decided, out, as_json)


@app.command()
def explain(plan: Annotated[str, _PLAN]) -> None:
    """Show why a plan is as it is, choice by choice, by its file alone. Needs no torch."""
    from batchwright.records import Plan
    from batchwright.records.documents import read_record

    print(explained(read_record(plan, Plan), sys.stdout))


@app.command()
def check(
    plan: Annotated[str, _PLAN],
    overrides: Overrides = None,
    profile: Annotated[
        str | None,
        typer.Option(metavar="PROFILE.json", help="What the plan was made from, to add to."),
    ] = None,
    points: Annotated[
        int | None,
        typer.Option(metavar="N", help="Most steps to measure; without it, all that it predicts."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="File for the profile with the new points; needs --profile."
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure steps that a plan predicted, its own among them, and compare."""
    from batchwright.records import Plan, Profile
    from batchwright.records.documents import read_record
    from batchwright.reporting.data.reading import check_words
    from batchwright.reporting.render.tables import check_table
    from batchwright.workflows import verbs
    from batchwright.workflows.prepare_job import refuse_unconfirmed_code

    if out is not None and profile is None:
        raise PlanError(f"nothing to write to {out}: name the profile to add to with --profile")
    if as_json and str(out) == "-":
        raise ArgumentError("--json and --out - both go to standard output: give --out a file")
    refuse_bad_target(out, Profile)
    words = list(overrides or ())
    decided = read_record(plan, Plan)
    refuse_unconfirmed_code(decided.job, (), words)
    found = verbs.check(decided, profile=profile, points=points, overrides=words)
    show(check_table(found))
    print(check_words(found), file=sys.stderr)
    if found.profile is not None:
        print(new_choice(decided, found.profile), file=sys.stderr)
        if out is not None:
            write(found.profile, out)
    if as_json:
        print(found.model_dump_json(indent=2))


@app.command()
def schedule(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="PLAN.json|RUN|PROFILE.json|JOB.yaml|KEY=VALUE",
            help="A plan, a run folder, a profile, a job with its global batch, or - for stdin.",
            autocompletion=completion.files_first,
        ),
    ],
    figure: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File for a figure of the rate: .png, .pdf or .svg."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show the learning rate over the epochs, and what it comes from. Trains nothing."""
    from batchwright.reporting.render.figures import write_schedule_figure
    from batchwright.reporting.render.tables import schedule_table
    from batchwright.workflows import verbs

    places, overrides = files_and_keys(words)
    if len(places) > 1:
        raise PlanError(f"schedule shows one thing at a time, not {' and '.join(places)}")
    refuse_bad_figure(figure)
    told = verbs.schedule(places[0] if places else None, overrides=overrides)
    for doubt in told.doubts:
        print(f"warning: {doubt}", file=sys.stderr)
    show(schedule_table(told))
    if figure is not None:
        print(f"figure: {write_schedule_figure(told, figure)}", file=sys.stderr)
    if as_json:
        print(told.model_dump_json(indent=2))


@app.command()
def simulate(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="PLAN.json|RUN|KEY=VALUE",
            help="From plan, or a run folder; - is stdin. Then keys of the simulation "
            "(docs/simulate.md).",
        ),
    ],
    profile: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PROFILE.json", help="What the plan was made from; may be repeated, by kind."
        ),
    ] = None,
    search: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=V1,V2,...",
            help="Values of spares, checkpoint_seconds, rebalance_steps or workers_per_host to "
            "compare; may be repeated.",
        ),
    ] = None,
    figure: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File for a figure: .png, .pdf or .svg.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File for the result; - is stdout.")
    ] = None,
    write_plan: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File for the plan with the best values searched."),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show every reason of that plan.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Simulate a plan's training on clusters that nobody here has. Needs no torch."""
    from batchwright.records import Plan, Simulation
    from batchwright.records.documents import read_record
    from batchwright.reporting.render.simulation import simulation_tables, write_simulation_figure
    from batchwright.workflows.simulating import searches_of, take_searched
    from batchwright.workflows.simulating import simulate as simulated

    places, overrides = files_and_keys(words)
    if not places:
        raise PlanError("simulate needs a plan: give its file, or - for standard input")
    if len(places) > 1:
        raise PlanError(f"simulate takes one plan, not {' and '.join(places)}")
    refuse_bad_target(out, Simulation)
    refuse_bad_target(write_plan, Plan)
    if explain and write_plan is None:
        raise ArgumentError("--explain shows the plan of --write-plan: give --write-plan FILE")
    if write_plan is not None and str(write_plan) in ("-", str(out)):
        raise ArgumentError(
            f"--write-plan {write_plan}: the result goes there; give the plan a file of its own"
        )
    refuse_bad_figure(figure)
    given = read_record(places[0], Plan)
    found = simulated(
        given,
        overrides,
        profile=profile or (),
        search=searches_of(search or ()),  # type: ignore[arg-type]
    )
    taken = None if write_plan is None else take_searched(given, found)
    for table in simulation_tables(found):
        show(table)
    for note in found.notes:
        print(f"assumed: {note}", file=sys.stderr)
    if figure is not None:
        print(f"figure: {write_simulation_figure(found, figure)}", file=sys.stderr)
    if taken is not None:
        print_plan(taken, explain=explain)
        write(taken, write_plan)
    hand_on(found, out, as_json)


@app.command()
def train(
    plan: Annotated[str | None, _PLAN] = None,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Run folder; must be new or empty.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="PROFILE.json", help="What the plan was made from; kept with the run."
        ),
    ] = None,
    report_to: ReportTo = None,
    follow_advice: FollowAdvice = False,
    tracker: Trackers = None,
    as_json: JsonFlag = False,
) -> None:
    """Train as a plan says, with real worker processes."""
    from batchwright.records import Profile
    from batchwright.records.documents import read_record
    from batchwright.workflows import verbs

    words = list(overrides or ())
    if plan is not None and "=" in plan and not is_there(plan):
        words.insert(0, plan)
        plan = None
    summary = verbs.train(
        plan,
        run_folder=out,
        resume=resume,
        profile=None if profile is None else read_record(profile, Profile),
        report_to=report_to,
        follow_advice=follow_advice,
        trackers=tracker,
        overrides=words,
    )
    finish_run(summary, as_json)


@app.command()
def report(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Run folder or summary.json; several: compared."),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for page and figures.")
    ] = None,
    metrics: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the run's lines here instead, under flat names as trackers take them: "
            ".csv is a table, else JSON lines; - is stdout. The run may still go on.",
        ),
    ] = None,
    as_json: JsonFlag = False,
    force: Force = False,
) -> None:
    """Tell: predicted against measured, accuracy, where the time went. Needs no torch."""
    from batchwright.records.lines import export
    from batchwright.records.run_folder import read_summary
    from batchwright.workflows import verbs
    from batchwright.workflows.run_training import with_refit

    if metrics is not None:
        if len(runs) > 1:
            raise ArgumentError("--metrics writes the lines of one run: name one run folder")
        if as_json or out is not None:
            raise ArgumentError(
                "--metrics writes lines and nothing else: leave --out and --json out"
            )
        refuse_bad_target(metrics)
        refuse_existing(metrics, force)
        export.metrics(runs[0], metrics)
        return
    if len(runs) > 1:
        compare(runs, out or Path(), as_json)
        return
    summary = with_refit(read_summary(runs[0]))
    page = verbs.report(summary, out=out)
    finish(summary, as_json, page=page)


@app.command()
def export(
    program: Annotated[
        str,
        typer.Option(
            "--as",
            metavar="NAME",
            help="Program that takes it; `list` names all.",
            autocompletion=completion.exports,
        ),
    ],
    plan: Annotated[str | None, _PLAN] = None,
    hosts: Annotated[
        int, typer.Option(metavar="N", min=1, help="Hosts that share the workers evenly.")
    ] = 1,
    run_folder: Annotated[str, typer.Option(metavar="DIR", help="Run folder there.")] = "run",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A setting of that program, such as partition=gpu; `--as list` names them; may be "
            "repeated.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File to write; - is stdout.")
    ] = None,
    force: Force = False,
) -> None:
    """Write a plan for another program: an engine that starts it, or a trainer that follows it."""
    from batchwright.records import Plan
    from batchwright.records.documents import read_record
    from batchwright.storage.files import write_whole
    from batchwright.workflows.exports import EXPORTS
    from batchwright.workflows.exports import export as exported
    from batchwright.workflows.exports.target import Target

    if program == "list":
        for spec in EXPORTS.values():
            print(f"{spec.name:<13} {spec.words}")
            for key, words in spec.settings.items():
                needed = " (needed)" if key in spec.required else ""
                print(f"    --set {key}=  {words}{needed}")
        return
    if plan is None:
        raise ArgumentError(
            "name a plan or a run folder: batchwright export PLAN.json|RUN --as NAME"
        )
    refuse_bad_target(out)
    refuse_existing(out, force)
    folder = Path(plan)
    place = str(folder / "plan.json") if folder.is_dir() else plan
    pairs = _pairs(settings, "--set ")
    target = Target(hosts, "plan.json" if place == "-" else place, run_folder, pairs)
    text = exported(read_record(place, Plan), program, target)
    if out is None or str(out) == "-":
        print(text, end="")
    else:
        write_whole(out, text.encode())


@app.command()
def deliver(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder; must be new or empty.")],
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="network=NAME", help="For --onnx, a network of your own again."),
    ] = None,
    checkpoint: Annotated[
        str,
        typer.Option(metavar="best|last", help="Whose weights: the best epoch's, or the last."),
    ] = "best",
    licence: Annotated[
        str, typer.Option(metavar="NAME", help="For the card, such as apache-2.0.")
    ] = "unknown",
    onnx: Annotated[bool, typer.Option("--onnx", help="Write the network as ONNX, too.")] = False,
) -> None:
    """Write a trained network for others: weights as safetensors, a model card, ONNX."""
    from batchwright.workflows.delivery.deliver import deliver as delivered

    keys = _pairs(words)
    if keys.keys() - {"network"}:
        raise ArgumentError(f"deliver takes network=NAME alone, not {next(iter(keys))}=")
    card = delivered(
        run,
        out,
        checkpoint=checkpoint,  # type: ignore[arg-type] # it is looked at there
        licence=licence,
        onnx=onnx,
        network=keys.get("network"),
    )
    print(f"model card: {card}", file=sys.stderr)


def _pairs(words: Sequence[str] | None, option: str = "") -> dict[str, str]:
    """Words such as ``KEY=VALUE``, each key once; ``option`` is what stands before each."""
    pairs: dict[str, str] = {}
    for word in words or ():
        key, equals, value = word.partition("=")
        if not equals:
            raise ArgumentError(f"{option}{word}: write KEY=VALUE")
        if key in pairs:
            raise ArgumentError(
                f"{option}{word}: {key}={pairs[key]} is given as well; leave one of the two out"
            )
        pairs[key] = value
    return pairs


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
        int | None,
        typer.Option(metavar="N", help="Runs of each setting, each with another seed; else 3."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder; must be new or empty.")
    ] = None,
    at_once: Annotated[
        str, typer.Option(metavar="auto|N", help="Most runs at the same time.")
    ] = "auto",
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the sweep in --out, and widen it.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Run a job over a grid of its keys and several seeds, and compare."""
    from batchwright.records.job import other_keys_come
    from batchwright.reporting.data.sweep_curves import best_setting, progress_words
    from batchwright.reporting.render.tables import sweep_table
    from batchwright.workflows.sweep.grid import words_of_grid
    from batchwright.workflows.sweep.verb import sweep as run_sweep

    varied = words_of_grid(grid or ())
    with other_keys_come():  # those of the grid
        job = None if resume else job_of(words)
    found = run_sweep(
        job,
        varied,
        seeds=seeds,
        out=out,
        at_once=at_once,
        resume=resume,
        overrides=(words or ()) if resume else (),
    )
    show(sweep_table(found))
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
    from batchwright import __version__
    from batchwright.workflows.doctor import examine

    findings = examine(__version__)
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


app.command()(client_commands.submit)
app.command()(client_commands.fetch)
app.command()(client_commands.send)
app.command()(client_commands.agent)
app.command()(service_commands.serve)
app.command()(service_commands.token)
app.command(name="sign-in")(service_commands.sign_in)
app.command()(service_commands.backup)


def main() -> None:
    """Read the words and do it: every known mistake is one line on stderr and exit code 2."""
    from batchwright.distributed.processes import spinning_shortly
    from batchwright.errors import one_line
    from batchwright.records.text.problems import printable
    from batchwright.workflows.stopwatch import command_begins
    from batchwright.workflows.together import take_part

    command_begins()
    os.environ.update(spinning_shortly(os.environ))  # before torch, for launch=in-process

    try:
        sys.path.append(_working_folder())  # import strings find the user's modules
        _refuse_unprintable(sys.argv[1:])
        for stream in (sys.stdin, sys.stdout):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(encoding="utf-8")  # as JSON is, whatever the locale says
        try:
            take_part(sys.argv[1:], app)
        except SystemExit as end:
            if end.code:  # what failed counts, not whether somebody still reads what was printed
                _exit(end.code)
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except BatchwrightError as error:
        _exit(error.exit_code, printable(one_line(error)))
    except BrokenPipeError:  # the reader of our output has gone
        _exit(1)
    except OSError as error:  # of a place that is unlike what anybody looked for
        where = "" if error.filename is None else f" {error.filename}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            place, hint = f"cannot write{where}", "free some space, or write to another place"
        elif where:
            place, hint = f"cannot use{where}", "look at its name and its permissions"
        else:
            raise
        _exit(2, printable(f"{place}: {error.strerror}; {hint}"))


def _exit(code: int | str, error: str = "") -> NoReturn:
    """End with a code, which stays the same where nothing can be printed any more.

    Python itself would end with 120, as what is left in the buffers cannot be written, either.
    """
    for stream, line in ((sys.stderr, error and f"error: {error}\n"), (sys.stdout, "")):
        try:
            stream.write(line)
            getattr(stream, "wrapped", stream).flush()  # by Typer, whose own says nothing
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(code)


def _refuse_unprintable(words: list[str]) -> None:
    """Refuse what no file of ours could hold.

    Raises:
        ArgumentError: A word is no text, such as the name of a file from another encoding.
    """
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise ArgumentError(
                f"{word!r} is not text in UTF-8: give the file or folder another name"
            ) from None


def _working_folder() -> str:
    """Of this process, as `python -m` puts it among the places of modules.

    Raises:
        FileError: It is gone.
    """
    try:
        return str(Path.cwd())
    except OSError as error:
        raise FileError(
            f"the folder that this was started in is not there any more ({error.strerror}): "
            "go to another one"
        ) from None


if __name__ == "__main__":
    main()
