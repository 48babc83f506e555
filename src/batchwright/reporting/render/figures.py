"""Writes figures of runs, plans, schedules, comparisons and sweeps, with their numbers as JSON.

The same records give the same bytes: no date and no version goes into a file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchwright.errors import FileError
from batchwright.records import Plan, Profile, RateSchedule, RunSummary, Sweep, SweptKey
from batchwright.records.text.formatting import counted
from batchwright.reporting.charts.chart import Chart, linear_axis
from batchwright.reporting.charts.comparison import comparison_charts
from batchwright.reporting.charts.plan import accuracy_chart, batch_chart
from batchwright.reporting.charts.rounds import timelines
from batchwright.reporting.charts.run import (
    candidates_chart,
    epochs_chart,
    learning_charts,
    time_chart,
    track_charts,
)
from batchwright.reporting.charts.stages import at_own_values, schedule_charts, stage_charts
from batchwright.reporting.charts.sweep import against_chart, epochs_charts
from batchwright.reporting.charts.workers import worker_panels
from batchwright.reporting.data.accuracy_curves import accuracy_picture
from batchwright.reporting.data.comparison import RunComparison
from batchwright.reporting.data.plan_curves import PlanCurves, plan_curves
from batchwright.reporting.data.plan_words import range_words
from batchwright.reporting.data.schedule_words import (
    batch_words,
    decay_words,
    rate_words,
    warmup_words,
)
from batchwright.reporting.data.sweep_curves import MAX_PANELS, against, curves, varying
from batchwright.reporting.data.worker_curves import worker_curves
from batchwright.reporting.render.image import Row, figure, file_bytes
from batchwright.storage.files import make_folder, write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".pdf", ".svg")
_HIGH = 4.0  # height in inches of charts that are compared
_FINE = 200  # pixels per inch of a figure that may go into a paper


# --------------------------------------------------------------------------------------- of a run


def write_figures(summary: RunSummary, folder: Path) -> list[Path]:
    """Write the figures that the summary has data for into ``folder``; it is made if missing.

    ``plan.png`` (and ``plan.figure.json``): time and cost over the global batch, by cluster;
    ``epoch_seconds.png``: predicted and measured seconds per epoch, over the global batch and epoch
    by epoch; ``learning.png``: loss and held-out accuracy; ``time.png``: where each worker's time
    went; with two workers and more ``workers.png`` (and ``workers.figure.json``): local batch and
    times of each over the epochs; of a run with a parameter server ``rounds.png``: its rounds,
    worker by worker; of a plan of several stages ``stages.png``: resolution, batches and rate.

    Returns:
        The written files; empty if no epoch was finished and the plan has no candidates.

    Raises:
        FileError: A file cannot be written.
    """
    make_folder(folder)
    written = []
    if plan_curves(summary.plan).clusters:  # `stages.png` shows stages
        profiles = [summary.profile] if summary.profile else []
        written = write_plan_figure(summary.plan, profiles, folder / "plan.png")
    workers = worker_curves(summary)
    if len(workers) > 1:
        written.append(folder / "workers.figure.json")
        numbers = {"format": "batchwright-workers-figure/1", "workers": [*map(asdict, workers)]}
        _write_numbers(numbers, written[-1])
    for name, drawn in draw_run(summary):
        write_whole(folder / name, file_bytes(drawn))
        written.append(folder / name)
    return written


def draw_run(summary: RunSummary) -> Iterator[tuple[str, Figure]]:
    """(name, figure) of the figures of `write_figures`, except that of the plan."""
    if seconds := [one for one in (candidates_chart(summary), epochs_chart(summary)) if one]:
        yield "epoch_seconds.png", figure([(_HIGH, seconds)])
    if summary.epochs:
        rows = [(_HIGH, learning_charts(summary)), (_HIGH, track_charts(summary))]
        yield "learning.png", figure([row for row in rows if row[1]])
        bars = time_chart(summary)
        yield "time.png", figure([(1.5 + 0.45 * len(bars.lanes), [bars])])
    if summary.rounds:
        drawn = timelines(summary, most_bins=160)
        yield "rounds.png", figure([(1.0 + 0.36 * len(one.lanes), [one]) for one in drawn])
    if len(summary.plan.stages) > 1:
        resolution, *others = stage_charts(summary.plan, summary.epochs)
        charts = [at_own_values(resolution), *others]
        yield "stages.png", figure([(1.9, [one]) for one in charts])
    if (workers := len(worker_curves(summary))) > 1:
        panels = worker_panels(summary)
        columns = ceil(len(panels) / ceil(len(panels) / 4))
        small: list[Row] = []
        for at in range(0, len(panels), columns):
            ones = panels[at : at + columns]
            space = [None] * (columns - len(ones))
            small.append((1.3, [*(batches for batches, _ in ones), *space]))
            small.append((1.8, [*(times for _, times in ones), *space]))
        words = f"{len(panels)} of {workers} workers, from the fewest samples to the most"
        yield "workers.png", figure(small, title=words if len(panels) < workers else "")


# -------------------------------------------------------------------------------------- of a plan


def plan_figure_data(plan: Plan, profiles: Sequence[Profile] = ()) -> dict[str, Any]:
    """The numbers of a plan's figure, on which measured steps of the profiles are drawn.

    They are the fields of `plan_curves.PlanCurves`, with a ``format``; and ``stages``, if the
    figure shows them.
    """
    data = {"format": "batchwright-plan-figure/1", **asdict(plan_curves(plan, profiles))}
    if _shows_stages(plan):
        kept = {"epochs", "resolution", "learning_rate", "rate_stage", "local_batch_sizes"}
        data["stages"] = [stage.model_dump(include=kept, mode="json") for stage in plan.stages]
    return data


def _shows_stages(plan: Plan) -> bool:
    return len(plan.stages) > 1 or plan.server is not None


def write_plan_figure(plan: Plan, profiles: Sequence[Profile], path: Path) -> list[Path]:
    """Draw the plan into a PNG, PDF or SVG file; its numbers go beside it, ``NAME.figure.json``.

    Measured steps of the profiles are drawn as points.

    Returns:
        The written files.

    Raises:
        FileError: The suffix is another one, the plan has no candidates, or the file cannot be
            written.
    """
    check_figure(path)
    curves = plan_curves(plan, profiles)
    if not curves.clusters and not _shows_stages(plan):
        raise FileError(f"cannot write {path}: the plan holds no predictions to draw")
    numbers = path.with_suffix(".figure.json")
    write_whole(path, file_bytes(draw_plan(curves, plan), path.suffix.lower()[1:]))
    _write_numbers(plan_figure_data(plan, profiles), numbers)
    return [path, numbers]


def check_figure(path: Path) -> None:
    """Refuse a path whose suffix is not that of a figure.

    Raises:
        FileError: The suffix is none of `FORMATS`.
    """
    if path.suffix.lower() not in FORMATS:
        raise FileError(f"cannot write {path}: a figure ends in one of {', '.join(FORMATS)}")


def _write_numbers(data: dict[str, Any], path: Path) -> None:
    write_whole(path, f"{json.dumps(data, indent=2, ensure_ascii=False)}\n".encode())


def draw_plan(curves: PlanCurves, plan: Plan) -> Figure:
    """Accuracy if it is known, time and cost, and below them the stages if there are several.

    Args:
        curves: The plan's curves; without a cluster there are no charts of time and cost.
        plan: A plan with candidates, several stages or a parameter server.
    """
    sides = range_words(stage.resolution for stage in plan.stages)
    title = f"{curves.network} on {curves.data}, {sides} px, {counted(curves.epochs, 'epoch')}"
    rows: list[Row] = []
    if picture := accuracy_picture(curves):
        rows.append((_HIGH, [accuracy_chart(curves, picture)]))
    if curves.clusters:
        rows.append((_HIGH, [batch_chart(curves, "seconds"), batch_chart(curves, "cost")]))
        if sides != range_words([curves.resolution]):
            panels = "a to c" if picture else "a, b"
            title += f"; {panels}: all epochs at {curves.resolution} px"
    if _shows_stages(plan):
        resolution, batches, *_ = stage_charts(plan)
        rows.append((_HIGH, [at_own_values(resolution), batches]))
    return figure(rows, title=title, lettered=True, dpi=_FINE)


def write_schedule_figure(schedule: RateSchedule, path: Path) -> Path:
    """Draw a schedule of the learning rate into a PNG, PDF or SVG file; returns its path.

    Raises:
        FileError: The suffix is another one, or the file cannot be written.
    """
    check_figure(path)
    write_whole(path, file_bytes(draw_schedule(schedule), path.suffix.lower()[1:]))
    return path


def draw_schedule(schedule: RateSchedule) -> Figure:
    """The rate, with the choices in the title; with several stages also resolution and batch."""
    words = (
        schedule.name,
        f"{rate_words(schedule)}; {batch_words(schedule)}",
        f"warm-up: {warmup_words(schedule)}; decay: {decay_words(schedule)}",
    )
    rate, *below = schedule_charts(schedule)
    rows: list[Row] = [(3.4, [rate]), *((1.7, [one]) for one in below)]
    return figure(rows, title="\n".join(words), dpi=_FINE)


# --------------------------------------------------------------------------------- of several runs


def draw_comparison(comparison: RunComparison) -> Figure:
    """Accuracy against epochs, and against real or simulated time, whichever the runs have."""
    charts = [one for one, _ in comparison_charts(comparison, costs=False)]
    return figure([(_HIGH, _of_one_scale(charts))])


def _of_one_scale(charts: Sequence[Chart]) -> list[Chart]:
    """The charts with a common y axis."""
    ends = [end for one in charts for end in (one.y.low, one.y.high)]
    y = linear_axis(charts[0].y.label, ends, from_zero=False)
    return [replace(one, y=y) for one in charts]


def write_sweep_figures(sweep: Sweep, folder: Path) -> list[Path]:
    """Write ``curves_KEY.png`` and ``accuracy_KEY.png`` for each key with several values.

    Returns:
        The written files; none before a run was evaluated.

    Raises:
        FileError: A file cannot be written.
    """
    written = []
    for key in (one for one in varying(sweep) if curves(sweep, one.key)):
        make_folder(folder)
        for name, draw in (("curves", draw_curves), ("accuracy", draw_against)):
            written.append(folder / f"{name}_{key.key}.png")
            write_whole(written[-1], file_bytes(draw(sweep, key)))
    return written


def draw_curves(sweep: Sweep, key: SweptKey) -> Figure:
    """Accuracy epoch by epoch: a panel for each setting of the other keys."""
    panels, charts = curves(sweep, key.key), _of_one_scale(epochs_charts(sweep, key))
    if len(panels) > 1:
        charts = [replace(one, title=of.title) for one, of in zip(charts, panels, strict=False)]
    columns = 2 if len(charts) == 4 else min(3, len(charts))
    every: list[Chart | None] = [*charts, *[None] * (-len(charts) % columns)]
    rows: list[Row] = [(_HIGH, every[at : at + columns]) for at in range(0, len(every), columns)]
    left_out = max(0, len(panels) - MAX_PANELS) + max(panel.left_out for panel in panels)
    return figure(rows, below=_seeds_words(sweep, left_out))


def draw_against(sweep: Sweep, key: SweptKey) -> Figure:
    """Last accuracy against a key's values: a line for each setting of the other keys."""
    left_out = against(sweep, key.key).left_out
    return figure([(_HIGH, [against_chart(sweep, key)])], below=_seeds_words(sweep, left_out))


def _seeds_words(sweep: Sweep, left_out: int) -> str:
    words = f"mean of {counted(len(sweep.seeds), 'seed')}, ± one standard error"
    words = words if len(sweep.seeds) > 1 else f"seed {sweep.seeds[0]}"
    return words + (f"; {left_out} more in the table" if left_out else "")
