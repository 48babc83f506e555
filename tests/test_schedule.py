"""The learning rate over the epochs: the record, its words, table and figure, and the verb."""

from __future__ import annotations

import io
import json
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

import batchwright as bw
from batchwright.algorithms.learning_rate import fitted_warmup, rate_factor
from batchwright.errors import BatchwrightError, FileError
from batchwright.planning.planner import plan_without_profile
from batchwright.planning.schedule import POINTS, rate_schedule
from batchwright.records import Job, LearningRateRule, Plan, RateSchedule
from batchwright.records.documents import job_yaml, write_record
from batchwright.reporting.data.schedule_words import start_lines
from batchwright.reporting.render.figures import draw_schedule, write_schedule_figure
from batchwright.reporting.render.tables import EVENLY, schedule_table, shown_points
from batchwright.training.batches.sampler import step_sizes
from batchwright.workflows import run_training
from samples import (
    make_cyclic_plan,
    make_data,
    make_hybrid_plan,
    make_network,
    make_plan,
    make_profile,
    make_summary,
)

SAMPLES = 50_000


def plan_of(**job) -> Plan:
    settled = {"global_batch": 1024, "workers": 2, "epochs": 30}
    data = make_data(train_samples=SAMPLES)
    return plan_without_profile(Job(**{**settled, **job}), data, make_network())


def words(plan: Plan) -> str:
    return "\n".join(start_lines(rate_schedule(plan)))


# ------------------------------------------------------------------------------------- the record


@pytest.mark.parametrize("decay", ["cosine", "steps", "one-cycle", "none"])
@pytest.mark.parametrize("warmup", ["auto", 0, 7.5])
def test_every_point_has_the_rate_that_training_would_set(decay, warmup):
    plan = plan_of(decay=decay, warmup_epochs=warmup)
    points = rate_schedule(plan).points
    assert (points[0].epoch, points[-1].epoch) == (0, 30)
    assert POINTS <= len(points) <= POINTS + 16
    for one, following in zip(points, [*points[1:], None], strict=True):
        seen = one.epoch * SAMPLES
        if following is not None and following.epoch == one.epoch:  # just before a fall
            seen -= 1
        rule = plan.learning_rate
        factor = rate_factor(seen, rule=rule, samples_per_epoch=SAMPLES, epochs=30)
        assert one.learning_rate == pytest.approx(rule.peak * factor, rel=1e-4)
        assert one.samples == round(one.epoch * SAMPLES)


@pytest.mark.parametrize(
    ("batch", "warmup"), [(1024, 0.609), (1000, 0.5), (1000, 2), (333, 1.01), (49_999, 1.5)]
)
def test_the_steps_of_the_warmup_are_those_that_begin_before_its_end(batch, warmup):
    plan = plan_of(global_batch=batch, warmup_epochs=warmup)
    sizes = step_sizes(SAMPLES, batch, workers=2, least=2)
    begins, seen = [], 0
    for size in 3 * sizes:
        begins.append(seen)
        seen += size
    expected = sum(begin < round(warmup * SAMPLES, 6) for begin in begins)
    schedule = rate_schedule(plan)
    assert schedule.warmup_steps == expected
    assert schedule.rows[0].steps_per_epoch == len(sizes)
    assert schedule.points[-1].step == 30 * len(sizes)


def test_a_rate_that_falls_at_once_has_two_points_of_one_epoch():
    points = rate_schedule(plan_of(decay="steps", warmup_epochs=0)).points
    falls = [(a, b) for a, b in pairwise(points) if a.epoch == b.epoch]
    assert [round(after.epoch, 2) for _, after in falls] == [10, 20, 26.67]
    for before, after in falls:
        assert after.learning_rate == pytest.approx(before.learning_rate / 10)
        assert (before.what, after.what) == ("", "a tenth")


