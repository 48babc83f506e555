"""The results of a simulation as tables for a terminal, and as a figure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from batchwright.records import SimulatedCluster, Simulation
from batchwright.records.clusters.simulation import Search
from batchwright.records.text.formatting import between, counted, duration, number, percent
from batchwright.reporting.charts.simulation import (
    course_chart,
    search_chart,
    steps_chart,
    workers_charts,
)
from batchwright.reporting.render.figures import check_figure
from batchwright.reporting.render.image import Row, figure, file_bytes
from batchwright.reporting.render.terminal import stacked, table
from batchwright.storage.files import write_whole

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_HIGH = 4.0  # height of a chart, in inches
_ROWS = 20  # rows of a search's table


def simulation_tables(found: Simulation) -> list[RenderableType]:
    """Tables of time and cost of each cluster, of the shares of time, and of each search."""
    title = f"{found.network} on {found.data}, {found.method}, simulated"
    title += ", the best of what was searched" * bool(found.searches)
    results = table(title, ["workers", "global batch", "step", "training", "95 %", "cost", "done"])
    times = table(
        "where the time goes",
        [
            *("workers", "computing", "stragglers", "exchange", "evaluation", "checkpoints"),
            *("lost work", "restarts", "waiting", "failures", "preemptions"),
        ],
    )
    for one in found.clusters:
        workers = f"{one.workers:,}" + (f" + {one.spares}" if one.spares else "")
        results.add_row(
            workers,
            f"{one.global_batch_size:,}",
            duration(one.step_seconds.value),
            duration(one.seconds.value),
            f"-{_distance(one, 'low')} to +{_distance(one, 'high')}",
            "" if one.cost is None else number(one.cost.value),
            percent(one.done.value),
        )
        times.add_row(workers, *_shares(one), number(one.failures), number(one.preemptions))
    searches = [_search_table(one) for one in found.searches]
    return [stacked(results, times, *searches)]


def _shares(one: SimulatedCluster) -> list[str]:
    return [percent(share) for share in one.shares.model_dump().values()]


def _distance(one: SimulatedCluster, end: str) -> str:
    """Distance of an end of the interval from the value, in percent."""
    return percent(abs(getattr(one.seconds, end) / one.seconds.value - 1))


def _search_table(search: Search) -> Table:
    """The values of a key in their order, or combinations of several keys, the best first."""
    made = table(
        f"searched with {counted(search.workers, 'worker')}",
        [*search.keys, "training", "cost", f"{search.unit} over the best (95 %)", ""],
        left=[len(search.keys) + 3],
    )
    tried = list(search.tried)
    if len(search.keys) > 1:
        tried.sort(key=lambda one: one.over_best.value)
    for one in tried[:_ROWS]:
        verdict = "best" if one.values == search.best else ""
        verdict = "may be as good" if one.values in search.level else verdict
        cost = "" if one.cost is None else between(one.cost)
        made.add_row(
            *(f"{value:g}" for value in one.values),
            duration(one.seconds.value),
            cost,
            between(one.over_best),
            verdict,
        )
    rest = [f"and {len(tried) - _ROWS:,} more"] if len(tried) > _ROWS else []
    rest += [f"{len(search.endless):,} would never end"] if search.endless else []
    for line in rest:
        made.add_row(*[""] * (len(search.keys) + 3), line)
    return made


def write_simulation_figure(found: Simulation, path: Path) -> Path:
    """Draw one training on the first cluster, time and cost of all clusters, and the searches.

    Returns:
        The path of the file: PNG, PDF or SVG, by its suffix.

    Raises:
        FileError: The suffix is another one, or the file cannot be written.
    """
    check_figure(path)
    course, steps = course_chart(found), steps_chart(found)
    rows: list[Row] = [(1.0 + 0.4 * len(course.lanes), [course])]
    if steps is not None:
        rows.append((1.0 + 0.4 * len(steps.lanes), [steps]))
    rows.append((_HIGH, workers_charts(found)))
    searched = [search_chart(one, key) for one in found.searches for key in one.keys]
    for at in range(0, len(searched), 2):
        ones = searched[at : at + 2]
        rows.append((_HIGH, [*ones, None] if at and len(ones) == 1 else ones))
    title = f"{found.network} on {found.data}, {found.method}, simulated"
    write_whole(path, file_bytes(figure(rows, title=title), path.suffix.lower()[1:]))
    return path
