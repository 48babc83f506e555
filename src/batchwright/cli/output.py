"""What the commands share: reading arguments and files, and printing plans, tables and results."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from math import nan
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any, TextIO

from batchwright.errors import ArgumentError, BatchwrightError
from batchwright.storage.files import LONGEST_NAME, behind_links, is_folder, is_there

if TYPE_CHECKING:
    from batchwright.records import Job, Plan, Profile, Record, RunSummary


def job_and_file(words: list[str] | None) -> tuple[Job, str | None]:
    """The job of ``[JOB.yaml] [KEY=VALUE]...``, and the file if there is one."""
    from batchwright.records.documents import load_job

    words = list(words or ())
    is_file = bool(words) and ("=" not in words[0] or is_there(words[0]))
    path = words.pop(0) if is_file else None
    return load_job(path, words), path


def job_of(words: list[str] | None) -> Job:
    """The job of ``[JOB.yaml] [KEY=VALUE]...``."""
    return job_and_file(words)[0]


def files_and_keys(words: list[str]) -> tuple[list[str], list[str]]:
    """Split words into files and ``KEY=VALUE`` texts; a file that exists may have = in its name."""
    files = [word for word in words if "=" not in word or is_there(word)]
    return files, [word for word in words if word not in files]


def key_values(words: Sequence[str] | None, option: str = "") -> dict[str, str]:
    """``KEY=VALUE`` words by key, each with one value; ``option`` is named in error messages."""
    from batchwright.records.documents import pairs_of

    return pairs_of(
        words or (),
        lambda word: ArgumentError(f"{option} {word}: write KEY=VALUE".lstrip()),
        option=option,
    )


def new_choice(plan: Plan, profile: Profile) -> str:
    """What planning again with ``profile`` would choose, beside the old choice, in a line."""
    from batchwright.planning.planner import make_plan
    from batchwright.records.text.formatting import counted
    from batchwright.workflows.check_plan import open_again

    try:
        again = make_plan(profile, open_again(plan, profile))
    except BatchwrightError as error:
        return f"planning again with these points fails: {error}"
    before, now = (
        f"{counted(one.workers, 'worker')} with global batch {one.stages[0].global_batch_size}"
        for one in (plan, again)
    )
    return f"planned again with these points: {now}" + (
        ", as before" if now == before else f"; before, {before}"
    )


def refuse_bad_target(out: Path | None, model: type[Record] | None = None) -> None:
    """Refuse a path that cannot be written before any work is done.

    Args:
        out: The file to write; ``-`` or `None` is stdout.
        model: The record that will be written there; a file with another record is refused.

    Raises:
        BatchwrightError: The path is a folder, or its folder is missing or not writable.
    """
    if out is None or str(out) == "-":
        return
    if is_there(out) and out.is_dir():
        raise BatchwrightError(f"cannot write {out}: it is a folder; name a file in it")
    device = is_there(out) and not out.is_file()  # such as /dev/stdout, which stays
    place = out if device else behind_links(out).parent  # a link stays as well
    if not (device or is_folder(place)) or not os.access(place, os.W_OK):
        raise BatchwrightError(f"cannot write {out}: no such folder, or not writable")
    if len(os.fsencode(out.name)) > LONGEST_NAME:
        raise BatchwrightError(f"cannot write {out}: its name is too long")
    if model is not None:
        from batchwright.records.documents import refuse_other

        refuse_other(out, model)


def refuse_bad_figure(figure: Path | None) -> None:
    """Refuse a path that is not that of a figure (.png, .pdf or .svg), or cannot be written."""
    if figure is not None:
        from batchwright.reporting.render.figures import check_figure

        check_figure(figure)
        refuse_bad_target(figure)


_UNITS = {"seconds": 1.0, "hours": 3600.0, "days": 86400.0, "GiB": 2.0**30}


def amount(
    option: str, given: str | None, unit: str = "", *, least: float | None = None
) -> float | None:
    """The value of an option: a plain number in ``unit``, or a text with its own unit (``8GB``).

    Args:
        option: The option's name, for messages.
        given: The option's text; `None`: the option was not given.
        unit: A key of `_UNITS`; empty: a number without a unit.
        least: Smallest value; unset: anything above 0.

    Returns:
        The value in ``unit``; `None` if the option was not given.

    Raises:
        ArgumentError: The text is no number, or the value is too small or too large.
    """
    from batchwright.records.text.amounts import bytes_of, seconds_of

    if given is None:
        return None
    size = unit == "GiB"
    most = 1e6 if size else 1e9  # larger values would overflow when they are added up
    try:
        value = float(given)
    except ValueError:
        found = (bytes_of if size else seconds_of)(given) if unit else None
        value = nan if found is None else found / _UNITS[unit]
    if not (0 < value <= most if least is None else least <= value <= most):
        number = f"a number of {unit}" if unit else "a number"
        low = "above 0" if least is None else f"from {least:g}"
        example = f", or a {'size such as 8GB' if size else 'time such as 10min'}" if unit else ""
        raise ArgumentError(f"{option} {given}: give {number} {low} and up to {most:g}{example}")
    return value


def refuse_existing(out: Path | None, force: bool) -> None:
    """Refuse to overwrite a file, which somebody may have changed, without ``--force``."""
    if out is not None and str(out) != "-" and out.is_file() and not force:
        raise BatchwrightError(f"{out} exists: name another file, or overwrite it with --force")


def write(record: Record, out: Path | None) -> None:
    """Write a record as JSON to a file, or without one to stdout."""
    from batchwright.records.documents import write_record

    write_record(record, "-" if out is None else out)


def result_on_stdout(out: Path | None, as_json: bool) -> bool:
    """Whether `write_result` writes JSON to stdout."""
    return as_json or str(out) == "-" or (out is None and not sys.stdout.isatty())


def write_result(record: Record, out: Path | None, as_json: bool) -> None:
    """Write a command's result as JSON: to the file, and to stdout with ``--json``.

    Without either it goes to stdout, unless that is a terminal: there tables have shown it already,
    and thousands of lines of JSON would scroll them away.
    """
    if out is not None:
        write(record, out)
    if result_on_stdout(out, as_json):
        if str(out) != "-":
            write(record, None)
    elif out is None:
        kind = type(record).__name__.lower()
        print(f"the {kind} is not kept: --out FILE writes it, --json prints it", file=sys.stderr)


def explained(plan: Plan, stream: TextIO) -> str:
    """The plan with all its reasons, wrapped to the terminal's width if ``stream`` is one."""
    from batchwright.records.text.plan_text import explain

    return explain(plan, get_terminal_size().columns if stream.isatty() else None)