def test_a_warmup_of_a_moment_has_no_rates_below_its_beginning():
    plan = plan_of(warmup_epochs=1e-10)
    rule, rates = plan.learning_rate, [one.learning_rate for one in rate_schedule(plan).points]
    assert rates[0] == pytest.approx(rule.base)
    assert max(rates) == pytest.approx(rule.peak)
    assert min(rates) == rates[-1] >= 0


def test_rows_of_a_cycle_follow_each_other_and_the_warmup_goes_on_across_them():
    job = {"method": "cyclic", "resolutions": (16, 24, 32), "epochs": 14, "warmup_epochs": 10}
    schedule = rate_schedule(plan_of(**job))
    assert [row.start for row in schedule.rows[1:]] == [row.end for row in schedule.rows[:-1]]
    assert schedule.rows[-1].end == 14
    told = {one.epoch: one for one in schedule.points if one.what}
    assert "px" in told[2].what
    assert told[8].what == "stage 2, 16 px"
    assert told[8].learning_rate == pytest.approx(0.1 * (0.1 + (0.1 * 8**0.5 - 0.1) * 0.8))
    assert told[10].learning_rate == pytest.approx(0.1 * 0.1 * 8**0.5)


def test_a_row_that_changes_the_batch_alone_is_told_and_steps_follow_it():
    plan = plan_of(epochs=4)
    (stage,) = plan.stages
    rows = [
        stage.model_copy(update={"epochs": 2, "local_batch_sizes": sizes})
        for sizes in ((512, 512), (64, 64))
    ]
    schedule = rate_schedule(plan.model_copy(update={"stages": tuple(rows)}))
    assert [one.epoch for one in schedule.points if one.what == "another batch"] == [2]
    assert schedule.points[-1].step == 2 * 49 + 2 * 391


def test_workers_of_a_server_have_steps_of_their_own():
    schedule = rate_schedule(make_hybrid_plan())
    assert schedule.served
    assert schedule.warmup_steps is None
    assert all(one.step is None for one in schedule.points)
    assert {row.steps_per_epoch for row in schedule.rows} == {None}


def test_a_gain_is_bounded_by_the_batch_and_the_rate_without_it_is_shown():
    schedule = rate_schedule(plan_of(scaling="gain", decay="none"))
    assert {one.learning_rate for one in schedule.points} == {0.1}
    assert schedule.rows[0].most_gain == 8


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ({"global_batch": 64, "learning_rate": 0.1}, "global_batch=64 is below base_batch=128"),
        ({"global_batch": 64}, ""),  # the rate, too, is the plan's
        ({"global_batch": 64, "learning_rate": 0.1, "scaling": "none"}, ""),
        ({"global_batch": "auto", "learning_rate": 0.1, "base_batch": 6000}, ""),
        ({"global_batch": 128, "scaling": "gain"}, "nothing to gain"),
        ({}, ""),
    ],
)
def test_a_batch_that_was_asked_for_below_the_base_batch_is_doubted(job, said):
    doubts = rate_schedule(plan_of(**job)).doubts
    assert len(doubts) == bool(said)
    assert said in "".join(doubts)


@pytest.mark.parametrize(
    ("job", "doubted"),
    [
        ({"scaling": "none"}, True),
        ({"scaling": "none", "optimizer": "adamw"}, True),
        ({"scaling": "gain"}, True),
        ({"scaling": "none", "decay": "one-cycle"}, False),
        ({"scaling": "none", "warmup_epochs": 0}, False),
        ({"scaling": "none", "warmup_epochs": "auto"}, False),
        ({}, False),
    ],
)
def test_a_warmup_that_was_asked_for_and_raises_nothing_is_doubted(job, doubted):
    plan = plan_of(**({"warmup_epochs": 2} | job))
    doubts = rate_schedule(plan).doubts
    assert len(doubts) == doubted
    assert not doubted or "warmup_epochs=2 raises nothing" in doubts[0]
    (why,) = (one.why for one in plan.reasons if one.choice == "warm-up")
    stays = f"The warm-up raises nothing: the rate stays at {plan.learning_rate.peak:.4g}, as"
    assert (stays in why) == doubted


