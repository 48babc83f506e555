"""The command line, made once in a process: to make it again takes as long as most commands.

What is forked from a process that has imported this has it, too (`forked`).
"""

from __future__ import annotations

import typer.main

from batchwright.cli.commands import app

_usual, _made = typer.main.get_command, typer.main.get_command(app)


def _get_command(asked: typer.Typer) -> object:
    return _made if asked is app else _usual(asked)


typer.main.get_command = _get_command  # type: ignore[assignment] # as `typer.Typer` calls it
