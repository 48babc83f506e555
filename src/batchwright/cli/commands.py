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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from batchwright.cli import (
    client_commands,
    planning_commands,
    service_commands,
    training_commands,
)
from batchwright.cli.options import JsonFlag
from batchwright.errors import ArgumentError, BatchwrightError, FileError

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


app.command()(training_commands.run)
app.command()(planning_commands.probe)
app.command()(planning_commands.plan)
app.command()(planning_commands.explain)
app.command()(planning_commands.check)
app.command()(planning_commands.schedule)
app.command()(planning_commands.simulate)
app.command()(training_commands.train)
app.command()(training_commands.report)
app.command()(planning_commands.export)
app.command()(training_commands.deliver)
app.command()(training_commands.sweep)


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