def test_a_warmup_over_all_epochs_leaves_nothing_to_decay_in():
    """The reason still told of half a cosine to 0."""
    for epochs, said in ((30, "The warm-up takes all epochs"), (29, "Half a cosine")):
        plan = plan_of(warmup_epochs=epochs)
        (why,) = (one.why for one in plan.reasons if one.choice == "decay")
        assert why.startswith(said)


def test_a_warmup_that_does_not_end_is_doubted_where_a_plan_was_written_by_hand():
    plan = plan_of()
    rule = plan.learning_rate.model_copy(update={"warmup_epochs": 40.0})
    schedule = rate_schedule(plan.model_copy(update={"learning_rate": rule}))
    assert "40 epochs does not end within the plan's 30" in schedule.doubts[0]
    assert max(one.learning_rate for one in schedule.points) < rule.peak


def test_the_record_survives_json():
    schedule = rate_schedule(make_cyclic_plan())
    assert RateSchedule.model_validate_json(schedule.model_dump_json()) == schedule


# ------------------------------------------------------------------------------ words and pictures


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ({"scaling": "linear"}, "learning rate: 0.8 per step = 0.1 x 1024 / 128 [published: Goyal"),
        ({}, "0.2828 per step = 0.1 x sqrt(1024 / 128) [published: Krizhevsky"),
        ({"scaling": "none"}, "0.1 per step, not scaled (batch 1024, base batch 128) [asked]"),
        ({"scaling": "gain"}, "0.1 per step, times a measured gain of 1 to 8 (1024 / 128)"),
        ({"scaling": "gain", "global_batch": 64}, "with nothing to gain (64 / 128)"),
        ({"micro_batch": 128}, "global batch 1024 = 2 workers x 128 x 4 accumulated [asked]"),
        ({"micro_batch": 100}, "= 2 workers x 512 in up to 6 micro-batches [asked]"),
        ({"workers": 3}, "global batch 1024 = 342 + 2 x 341 on the workers [asked]"),
        ({"workers": 1}, "global batch 1024 = 1 worker x 1024 [asked]"),
        ({}, "warm-up: 0.609 epochs (30 steps) from 0.1 to 0.2828 [published: McCord"),
        ({"warmup_epochs": 0}, "warm-up: none [asked]; decay: cosine [published: Loshchilov"),
        ({"decay": "one-cycle"}, "warm-up: 9 epochs (441 steps) from 0.01131 to 0.2828"),
        ({"method": "cyclic", "resolutions": (24, 32)}, "decay: by stages [published: Lu"),
    ],
)
def test_a_run_says_first_what_its_rate_is_made_of(job, said):
    told = words(plan_of(**job))
    assert said in told
    assert told.count("\n") == 1


def test_a_rate_that_is_not_by_the_rule_is_only_stated():
    rule = LearningRateRule(
        base=0.1, base_batch=128, scaling="linear", peak=0.3, warmup_epochs=0, decay="none"
    )
    told = words(make_plan(learning_rate=rule, reasons=()))
    assert "learning rate: 0.3 per step, where 0.1 is for 128 samples; global batch 96" in told
    assert "[" not in told


def test_workers_of_a_server_have_no_global_batch():
    told = words(make_hybrid_plan())
    assert "no global batch: workers step by themselves, 3 x 64 + 22 samples" in told


