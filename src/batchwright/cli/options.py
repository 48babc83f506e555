"""Arguments and options that several command files share."""

from __future__ import annotations

from typing import Annotated

import typer

from batchwright.cli import completion

PLAN = typer.Argument(metavar="PLAN.json|RUN", help="A plan's file, or a run folder; - is stdin.")
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
Force = Annotated[bool, typer.Option("--force", help="Overwrite the file if there is one.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
FollowAdvice = Annotated[
    bool,
    typer.Option(
        "--follow-advice", help="After an epoch, switch to a new plan that the service offers."
    ),
]
