"""Commands that train, and those for what was trained: `report`, `deliver`, `predict`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from batchwright.cli import completion
from batchwright.cli.options import PLAN, FollowAdvice, Force, JobWords, JsonFlag, Overrides
from batchwright.cli.output import (
    compare,
    files_and_keys,
    finish,
    finish_run,
    job_of,
    key_values,
    print_plan,
    refuse_bad_target,
    refuse_existing,
    show,
)
from batchwright.errors import ArgumentError, DataError, TrainingError
from batchwright.storage.files import is_there

if TYPE_CHECKING:
    from batchwright.records import Plan

ReportTo = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Service to report the run to; else that of BATCHWRIGHT_REPORT_TO, if set.",
    ),
]
Trackers = Annotated[
    list[str] | None,
    typer.Option(
        "--tracker",
        metavar="NAME[:PLACE]",
        help="Tracker to show the run in: tensorboard:DIR, mlflow:ADDRESS, wandb:PROJECT, "
        "trackio:PROJECT; may be repeated. Else those of BATCHWRIGHT_TRACKERS, if set.",
        autocompletion=completion.trackers,
    ),
]


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


def train(
    plan: Annotated[str | None, PLAN] = None,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Run folder; must be new or empty.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    profile: Annotated[
        str | None,
        typer.Option(metavar="PROFILE.json", help="Profile of the plan; it is kept with the run."),
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


def report(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Run folder or summary.json; several: compared."),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for the page and its figures.")
    ] = None,
    metrics: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the run's metrics to this file instead, under flat names as trackers show "
            "them: .csv is a table, else JSON lines; - is stdout. The run may still go on.",
        ),
    ] = None,
    as_json: JsonFlag = False,
    force: Force = False,
) -> None:
    """Report a run: predicted against measured, accuracy, time. Needs no torch."""
    from batchwright.records.lines import export
    from batchwright.records.run_folder import read_summary
    from batchwright.reporting.pages.reports import write_report
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
    finish(summary, as_json, page=write_report(summary, out))


def deliver(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder; must be new or empty.")],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="network=NAME", help="For --onnx: import string of a network of your own."
        ),
    ] = None,
    checkpoint: Annotated[
        str,
        typer.Option(
            metavar="best|last|epoch-N",
            help="Which weights: of the best epoch, of the last, or after N epochs, where "
            "checkpoint_epochs has kept them.",
        ),
    ] = "best",
    licence: Annotated[
        str, typer.Option(metavar="NAME", help="Licence for the model card, such as apache-2.0.")
    ] = "unknown",
    onnx: Annotated[bool, typer.Option("--onnx", help="Also write the network as ONNX.")] = False,
) -> None:
    """Write a trained network for others: weights as safetensors, a model card, ONNX."""
    from batchwright.workflows.delivery.deliver import deliver as delivered

    keys = key_values(words)
    if keys.keys() - {"network"}:
        raise ArgumentError(f"deliver takes network=NAME alone, not {next(iter(keys))}=")
    card = delivered(
        run,
        out,
        checkpoint=checkpoint,
        licence=licence,
        onnx=onnx,
        network=keys.get("network"),
    )
    print(f"model card: {card}", file=sys.stderr)


def predict(
    place: Annotated[
        str,
        typer.Argument(
            metavar="RUN|MODEL", help="Folder of a finished run, or one that deliver has written."
        ),
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="IMAGE|FOLDER|KEY=VALUE",
            help="Image files and folders of them, or data=... for its held-out images; of a run "
            "else its own. Also device=, and network= of your own.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.csv", help="The table; else standard output.")
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="best|last|epoch-N",
            help="Which weights of a run: of the best epoch, of the last, or after N epochs.",
        ),
    ] = None,
    as_json: JsonFlag = False,
    force: Force = False,
) -> None:
    """Classify images: a CSV row for each, and the accuracy if they have labels."""
    from batchwright.records.text.problems import to_stderr
    from batchwright.reporting.render.terminal import stacked, table
    from batchwright.workflows.delivery.predict import predict as predicted

    if as_json and (out is None or str(out) == "-"):
        raise ArgumentError("--json prints on standard output, so give the table a file with --out")
    refuse_bad_target(out)
    refuse_existing(out, force)
    images, keys = files_and_keys(words or [])
    found = predicted(place, images, keys, out=out, checkpoint=checkpoint, tell=to_stderr)
    if found.confusion:
        title, rows = found.class_table()
        head = ["class", "images", "recall", "precision", "most often confused with"]
        show(stacked(table(title, head, rows, left=[0, 4])))
    print(found, file=sys.stderr)
    if as_json:
        print(json.dumps(found.as_json(), indent=2))
    if found.unreadable:
        raise DataError(
            f"{found.unreadable} of {found.unreadable + found.images} images cannot be read and "
            "are left out: they are named above; mend or remove them"
        )


def sweep(
    words: JobWords = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=V1,V2,...",
            help="Values of a job key; may be repeated. Lists in brackets: KEY=[1,2],[3,4].",
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
        bool,
        typer.Option(
            "--resume", help="Continue the sweep in --out; --grid and --seeds may add runs."
        ),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Run a job over a grid of its keys and several seeds, and compare."""
    from batchwright.records.job import other_keys_come
    from batchwright.reporting.data.sweep_curves import best_setting, progress_words, run_words
    from batchwright.reporting.render.tables import sweep_table
    from batchwright.workflows.sweep.grid import words_of_grid
    from batchwright.workflows.sweep.verb import sweep as run_sweep

    varied = words_of_grid(grid or ())
    with other_keys_come():  # the grid's keys
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
        keys = [one.key for one in found.keys]
        errors = "; ".join(
            f"{run_words(keys, one.values, one.seed)}: {one.error}" for one in found.failed[:3]
        )
        raise TrainingError(f"{progress_words(found)}: {errors}")