def test_training_says_it_before_it_starts(capsys):
    run_training._print_rate(plan_of(global_batch=64, learning_rate=0.1))
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["warning", "learning rate", "warm-up"]


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ({"workers": 1}, "one worker in one pass); micro_batch=512 would cut it into two, and so"),
        ({"workers": 1, "global_batch": 3}, "3 samples cannot be cut, so it takes a larger batch."),
        ({"workers": 1, "micro_batch": 512}, ""),
        ({"workers": 1, "ags": {"mode": "norm"}}, ""),
        ({"workers": 2}, ""),
    ],
)
def test_a_run_that_cannot_tell_its_noise_scale_says_so_and_how(job, said, capsys):
    run_training._print_rate(plan_of(**job))
    lines = [line for line in capsys.readouterr().err.splitlines() if "noise scale" in line]
    assert len(lines) == bool(said)
    assert said in "".join(lines)


def test_a_plan_says_with_its_noise_scale_that_training_will_not_measure_it():
    for workers, told in ((1, True), (2, False)):
        plan = bw.plan(make_profile(), ["global_batch=64", f"workers={workers}"])
        (why,) = (one.why for one in plan.reasons if one.choice == "gradient noise scale")
        assert ("Training will not measure the gradient noise scale" in why) == told


@pytest.mark.parametrize("plan", [plan_of(), make_cyclic_plan(), make_hybrid_plan()])
def test_the_table_has_what_happens_and_little_more(plan):
    schedule = rate_schedule(plan)
    shown = shown_points(schedule)
    happening = [one for one in schedule.points if one.what]
    assert all(one in shown for one in happening)
    assert len(shown) <= len(happening) + EVENLY
    assert [one.epoch for one in shown] == sorted({one.epoch for one in shown})
    console = Console(file=io.StringIO(), width=100)
    console.print(schedule_table(schedule))
    assert all(
        word in console.file.getvalue() for word in ("rate", "warm-up", "end", schedule.name)
    )


def test_the_figure_shows_the_points_and_of_several_rows_what_differs():
    schedule = rate_schedule(plan_of())
    (axes,) = draw_schedule(schedule).axes
    (line, *_) = axes.get_lines()
    assert list(line.get_ydata()) == [one.learning_rate for one in schedule.points]
    rate, side, batch = draw_schedule(rate_schedule(make_cyclic_plan())).axes
    assert rate.get_yscale() == "linear"  # 0.1 and 0.01
    assert [axes.get_title() for axes in (side, batch)] == ["Resolution", "Global batch"]
    assert draw_schedule(rate_schedule(make_hybrid_plan())).axes[2].get_title() == "Local batches"


@pytest.mark.parametrize("kind", [pytest.param("png", marks=pytest.mark.slow), "svg"])
def test_the_same_schedule_gives_the_same_figure(tmp_path, kind):
    schedule = rate_schedule(plan_of(scaling="gain"))
    once, again = (
        write_schedule_figure(schedule, tmp_path / f"{name}.{kind}").read_bytes() for name in "ab"
    )
    assert once == again


def test_a_figure_of_another_kind_is_refused(tmp_path):
    with pytest.raises(FileError, match=r"ends in one of \.png, \.pdf, \.svg"):
        write_schedule_figure(rate_schedule(plan_of()), tmp_path / "rate.gif")


# --------------------------------------------------------------------------------------- the verb


@pytest.fixture
def place(tmp_path, monkeypatch, cache):
    """A working folder with a plan, a run, a profile, a summary and a job in it."""
    monkeypatch.setenv("BATCHWRIGHT_CACHE", str(cache))
    (tmp_path / "run").mkdir()
    (tmp_path / "empty").mkdir()
    write_record(make_plan(), tmp_path / "plan.json")
    write_record(make_plan(), tmp_path / "run" / "plan.json")
    write_record(make_profile(), tmp_path / "profile.json")
    write_record(make_summary(), tmp_path / "summary.json")
    (tmp_path / "job.yaml").write_text(job_yaml(Job(global_batch=512, epochs=10)))
    (tmp_path / "other.json").write_text('{"format": "another/1"}')
    (tmp_path / "none.json").write_text("[1, 2")
    (tmp_path / "list.json").write_text("[1, 2]")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("source", ["plan.json", "run", "summary.json"])