def print_plan(plan: Plan, *, explain: bool, reasons: TextIO | None = None) -> None:
    """Print the plan in one line on standard error, or with all its reasons.

    Those go to the stream ``reasons``; unset: to standard error, too.
    """
    from batchwright.records.text.problems import to_stderr

    if explain and reasons is not None:
        print(explained(plan, reasons), file=reasons)
        return
    if explain:
        for line in explained(plan, sys.stderr).splitlines():
            to_stderr(line)
        return
    from batchwright.records.text.formatting import (
        counted,
        duration,
        local_batches,
        shares_between,
        significant,
    )
    from batchwright.records.text.plan_text import expects_accuracy

    top = max(plan.stages, key=lambda stage: stage.resolution)
    seconds = top.predicted_epoch_seconds
    expected = f", {significant(seconds.value, 2)} s per epoch" if seconds else ""
    if plan.job.goal.target is not None:
        likely = plan.likely_epochs()
        of = "" if likely == plan.epochs else f" of {plan.epochs:,}"
        expected += f", {counted(likely, 'epoch')}{of}"
    if (whole := plan.whole_seconds) is not None:
        expected += f", {duration(whole.value)} in all"
    one = plan.chosen
    if one is not None and one.accuracy is not None:
        expected += f", accuracy {shares_between(one.accuracy)}"
        expected += " (no trials)" * expects_accuracy(plan)
    first = " at first" if plan.method_spec.balancer else ""
    batches = f"global batch {top.global_batch_size}"
    if plan.server is not None:
        batches = f"local batches {local_batches(top.local_batch_sizes)}"
    elif plan.workers > 1:
        batches += f" ({local_batches(top.local_batch_sizes)}{first})"
    sides = ", ".join(str(side) for side in sorted({stage.resolution for stage in plan.stages}))
    rows = f" in {len(plan.stages)} stages" if len(plan.stages) > 1 else ""
    to_stderr(
        f"plan: {counted(plan.workers, 'worker')}, {batches}, "
        f"{sides} px{rows}, "
        f"{plan.update} at rate {plan.stages[0].learning_rate:.3g}, {plan.precision}{expected}"
    )


