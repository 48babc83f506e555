"""Writes pages with their figures: the report of a run, or the comparison of several."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from batchwright.errors import FileError
from batchwright.records import RunSummary
from batchwright.records.documents import record_of
from batchwright.records.run_folder import read_summary
from batchwright.reporting.data.comparison import RunComparison, compared
from batchwright.reporting.pages.page import write_page
from batchwright.reporting.pages.page_comparison import comparison_page
from batchwright.reporting.render.figures import draw_comparison, write_figures
from batchwright.reporting.render.image import file_bytes
from batchwright.storage.files import make_folder, write_whole


def summary_of(run: RunSummary | str | Path) -> RunSummary:
    """The summary, given itself or by its file or run folder.

    Raises:
        FileError: There is none.
        ArgumentError: ``run`` is something else.
    """
    return (
        read_summary(run) if isinstance(run, str | Path) else record_of(run, RunSummary, "report")
    )


def write_report(summary: RunSummary, out: str | Path | None = None) -> Path:
    """Write the figures and ``report.html`` of a run, whose refit is made already if there is one.

    Args:
        summary: The run's summary.
        out: Folder for page and figures; unset: the run folder.

    Returns:
        The path of the page.

    Raises:
        FileError: The folder cannot be written.
    """
    folder = Path(out or summary.run_folder)
    write_figures(summary, folder / "figures")
    page = folder / "report.html"
    write_page(summary, page)
    return page


def compare_runs(
    runs: Iterable[RunSummary | str | Path], out: str | Path
) -> tuple[RunComparison, Path]:
    """Write ``comparison.html`` and ``comparison.png`` of several runs.

    Args:
        runs: Two or more runs on the same data: summaries, their files, or run folders.
        out: Folder for both files.

    Returns:
        The comparison, and the path of the page.

    Raises:
        FileError: There is no summary, a run is named twice, the data differ, or the folder cannot
            be written.
    """
    summaries = [summary_of(one) for one in runs]
    folders = [one.run_folder for one in summaries]
    if again := next((one for one in folders if folders.count(one) > 1), None):
        raise FileError(f"{again} is named twice: a comparison needs another run beside it")
    comparison = compared(summaries)
    folder = Path(out)
    make_folder(folder)
    write_whole(folder / "comparison.png", file_bytes(draw_comparison(comparison)))
    page = folder / "comparison.html"
    write_whole(page, comparison_page(comparison).encode())
    return comparison, page