def test_plans_and_runs_are_shown_as_they_are(place, source):
    assert bw.schedule(source) == rate_schedule(make_plan())


def test_a_profile_is_planned_first_and_takes_keys(place):
    schedule = bw.schedule("profile.json", overrides=["global_batch=512"], warmup_epochs="auto")
    assert schedule.scaled_to == 512
    assert schedule.rule.warmup_epochs == fitted_warmup(4, 30).epochs
    assert bw.schedule(make_profile(), global_batch=512, warmup_epochs="auto") == schedule


def test_a_job_needs_no_measuring(place):
    schedule = bw.schedule("job.yaml", scaling="linear")
    assert schedule.rule.peak == pytest.approx(0.4)
    assert (schedule.epochs, schedule.samples_per_epoch) == (10, 1437)
    assert bw.schedule(global_batch=512, epochs=10, scaling="linear") == schedule


def test_the_command_prints_a_table_a_figure_and_json(command, place):
    code, out, err = command("schedule", "plan.json", "--json", "--figure", "rate.svg")
    assert code == 0
    assert RateSchedule.model_validate_json(out) == rate_schedule(make_plan())
    assert "sqrt(96 / 128)" in err
    assert "figure: rate.svg" in err
    assert Path("rate.svg").read_text().startswith("<?xml")
    code, out, _ = command("schedule", "-", "--json", stdin=make_plan().model_dump_json())
    assert json.loads(out)["rule"]["peak"] == 0.0866


def test_the_command_warns_of_a_batch_below_the_base_batch(command, place):
    code, out, err = command("schedule", "global_batch=64", "learning_rate=0.1", "epochs=2")
    assert (code, out) == (0, "")
    assert "warning: global_batch=64 is below base_batch=128" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["epochs=3"], "global_batch=auto: the schedule of a job depends on its batch"),
        (["global_batch=512", "epochs=3", "warmup_epochs=4"], "warmup_epochs=4 is longer than"),
        (["global_batch=512", "learning_rate=0"], "learning_rate = '0'"),
        (["global_batch=512", "learning_rate=-1"], "learning_rate = '-1'"),
        (
            ["global_batch=128", "learning_rate=5e-324", "method=cyclic", "epochs=21"],
            "a stage's rate comes to 0, with a first one of 4.94066e-324: give",
        ),
        (["global_batch=5000"], "global_batch=5000 is larger than the 1437 training images"),
        (["global_batch=512", "method=dual-batch", "workers=4"], "nothing was measured"),
        (["plan.json", "warmup_epochs=3"], "plan again with it"),
        (["plan.json", "run"], "one thing at a time, not plan.json and run"),
        (["empty"], "empty holds no plan.json"),
        (["nowhere.json"], "there is no file nowhere.json"),
        (["other.json"], "neither a plan, a profile nor a summary: its format is 'another/1'"),
        (["-"], "standard input is empty, where a plan, a profile or a summary was expected"),
        (["none.json"], "none.json is not JSON, as records are; a job's file ends in .yaml"),
        (["list.json"], "neither a plan, a profile nor a summary: it has no format"),
        (["plan.json", "--figure", "rate.gif"], "a figure ends in one of .png, .pdf, .svg"),
        (["plan.json", "--figure", "nowhere/rate.png"], "cannot write nowhere/rate.png"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_has_no_schedule_is_refused_in_a_line(command, place, words, said):
    before = sorted(place.rglob("*"))
    code, out, err = command("schedule", *words)
    assert (code, out) == (2, "")
    assert err.count("error: ") == 1
    assert said in err.splitlines()[-1]
    assert sorted(place.rglob("*")) == before


def test_a_job_that_is_all_wrong_raises_our_own_error(place):
    with pytest.raises(BatchwrightError, match="unknown job key"):
        bw.schedule("plan.json", overrides=["epocs=3"])
