"""The command line: the same verbs as the library, reading and writing JSON files.

Text for people goes to standard error and JSON to standard output, so commands can be piped:

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
    key_commands,
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
"""Words that users may try as commands, and what to write in place of each."""


class _Commands(TyperGroup):
    """The command group. A wrong command line ends with one line that says what to write."""

    def make_context(self, *arguments: Any, **more: Any) -> Any:
        with _usage_refused():
            return super().make_context(*arguments, **more)

    def invoke(self, ctx: Any) -> Any:
        with _usage_refused():
            return super().invoke(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found: Any = super().get_command(ctx, cmd_name)
        for word in found.params if found else ():
            if word.param_type_name == "argument":  # else Typer adds Python's type to its name
                word.display_type_rich = lambda **_: None
        return found

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List each command with its whole first sentence; Typer would cut it to one line."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, one.get_short_help_str(1000)) for name, one in self.commands.items()]
            )

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        # A shell that completes a command line parses it resiliently, and wants no errors.
        if args[0] not in self.commands and not ctx.resilient_parsing:
            near = difflib.get_close_matches(args[0], self.commands, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(self.commands)}"
            if args[0] in _OTHER_VERBS:
                hint = f"write {_OTHER_VERBS[args[0]]}"
            raise ArgumentError(f"there is no command {args[0]!r}: {hint}")
        return super().resolve_command(ctx, args)


_USAGE = ("NoSuchOption", "MissingParameter", "BadParameter", "BadOptionUsage", "UsageError")
"""Names of the errors that click raises for a wrong command line.

`NoArgsIsHelpError` is not among them: an empty command line gets the help."""


@contextmanager
def _usage_refused() -> Iterator[None]:
    """Turn click's usage errors into an `ArgumentError` of one line."""
    try:
        yield
    except Exception as error:
        # Compared by name, since Typer may use its own copy of click or the installed one.
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
    """The hint for an unknown option that resembles a job key; empty if none is like it."""
    from batchwright.records import Job
    from batchwright.records.text.job_keys import ABSENT_WORDS, OTHER_WORDS, job_keys, meaning

    word = option.lstrip("-").lower().replace("-", "_")
    known = job_keys(Job)
    if word in known:
        return f"a job key has no dashes: write {word}=..."
    # The option exists for other verbs: the hint would only repeat it.
    if OTHER_WORDS.get(word, "").startswith(f"{option} "):
        return ""
    return meaning(word, known) if word in {*OTHER_WORDS, *ABSENT_WORDS} else ""


app = typer.Typer(
    name="batchwright",
    cls=_Commands,
    help="Decides how an image-training job should use its workers, runs it, and checks itself.",
    epilog="Job keys, such as epochs=3 or data=cifar100:PATH: `batchwright keys` explains them.",
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
app.command()(training_commands.predict)
app.command()(training_commands.sweep)


@app.command()
def doctor(as_json: JsonFlag = False) -> None:
    """Show what this machine offers for training, and what is wrong with it."""
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


app.command()(key_commands.keys)
app.command()(client_commands.submit)
app.command()(client_commands.fetch)
app.command()(client_commands.send)
app.command()(client_commands.agent)
app.command()(service_commands.serve)
app.command()(service_commands.token)
app.command(name="sign-in")(service_commands.sign_in)
app.command()(service_commands.backup)


def main() -> None:
    """Run the command line. Every known mistake ends with one line on stderr and exit code 2."""
    from batchwright.distributed.processes import spinning_shortly
    from batchwright.errors import one_line, shortage
    from batchwright.records.text.problems import printable
    from batchwright.workflows.stopwatch import command_begins
    from batchwright.workflows.together import take_part

    command_begins()
    os.environ.update(spinning_shortly(os.environ))  # before torch, for launch=in-process

    try:
        sys.path.append(_working_folder())  # so that import strings find the user's modules
        _refuse_unprintable(sys.argv[1:])
        for stream in (sys.stdin, sys.stdout):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(encoding="utf-8")  # JSON is UTF-8 whatever the locale says
        try:
            take_part(sys.argv[1:], app)
        except SystemExit as end:
            if end.code:  # the command's own failure counts, not that stdout may be closed
                _exit(end.code)
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except BatchwrightError as error:
        _exit(error.exit_code, printable(one_line(error)))
    except BrokenPipeError:  # the reader of our output has gone
        _exit(1)
    except (OSError, RuntimeError) as error:  # what no earlier check has refused
        if short := shortage(error, users=True):
            what = f"this machine is short of processes, files or memory: {short}"
            hint = "`ulimit -a` lists them; a container or batch job has its own"
            _exit(2, f"{what}; end what else runs, or raise the limits ({hint})")
        if isinstance(error, RuntimeError):
            raise
        where = "" if error.filename is None else f" {error.filename}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            place, hint = f"cannot write{where}", "free some space, or write to another place"
        elif where:
            place, hint = f"cannot use{where}", "look at its name and its permissions"
        else:
            raise
        _exit(2, printable(f"{place}: {error.strerror}; {hint}"))


def _exit(code: int | str, error: str = "") -> NoReturn:
    """End the process with ``code``, also where stdout or stderr is closed.

    Python itself would then end with 120, since it cannot flush its buffers.
    """
    for stream, line in ((sys.stderr, error and f"error: {error}\n"), (sys.stdout, "")):
        try:
            stream.write(line)
            getattr(stream, "wrapped", stream).flush()  # Typer's wrapper hides the error
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(code)


def _refuse_unprintable(words: list[str]) -> None:
    """Refuse words that are not valid Unicode, which no file of ours could hold.

    Raises:
        ArgumentError: A word is such, for example a file name in another encoding.
    """
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise ArgumentError(
                f"{word!r} is not text in UTF-8: give the file or folder another name"
            ) from None


def _working_folder() -> str:
    """The working folder, which `python -m` puts on the module path, too.

    Raises:
        FileError: The folder has been deleted.
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