def show(table: Any) -> None:
    """Print a rich table on standard error, if that can be written."""
    from batchwright.reporting.render.progress import standard_error

    standard_error().print(table)


def finish_run(summary: RunSummary, as_json: bool) -> None:
    """`finish` without its table where an engine ran the job: its log has shown that already."""
    from batchwright.workflows.engines import hands_over

    if not hands_over(summary.plan.job):
        finish(summary, as_json)
    elif as_json:
        print(json.dumps(result(summary), indent=2))


def finish(summary: RunSummary, as_json: bool, page: Path | None = None) -> None:
    """Print a run's results: tables and paths on stderr, with ``--json`` one object on stdout.

    ``page`` is the report, where that is not in the run folder.
    """
    from batchwright.records.text.problems import to_stderr
    from batchwright.reporting.data.reading import learnt_words, refit_words
    from batchwright.reporting.render.tables import summary_table

    show(summary_table(summary))
    for line in (refit_words(summary), learnt_words(summary)):
        if line:
            to_stderr(line)
    found = page or Path(summary.run_folder) / "report.html"
    if (Path(summary.run_folder) / "plan.json").exists():
        command = shlex.join(["batchwright", "explain", summary.run_folder])
        to_stderr(f"why this plan: {command}")
    if found.exists():
        to_stderr(f"report: {found}")
    if as_json:
        print(json.dumps(result(summary), indent=2))


def compare(runs: list[str], out: Path, as_json: bool) -> None:
    """Compare several runs: write page and figure into ``out``, and print the table."""
    from batchwright.reporting.pages.reports import compare_runs
    from batchwright.reporting.render.tables import comparison_table

    comparison, page = compare_runs(runs, out)
    show(comparison_table(comparison))
    print(f"comparison: {page} (figure: {page.with_suffix('.png')})", file=sys.stderr)
    if as_json:
        results = [
            result(one.summary)
            | {"training_seconds": one.seconds, "seconds_to_common_accuracy": one.reached}
            for one in comparison.runs
        ]
        print(json.dumps({"common_accuracy": comparison.common, "runs": results}, indent=2))


def result(summary: RunSummary) -> dict[str, Any]:
    """A run's results as plain values, for ``--json``."""
    from batchwright.reporting.data.reading import accuracy_comparison, overall

    stage = summary.plan.stages[-1]
    best, whole, learnt = summary.best_epoch, overall(summary), accuracy_comparison(summary)
    seconds, share = whole.predicted, learnt.predicted
    return {
        "test_accuracy": summary.accuracy,
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
        "predicted_accuracy": share.value if share else None,
        "predicted_accuracy_low": share.low if share else None,
        "predicted_accuracy_high": share.high if share else None,
        "accuracy_as_predicted": learnt.inside,
        "refit": summary.refit.model_dump(mode="json") if summary.refit else None,
        "simulated": summary.simulated,
        "wall_seconds": summary.wall_seconds,
        "run_folder": summary.run_folder,
    }
