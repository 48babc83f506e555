"""Commands around a plan: `probe`, `plan`, `explain`, `check`, `schedule`, `simulate`, `export`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from batchwright.cli import completion
from batchwright.cli.options import PLAN, Force, JobWords, JsonFlag, Overrides
from batchwright.cli.output import (
    explained,
    files_and_keys,
    job_of,
    key_values,
    new_choice,
    print_plan,
    refuse_bad_figure,
    refuse_bad_target,
    refuse_existing,
    result_on_stdout,
    show,
    write,
    write_result,
)
from batchwright.errors import ArgumentError, PlanError


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
    show(profile_table(profile))  # last, so that a terminal shows it below the JSON


def plan(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="PROFILE.json|RUN|KEY=VALUE",
            help="Profiles, or run folders that hold one; - is stdin. Then job keys to change.",
            autocompletion=completion.files_first,
        ),
    ],
    run: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RUN",
            help="Finished run of this workload, or a sweep over it, to learn from; may be "
            "repeated.",
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
    """Choose workers, batch, rate and more, and predict time and accuracy. Needs no torch."""
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
    if out is not None:  # before the reasons, whose reader may be gone
        write_result(decided, out, as_json)
    if explain or out is not None or sys.stdout.isatty():
        # For `| less` and the like, where nothing else goes there.
        reasons = None if result_on_stdout(out, as_json) else sys.stdout
        print_plan(decided, explain=explain, reasons=reasons)
    if figure is not None:
        from batchwright.reporting.render.figures import write_plan_figure

        drawn, numbers = write_plan_figure(decided, profiles, figure)
        print(f"figure: {drawn} (its numbers: {numbers})", file=sys.stderr)
    if out is None:
        write_result(decided, out, as_json)


def explain(plan: Annotated[str, PLAN]) -> None:
    """Show a plan with the reason of each choice, from its file alone. Needs no torch."""
    from batchwright.records.run_folder import read_plan

    print(explained(read_plan(plan), sys.stdout))


def check(
    plan: Annotated[str, PLAN],
    overrides: Overrides = None,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="PROFILE.json", help="Profile of the plan; the new points are added to it."
        ),
    ] = None,
    points: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Most steps to measure; without it, all that the plan predicts."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File for the profile with the new points; needs --profile, or a run folder.",
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure steps that a plan has predicted, its own first, and compare."""
    from batchwright.records import Plan, Profile
    from batchwright.records.documents import read_record
    from batchwright.reporting.data.reading import check_words
    from batchwright.reporting.render.tables import check_table
    from batchwright.workflows import verbs
    from batchwright.workflows.job_changes import refuse_unconfirmed_code

    if out is not None and profile is None and Path(plan, "profile.json").is_file():
        profile = plan  # the run folder's own
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
    """Show the learning rate over the epochs, with its sources. Trains nothing."""
    from batchwright.reporting.render.figures import write_schedule_figure
    from batchwright.reporting.render.tables import schedule_table
    from batchwright.workflows.scheduling import schedule as scheduled

    places, overrides = files_and_keys(words)
    if len(places) > 1:
        raise PlanError(f"schedule shows one thing at a time, not {' and '.join(places)}")
    refuse_bad_figure(figure)
    found = scheduled(places[0] if places else None, overrides=overrides)
    for doubt in found.doubts:
        print(f"warning: {doubt}", file=sys.stderr)
    show(schedule_table(found))
    if figure is not None:
        print(f"figure: {write_schedule_figure(found, figure)}", file=sys.stderr)
    if as_json:
        print(found.model_dump_json(indent=2))


def simulate(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="PLAN.json|RUN|KEY=VALUE",
            help="A plan's file, or a run folder; - is stdin. Then keys of the simulation "
            "(docs/simulate.md).",
        ),
    ],
    profile: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PROFILE.json",
            help="Profile of the plan; may be repeated, one for each kind of worker.",
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
        bool, typer.Option("--explain", help="Show every reason of the plan of --write-plan.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Simulate a plan's training on clusters that you do not have. Needs no torch."""
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
    if write_plan is not None and write_plan in (Path("-"), out):
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
    write_result(found, out, as_json)


def export(
    program: Annotated[
        str,
        typer.Option(
            "--as",
            metavar="NAME",
            help="Program that the plan is written for; `list` names all.",
            autocompletion=completion.exports,
        ),
    ],
    plan: Annotated[str | None, PLAN] = None,
    hosts: Annotated[
        int, typer.Option(metavar="N", min=1, help="Hosts that share the workers evenly.")
    ] = 1,
    run_folder: Annotated[
        str, typer.Option(metavar="DIR", help="Run folder on the machine that trains.")
    ] = "run",
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
    """Write a plan as a file of another program that starts or follows it."""
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
    pairs = key_values(settings, "--set")
    beside = "." if out is None else str(out.parent)
    target = Target(hosts, "plan.json" if place == "-" else place, run_folder, pairs, beside)
    text = exported(read_record(place, Plan), program, target)
    if out is None or str(out) == "-":
        print(text, end="")
    else:
        write_whole(out, text.encode())
