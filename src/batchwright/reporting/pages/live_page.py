"""The parts of a run's page, while it goes on and afterwards, each with a name of its own.

A part changes only if its content has changed, so that a page can be updated part by part. Many
parts are drawn by the same functions as those of a finished run's report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from batchwright.records import EpochRecord, Estimate, Plan, Profile, RateSchedule, RunSummary
from batchwright.records.lines.run_lines import EpochLine
from batchwright.records.text.formatting import between, counted, duration, number, percent
from batchwright.reporting.charts.chart import heights
from batchwright.reporting.charts.stages import changes, planned_chart, rate_chart, speed_chart
from batchwright.reporting.charts.workers import now_chart
from batchwright.reporting.data.live_run import (
    EpochNow,
    RunLines,
    WorkerNow,
    epoch_now,
    forecast_so_far,
    forecast_words,
    rounds_of,
    summary_so_far,
    workers_now,
)
from batchwright.reporting.data.outline import outlined
from batchwright.reporting.data.plan_words import batches_words, decided_words, range_words
from batchwright.reporting.data.reading import (
    SIMULATED,
    accuracy,
    last_evaluated,
    overall,
    pace_words,
    simulated_word,
)
from batchwright.reporting.data.spending import Spending, spending
from batchwright.reporting.data.worker_curves import spread
from batchwright.reporting.pages import markup
from batchwright.reporting.pages.page import (
    accuracy_part,
    environment_part,
    job_text,
    plan_part,
    predicted_part,
    time_part,
)
from batchwright.reporting.pages.page_rounds import newest_rounds, rounds_part
from batchwright.reporting.pages.page_workers import workers_charts

CURRENCY = "in the price's currency"

_MAX_NOTES = 20
_MAX_ROWS = 100  # of a table
_MAX_BARS = 16  # workers of a chart
_MAX_ROUNDS = 2000  # most rounds of a finished run for which all are drawn


@dataclass(frozen=True)
class RunStory:
    """Everything that a run's page shows.

    Attributes:
        name: The run's name.
        plan: The plan that the run follows now.
        profile: The plan's profile, if known.
        schedule: The rate over the epochs, of the plan's outline.
        lines: The run's lines so far.
        summary: The run's summary, if it has finished.
        ended: Whether the run has ended.
        outline: The plan as far as it is drawn.
        so_far: The summary, or one made from the lines so far.
        now: The epoch in progress, if there is one.
        forecast: The line with the forecast of a running training's end, if there is one.
    """

    name: str
    plan: Plan
    profile: Profile | None
    schedule: RateSchedule
    lines: RunLines
    summary: RunSummary | None = None
    ended: bool = False
    outline: Plan = field(init=False)
    so_far: RunSummary = field(init=False)
    now: EpochNow | None = field(init=False)
    forecast: EpochLine | None = field(init=False)

    def __post_init__(self) -> None:
        summary, outline = self.summary, outlined(self.plan)
        if summary is None:
            summary = summary_so_far(self.name, outline, self.profile, self.lines)
        elif (drawn := outlined(summary.plan)) is not summary.plan:
            summary = summary.model_copy(update={"plan": drawn})
        going = None if self.ended else epoch_now(outline, self.lines)
        object.__setattr__(self, "outline", outline)
        object.__setattr__(self, "so_far", summary)
        object.__setattr__(self, "now", going)
        ahead = None if self.ended else forecast_so_far(outline, self.lines)
        object.__setattr__(self, "forecast", ahead)

    @property
    def spending(self) -> Spending:
        """Time and cost of the run."""
        stride = 1 if self.summary else self.lines.stride
        likely = self.forecast.likely_epochs if self.forecast else None
        return spending(self.so_far, self.now, stride, likely)


@dataclass(frozen=True)
class Part:
    """A section of the page.

    Attributes:
        name: Name in addresses.
        title: Title of the section.
        content: Markup without the title.
        folded: Whether a click on the title is needed to show it.
    """

    name: str
    title: str
    content: str
    folded: bool = False


def run_parts(story: RunStory) -> list[Part]:
    """The sections of the page that are not empty."""
    summary, plan = story.so_far, story.outline
    clock = simulated_word(summary)
    workers = _workers_now(() if story.ended else workers_now(story.lines), clock)
    workers += workers_charts(summary)
    parts = [
        Part("predicted", "Predicted against measured", _predicted(story)),
        Part("accuracy", "Accuracy", _accuracy(story)),
        Part(
            "schedule",
            "Rate, resolution and batch",
            _over_time(plan, story.schedule, summary.epochs, story.lines),
        ),
        Part("workers", "Workers", workers),
        Part("rounds", "Rounds", _rounds(story)),
        Part("cost", "Cost", _spending(story.spending, clock, ended=story.ended)),
        Part("time", "Where the time went", _time(story)),
        Part("notes", "Notes", _notes(story.lines)),
    ]
    return [one for one in parts if one.content]


def plan_parts(plan: Plan, profile: Profile | None, *, folded: bool = False) -> list[Part]:
    """The sections that change with the plan alone; ``folded`` if they are of minor interest."""
    shown = RunSummary(
        run_folder="", plan=plan, profile=profile, epochs=(), setup_seconds=0.0, wall_seconds=0.0
    )
    return [
        Part("plan", "The plan", plan_part(plan, profile), folded),
        Part("job", "The job", job_text(plan.job), folded),
        Part("environment", "Data, network and environment", environment_part(shown), folded),
    ]


def tiles(story: RunStory, left: float | None = None) -> list[tuple[str, str, str]]:
    """The main figures of a run, as (name, value, details).

    ``left`` are the real seconds until its end, if they are known.
    """
    summary, plan = story.so_far, story.plan
    money, best = story.spending, summary.best_epoch
    done = f"{len(summary.epochs):,} of {plan.epochs:,}"
    if story.lines.stride > 1 and summary.epochs and story.summary is None:
        done = f"{summary.epochs[-1].epoch + 1:,} of {plan.epochs:,}"
    now = story.now
    if now is not None:
        more = f"in epoch {now.epoch + 1:,}: {now.unit} {now.step:,} of {now.steps:,}"
    elif story.ended:
        more = "no more to come" if summary.ended else "the rest was not trained"
        more = f"{counted(summary.resumed, 'resume')}" if summary.resumed else more
    else:
        more = "between two epochs" if summary.epochs else "no step reported yet"
    last = last_evaluated(summary)
    reached = f"best {accuracy(best)}" if best else plan.data.split
    if ahead := forecast_words(story.forecast):
        reached = f"{ahead}, {reached}"
    clock = " simulated" if summary.simulated else ""
    until = [f"{duration(money.so_far)}{clock}{'' if story.ended else ' so far'}"]
    if left is not None and not story.ended:
        until.append(f"about {duration(left)} to go")
    if story.summary is not None and summary.wall_seconds > money.so_far and not summary.simulated:
        until.append(f"{duration(summary.wall_seconds)} with set-up")  # as its report says
    spent = [f"{number(money.cost(money.so_far))}{'' if story.ended else ' so far'}"]
    if money.expected is not None and not story.ended:
        spent.append(f"{number(money.cost(money.expected))} expected")
    if money.planned is not None:
        spent.append(f"{number(money.cost(money.planned.value))} planned")
    return [
        ("Epochs done", done, more),
        (
            "Held-out accuracy",
            "not evaluated yet" if last is None or last.top1 is None else percent(last.top1),
            reached,
        ),
        ("Epochs against the prediction", *pace_words(summary)),
        ("Time", until[0], ", ".join(until[1:]) or f"{plan.epochs:,} epochs planned"),
        (
            f"Cost, {CURRENCY}" if money.priced else "Worker-hours",
            spent[0],
            ", ".join(spent[1:]) or "nothing was predicted",
        ),
        (
            "Decided",
            decided_words(plan),
            f"{counted(plan.workers, 'worker')}, local batch {batches_words(plan)}",
        ),
    ]


def happened(story: RunStory) -> str:
    """The newest event of a run in a sentence, for screen readers."""
    summary = story.so_far
    if not summary.epochs:
        return "No epoch is finished yet."
    last = summary.epochs[-1]
    words = f"Epoch {last.epoch + 1} of {story.plan.epochs} finished"
    if last.top1 is not None:
        words += f", held-out accuracy {percent(last.top1)}"
        if ahead := forecast_words(story.forecast, brief=True):
            words += f", {ahead}"
    return f"{words}."


# --------------------------------------------------------------------------------------- sections


def _predicted(story: RunStory) -> str:
    note = f'<p class="note">{markup.safe(SIMULATED)}</p>' if story.so_far.simulated else ""
    if not story.so_far.epochs and (story.now is None or not story.now.step):
        words = overall(story.so_far)
        done = "No epoch was finished." if story.ended else "The first one is not finished yet."
        if words.predicted is None:
            return f"{note}<p>The plan holds no prediction. {done}</p>"
        value = markup.safe(number(words.predicted.value))
        return f"{note}<p>Predicted: {value} s an epoch. {done}</p>"
    return note + predicted_part(story.so_far, story.now, running=not story.ended)


def _accuracy(story: RunStory) -> str:
    if not story.so_far.epochs and not story.ended:
        return "<p>There is no finished epoch yet: it will show here when it is evaluated.</p>"
    return accuracy_part(story.so_far, story.forecast)


def _time(story: RunStory) -> str:
    epochs = story.so_far.epochs
    if not epochs:
        return ""
    note, done = "", epochs[-1].epoch + 1
    if story.summary is None and len(epochs) < done:
        note = f"<p>In {len(epochs):,} of {done:,} epochs, evenly spaced.</p>"
    return note + time_part(story.so_far, by_epoch=False)


def _notes(lines: RunLines) -> str:
    notes = lines.notes[-_MAX_NOTES:]
    items = "".join(f"<li>{markup.prose(line.text)}</li>" for line in notes)
    return f"<ul>{items}</ul>" if items else ""


def _rounds(story: RunStory) -> str:
    """All rounds of a finished run; the newest rounds of a running or very long one."""
    if story.plan.server is None:
        return ""
    if story.summary is not None and 0 < len(story.summary.rounds) <= _MAX_ROUNDS:
        return rounds_part(story.summary)
    drawn = newest_rounds(story.outline, rounds_of(story.outline, story.lines.rounds))
    return drawn or ("" if story.ended else "<p>No round has ended yet.</p>")


def _spending(spent: Spending, clock: str = "", *, ended: bool = False) -> str:
    """Time and cost, planned, so far and expected; ``clock`` is ``simulated `` or empty."""
    money = f"cost, {CURRENCY}" if spent.priced else "worker-hours (no price was given)"
    planned = spent.planned
    cost = planned and planned.mapped(spent.cost)
    expected = spent.expected
    rows = [
        [
            f"{clock}time",
            "-" if planned is None else _times(planned),
            duration(spent.so_far),
            markup.or_dash(expected, duration),
        ],
        [
            money,
            "-" if cost is None else between(cost),
            number(spent.cost(spent.so_far)),
            markup.or_dash(None if expected is None else spent.cost(expected)),
        ],
    ]
    head = ["of the training", "planned (95 %)", "so far", "expected at the end"]
    if ended:  # there is no expectation beyond the present
        head, rows = [*head[:2], "in all"], [row[:3] for row in rows]
    return markup.table("Time and cost of the training", head, rows, cards=True)


def _times(estimate: Estimate) -> str:
    low, high = duration(estimate.low), duration(estimate.high)
    return f"{duration(estimate.value)} ({low} to {high})"


def _over_time(
    plan: Plan, schedule: RateSchedule, epochs: Sequence[EpochRecord], lines: RunLines
) -> str:
    """Learning rate, resolution and batches over the epochs, planned and trained.

    Constant quantities are given in words instead of a chart.
    """
    charts, words = [], []
    rate = rate_chart(plan, schedule, epochs, lines)
    if changes(heights(rate.series)):
        charts.append(rate)
    else:
        words.append(f"learning rate {plan.stages[0].learning_rate:.4g}")
    for title, label, name, unit in (
        ("Global batch", "samples per step", "global_batch_size", "samples per step"),
        ("Resolution", "pixels", "resolution", "px"),
    ):
        planned = [float(getattr(stage, name)) for stage in plan.stages]
        trained = [(one.epoch, float(getattr(one, name))) for one in epochs]
        if changes([*planned, *(value for _, value in trained)]):
            charts.append(planned_chart(plan, title, label, planned, trained, unit))
        else:
            words.append(f"{title.lower()} {planned[0]:,.0f} {unit}")
    table = _epochs_table(epochs)
    drawn = [markup.figure(one, table) for one in charts]
    if speed := speed_chart(plan, epochs, lines):
        timed = [(e.epoch, v) for e in epochs if (v := e.samples_per_second) is not None]
        rows = [[str(epoch + 1), number(v)] for epoch, v in spread(timed, _MAX_ROWS)]
        speeds = markup.table("Images per second", ["epoch", "images / s"], rows)
        drawn.append(markup.figure(speed, speeds))
    same = f"<p>Throughout: {markup.safe(', '.join(words))}.</p>" if words else ""
    return same + markup.pairs(drawn)


def _epochs_table(epochs: Sequence[EpochRecord]) -> str:
    return markup.table(
        f"Rate, batches and resolution by epoch{markup.left_out(epochs, _MAX_ROWS)}",
        ["epoch", "learning rate at its end", "global batch", "local batch", "resolution"],
        [
            [
                str(one.epoch + 1),
                f"{one.learning_rate:.4g}",
                f"{one.global_batch_size:,}",
                range_words(w.local_batch_size for w in one.workers) if one.workers else "-",
                f"{one.resolution} px",
            ]
            for one in spread(epochs, _MAX_ROWS)
        ],
    )


def _workers_now(workers: Sequence[WorkerNow], clock: str = "") -> str:
    """The workers by the newest line: a bar of each one's step, and a table; empty without any."""
    if not workers:
        return ""
    table = markup.table(
        f"Workers now, {clock}seconds per step",
        ["worker", "place", "local batch", "share", "compute (s)", "wait (s)"],
        [
            [
                str(one.rank),
                one.place or "-",
                f"{one.local_batch_size:,}",
                percent(one.share),
                markup.or_dash(one.compute_seconds),
                markup.or_dash(one.wait_seconds),
            ]
            for one in _shown(workers, _MAX_ROWS)
        ],
        cards=True,
    )
    if all(one.compute_seconds is None for one in workers):
        return table
    chart = markup.figure(now_chart(_shown(workers, _MAX_BARS), clock), table)
    return markup.pair(chart, f"<div>{table}</div>")


def _shown(workers: Sequence[WorkerNow], most: int) -> list[WorkerNow]:
    """At most ``most`` workers, evenly spaced from the least to the most computing."""
    ordered = sorted(workers, key=lambda one: (one.compute_seconds or 0.0, one.rank))
    return sorted(spread(ordered, most), key=lambda one: one.rank)
