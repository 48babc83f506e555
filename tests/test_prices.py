"""Prices from a file, and workers that may be taken away: what a plan makes of them."""

from __future__ import annotations

from math import inf

import pytest

import batchwright as bw
from batchwright.algorithms.checkpointing import daly_interval, expected_seconds
from batchwright.cli.output import print_plan
from batchwright.errors import BatchwrightError, JobError, PlanError
from batchwright.planning.candidates.preemptions import (
    Losses,
    Offer,
    losses_of,
    spot_reason,
)
from batchwright.planning.planner import make_plan
from batchwright.records import Estimate, Goal, Job, WorkerKind
from batchwright.records.agent_rules import DEFAULTS, refusal
from batchwright.records.documents import change_job
from batchwright.records.text.formatting import between, duration
from batchwright.reporting.data.spending import spending
from batchwright.service.pages.planner import Answer
from batchwright.service.pages.planner_form import FilledForm
from batchwright.workflows import prices
from batchwright.workflows.exports.launchers import _time_limit
from batchwright.workflows.prepare_job import ready
from batchwright.workflows.prices import check_prices, job_here
from samples import make_kind_profile, make_network, make_profile, make_summary
from test_cluster_options import measured_together

KINDS = [{"kind": "a", "count": 2, "price": 1.0}]
LINK = {"latency": 2e-5, "bandwidth": 1e10}
CATALOGUE = """\
InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,SpotPrice,Region,AvailabilityZone
p4d.24xlarge,A100,8.0,96,1152,32.0,9.6,us-east-1,us-east-1a
p4d.24xlarge,A100,8.0,96,1152,40.0,8.0,eu-west-1,eu-west-1b
p4de.24xlarge,A100-80GB,8.0,96,1152,48.0,,us-east-1,us-east-1a
g4dn.xlarge,T4,1.0,4,16,0.5,,us-east-1,us-east-1a
m5.large,,,2,8,0.1,0.04,us-east-1,us-east-1a
"""


def write(folder, text, name="prices.csv"):
    path = folder / name
    path.write_text(text)
    return path


def plan(*profiles, **keys):
    return bw.plan(list(profiles), global_batch=256, resolutions=(128,), link=LINK, **keys)


def reason(found, choice):
    return next(one for one in found.reasons if one.choice == choice)


# ---------------------------------------------------------------------------------------- the file


def test_a_file_of_ones_own_gives_each_kind_and_spot_as_one_of_its_own(tmp_path):
    path = write(
        tmp_path,
        "kind,count,price,spot_price,preemptions_per_hour,like,speed\n"
        "a,8,2.0,0.5,0.01,,\n"
        "b,4,1.0,,,a,0.5\n",
    )
    found = plan(make_kind_profile("a"), goal={"kinds": str(path)}, workers=4)
    a = WorkerKind(kind="a", count=8, price=2.0)
    spot = {"like": "a", "price": 0.5, "spot": True, "preemptions_per_hour": 0.01}
    b = WorkerKind(kind="b", count=4, price=1.0, like="a", speed=0.5)
    assert found.job.goal.kinds == (a, WorkerKind(kind="a-spot", count=8, **spot), b)
    for other in (
        bw.plan([make_kind_profile("a")], [f"goal.kinds={path}"], link=LINK, workers=4),
        bw.plan([make_kind_profile("a")], **{"goal.kinds": str(path)}, link=LINK, workers=4),
    ):
        assert other.job.goal.kinds == found.job.goal.kinds


def test_of_a_catalogue_the_cheapest_place_counts_and_only_what_was_measured(tmp_path):
    path = write(tmp_path, CATALOGUE)
    profiles = [make_kind_profile("NVIDIA A100-SXM4"), make_kind_profile("t4", 0.2)]
    found = plan(
        *profiles, goal={"kinds": str(path), "preemptions_per_hour": 0.1, "max_workers": 16}
    )
    kinds = {one.kind: one for one in found.job.goal.kinds}
    assert list(kinds) == ["NVIDIA A100-SXM4", "NVIDIA A100-SXM4-spot", "t4"]
    first, spot, small = kinds.values()
    assert (first.price, spot.price, small.price) == (4.0, 1.0, 0.5)
    assert (first.count, spot.count, small.count) == (16, 16, 16)
    assert (spot.like, spot.spot, spot.preemptions_per_hour) == (first.kind, True, None)
    exact = plan(make_kind_profile("A100-80GB"), goal={"kinds": str(path)}, workers=4)
    assert [(one.price, one.count) for one in exact.job.goal.kinds] == [(6.0, 8)]
    fewer = plan(make_kind_profile("A100-80GB"), goal={"kinds": str(path), "max_workers": 4})
    assert [one.count for one in fewer.job.goal.kinds] == [4]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kind,count,price\na,2,1\nb,2,x\n", "line 3, column kind: 'b' was not measured"),
        ("kind,count,price\na,2,x\n", "line 2, column price: 'x' is no number"),
        ("kind,count,price\na,2,0\n", "line 2, column price: '0' is no positive number"),
        ("kind;count;price\na;2;1,5\n", "separated by semicolons"),
        ("kind,price,price\na,2,1\n", "column price comes twice"),
        ("kind,count,price\na,2,1e308\n", "column price: '1e308' is more than 1e+09"),
        ("kind,count,price\na,2,5e-324\n", "column price: '5e-324' is less than 1e-09"),
        ("kind,count,price,spot_price\na,2,1,5e-324\n", "spot_price: '5e-324' is less than 1e-09"),
        ("kind,count,price\na,2,inf\n", "column price: 'inf' is no positive number"),
        ("kind,count,price\na,2,\n", "line 2, column price: '' is no price of a worker"),
        ("kind,count,price\na,1.5,1\n", "line 2, column count: '1.5' is no number"),
        ("kind,price\na,1\n", "column count: '' says not how many there are"),
        (
            "kind,count,price\na,2,1\na,2,1\n",
            "column kind: 'a' is there already, by line 2",
        ),
        ("kind,count,price\n,2,1\n", "line 2, column kind: '' is no name"),
        ("kind,count,price,like\nx,2,1,y\n", "line 2, column like: 'y' was not measured"),
        ("kind,count,price\na,2,1,5\n", "line 2: more than the 3 columns"),
        ("kind,count,prize\na,2,1\n", "line 1: no column price"),
        ("kind,count,price,prize\na,2,1,\n", "line 1: column 'prize' is unknown"),
        ("kind,count,price\n", "holds no kinds of workers"),
        ("", "line 1: no column kind and price"),
        ("\nkind,count,price\na,2,1\n", "line 1 is empty"),
        ("kind,count,price\na,1_0,1\n", "column count: '1_0' is no number"),
        (f"kind,count,price\na,1{'0' * 400},1\n", "is more than 1e+09"),
        (f"kind,count,price,memory\na,1,1,1{'0' * 400}\n", "is more than 9.0"),
        ("kind,count,price,memory\na,1,1,9007199254740993\n", "column memory: '90071992547409"),
        (
            "kind,count,price,spot_price\na,2,3,1\na-spot,2,1,\n",
            "line 3, column kind: 'a-spot' is there already, by line 2",
        ),
        (
            "kind,count,price,spot_price,like\na-spot,2,1,,a\na,2,3,1,\n",
            "line 3, column spot_price: '1' makes a kind 'a-spot', which line 2 names",
        ),
        ("InstanceType,AcceleratorName,AcceleratorCount,Price\nx,a,1,?\n", "column Price: '?'"),
        ("InstanceType,AcceleratorName,AcceleratorCount,Price\nx,a,0,1\n", "AcceleratorCount: '0'"),
        ("InstanceType,AcceleratorName,AcceleratorCount,Price\nx,a,,1\n", "AcceleratorCount: ''"),
        (
            "InstanceType,AcceleratorName,AcceleratorCount,Price\nx,a,8,2e-9\n",
            "column Price: '2e-9' is no price of 8 of them",
        ),
        ("InstanceType,AcceleratorName,AcceleratorCount\nx,a,1\n", "line 1: no column Price"),
        (
            "InstanceType,AcceleratorName,AcceleratorCount,Price\nx,z,1,1\n",
            "no price for 'a', only",
        ),
    ],
)
def test_a_bad_row_is_named_by_its_line_and_column(tmp_path, text, words):
    path = write(tmp_path, text)
    with pytest.raises(BatchwrightError) as told:
        plan(make_kind_profile("a"), goal={"kinds": str(path)})
    assert words in str(told.value)
    assert str(path) in str(told.value)
    assert told.value.exit_code == 2


def test_a_file_that_would_take_the_memory_is_not_read(tmp_path, monkeypatch):
    path = write(tmp_path, "kind,count,price\na,2,1\n")
    monkeypatch.setattr(prices, "MAX_BYTES", 10)
    with pytest.raises(BatchwrightError, match="keep the rows"):
        plan(make_kind_profile("a"), goal={"kinds": str(path)})


def test_files_that_are_none_are_named(tmp_path):
    for path, words in (
        (tmp_path / "none.csv", "there is no file"),
        (tmp_path / "folder.csv", "Is a directory"),
        (tmp_path / "bytes.csv", "not text in UTF-8"),
    ):
        if path.stem == "folder":
            path.mkdir()
        if path.stem == "bytes":
            path.write_bytes(b"\xff\xfe")
        with pytest.raises(BatchwrightError, match=words):
            plan(make_kind_profile("a"), goal={"kinds": str(path)})


def test_a_run_takes_a_bound_above_the_workers_that_are_here_as_no_bound():
    profile = make_profile()
    asked = Job(goal={"max_workers": 8})
    assert job_here(asked, profile).goal.max_workers == 2
    for job in (Job(goal={"max_workers": 1}), asked.model_copy(update={"launch": "virtual"})):
        assert job_here(job, profile) == job


def test_a_run_prices_the_workers_that_are_here_and_no_others(tmp_path):
    """Two hosts' kinds, one of them of spot workers; hosts apart by speed cost what the rest do."""
    profile, _ = measured_together((1.0, 2.0, 3.0), names=("a", "a", "b-spot"))
    path = write(
        tmp_path,
        "kind,price,spot_price,preemptions_per_hour,count\n"
        "b,2.0,0.5,0.01,\na,3.0,1.0,0.02,100\nc,1.0,,,\n",
    )
    goal = {"kinds": str(path), "objective": "cost"}
    job = change_job(profile.job, {"goal": goal})
    assert (job.goal.prices, job.goal.kinds) == (str(path), ())
    check_prices(job)
    kinds = {one.kind: one for one in job_here(job, profile).goal.kinds}
    assert list(kinds) == ["a", "a (node2)", "b-spot"]
    assert [one.price for one in kinds.values()] == [3.0, 3.0, 0.5]
    assert [one.count for one in kinds.values()] == [1, 1, 1]
    assert [one.spot for one in kinds.values()] == [False, False, True]
    assert {one.like for one in kinds.values()} == {""}
    found = bw.plan(profile, global_batch=90, epochs=3, goal={**goal, "kinds": [*kinds.values()]})
    assert found.workers == 3
    assert found.chosen.cost is not None
    catalogue = write(tmp_path, CATALOGUE, "catalogue.csv")
    one = make_kind_profile("NVIDIA A100-SXM4-spot")
    job = change_job(one.job, overrides=[f"goal.kinds={catalogue}"])
    (spot,) = job_here(job, one).goal.kinds
    assert (spot.price, spot.spot) == (1.0, True)


def test_a_run_says_what_has_no_price_and_reads_the_file_before_it_measures(tmp_path):
    path = write(tmp_path, "kind,price\nb,2.0\n")
    profile = make_kind_profile("a")
    job = change_job(profile.job, overrides=[f"goal.kinds={path}"])
    check_prices(job)
    with pytest.raises(PlanError, match=r"has no price for 'a', which is here: add a row"):
        job_here(job, profile)
    write(tmp_path, "kind,price\nb,x\n")
    with pytest.raises(BatchwrightError, match="line 2, column price: 'x' is no number"):
        check_prices(job)


def test_a_run_finds_its_prices_from_another_folder(tmp_path, monkeypatch):
    path = write(tmp_path, "kind,price\na,2.0\n")
    monkeypatch.chdir(tmp_path)
    job = change_job(Job(device="cpu", workers=1), overrides=["goal.kinds=prices.csv"])
    kept = ready(job)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert kept.goal.prices == str(path)
    assert ready(kept) == kept
    with pytest.raises(BatchwrightError, match=r"there is no file prices\.csv"):
        ready(job)


def test_a_sweep_that_measures_nothing_refuses_prices_of_kinds(tmp_path):
    path = write(tmp_path, "kind,price\na,2.0\n")
    how = {"seeds": 1, "out": tmp_path / "sweep", "global_batch": 64}
    with pytest.raises(PlanError, match=r"where the batch is given none is made: give goal\.price"):
        bw.sweep(Job(device="cpu"), {"epochs": [1]}, goal={"kinds": str(path)}, **how)
    assert not (tmp_path / "sweep").exists()


def test_the_last_that_names_kinds_counts():
    job = change_job(Job(), overrides=["goal.kinds=a.csv"])
    assert change_job(job, {"goal.kinds": KINDS}).goal.prices is None
    assert change_job(job, overrides=["goal.kinds=null"]).goal == Goal()
    other = change_job(change_job(Job(), {"goal": {"kinds": KINDS}}), {"goal.prices": "b.csv"})
    assert (other.goal.kinds, other.goal.prices) == ((), "b.csv")
    assert change_job(Job(), job.model_dump()) == job
    with pytest.raises(JobError, match="both name kinds"):
        Job(goal={"kinds": KINDS, "prices": "a.csv"})


def test_who_may_read_no_files_is_told_to_give_the_kinds():
    """A service plans for others, and an agent trains for them."""
    job = change_job(Job(), overrides=["goal.kinds=/etc/prices.csv"])
    with pytest.raises(PlanError, match="give the kinds themselves"):
        make_plan([make_kind_profile("a")], job)
    assert "an agent reads no file of prices" in refusal(DEFAULTS, job)


# ------------------------------------------------------------------------------------- preemptions


def test_only_those_that_may_be_taken_away_are():
    kinds = (
        WorkerKind(kind="a", count=1),
        WorkerKind(kind="b", count=1, spot=True),
        WorkerKind(kind="c", count=1, spot=True, preemptions_per_hour=0.5),
    )
    goal = Goal(kinds=kinds, preemptions_per_hour=0.1)
    assert [goal.preemptions_of(name) for name in "abcd"] == [0.0, 0.1, 0.5, 0.0]
    assert Goal(preemptions_per_hour=0.1).preemptions_of("any") == 0.1
    assert Goal().preemptions_of("any") == 0.0


@pytest.mark.slow
def test_a_plan_counts_what_is_lost_and_chooses_how_often_to_write_checkpoints():
    keys = {"workers": 8, "epochs": 20}
    plain = plan(make_kind_profile("a"), goal={"max_workers": 8}, **keys)
    goal = {"max_workers": 8, "preemptions_per_hour": 0.25, "checkpoint_cost": 5}
    found = plan(make_kind_profile("a"), goal=goal, **keys)
    work, mean = plain.chosen.train_seconds.value, 3600 / 0.25 / 8
    best = daly_interval(5, mean)
    assert found.job.checkpoint_seconds == pytest.approx(best, rel=0.01)
    expected = expected_seconds(work, best, 5, 30, mean)
    assert found.chosen.train_seconds.value == pytest.approx(expected, rel=0.01)
    assert found.chosen.train_seconds.value > 1.05 * work
    told = reason(found, "checkpoint interval")
    assert told.source == "published"
    assert "Daly 2006" in told.reference
    assert [one.value.partition(" ")[0] for one in told.alternatives] == ["Young's", "1"]
    assert reason(found, "lost work").value.endswith("%)")
    assert plain.job.checkpoint_seconds == "auto"
    assert plain.job.seconds_between_checkpoints == 60.0
    asked = plan(make_kind_profile("a"), goal=goal, checkpoint_seconds=600, **keys)
    assert asked.job.checkpoint_seconds == 600
    assert reason(asked, "checkpoint interval").source == "asked"
    assert asked.chosen.train_seconds.value > found.chosen.train_seconds.value
    (simulated,) = bw.simulate(found, repeats=200, step_spread=0, speed_spread=0).clusters
    assert simulated.preemptions > 0
    assert simulated.checkpoint_seconds == found.job.checkpoint_seconds


def spot_goal(rate, spot=0.5, **changes):
    kinds = [
        {"kind": "a", "count": 8, "price": 1.0},
        {"kind": "a-spot", "count": 8, "price": spot, "like": "a", "spot": True},
    ]
    return {"kinds": kinds, "preemptions_per_hour": rate, "objective": "cost"} | changes


def test_the_cheaper_of_spot_and_on_demand_is_taken_and_said_with_its_interval():
    keys = {"workers": 8, "epochs": 20}
    rare = plan(make_kind_profile("a"), goal=spot_goal(0.02), **keys)
    often = plan(make_kind_profile("a"), goal=spot_goal(20.0), **keys)
    assert [one.kinds[0].kind for one in (rare, often)] == ["a-spot", "a"]
    told = reason(rare, "spot or on demand")
    assert told.value.startswith("spot, by 4")
    assert "spot saves" in told.why
    assert "preemptions of a worker an hour" in told.why
    assert told.alternatives[0].value == "8 a"
    assert reason(often, "spot or on demand").value.startswith("on demand, by ")
    assert "spot or on demand" in rare.explain()
    quick = plan(make_kind_profile("a"), goal=spot_goal(20.0, objective="time"), **keys)
    assert quick.kinds[0].kind == "a"
    near = plan(make_kind_profile("a"), goal=spot_goal(1.0, spot=0.75), **keys)
    assert reason(near, "spot or on demand")


def test_spot_breaks_even_at_the_rate_that_is_told():
    def offer(rate, price, name):
        return Offer(name, price, Losses(3600 / rate / 4 if rate else inf, 2.0, 30.0))

    told = spot_reason(offer(0.5, 2.0, "s"), offer(0.0, 4.0, "d"), 36_000.0, 4)
    limit = float(told.why.rpartition("up to ")[2].partition(" ")[0])
    assert limit > 0.5
    for factor, cheaper in ((0.9, True), (1.1, False)):
        at = offer(limit * factor, 2.0, "s")
        assert (at.cost(36_000.0).value < 40.0) is cheaper
    never = spot_reason(offer(0.5, 5.0, "s"), offer(0.0, 4.0, "d"), 36_000.0, 4)
    assert "not cheaper even if no worker is taken away" in never.why
    assert never.value.startswith("on demand")


def test_checkpoints_further_apart_than_losses_do_not_make_a_short_training_endless():
    """It takes several times as long; one of so much work would never end."""
    rare = Losses(mean=1000.0, cost=1.0, restart=60.0, asked=1e9)
    assert 3.5 < rare.seconds(2100.0) / 2100 < 4
    assert not rare.endless(2100.0)
    assert rare.endless(10_000.0)
    profile = make_kind_profile("a")
    keys = {"workers": 8, "epochs": 1, "checkpoint_seconds": 86_400.0}
    work = plan(profile, goal={"max_workers": 8}, **keys).chosen.train_seconds.value
    goal = {"max_workers": 8, "preemptions_per_hour": 2.1 * 3600 / 8 / work, "restart_seconds": 0}
    found = plan(profile, goal=goal, **keys)
    assert 3 < found.chosen.train_seconds.value / work < 4


def test_kinds_with_a_price_are_compared_by_worker_hours_with_those_without():
    kinds = [{"kind": "a", "count": 8, "price": 500.0}, {"kind": "b", "count": 8, "like": "a"}]
    found = plan(make_kind_profile("a"), goal={"kinds": kinds}, epochs=2)
    edge = {(one.kinds[0].kind, one.kinds[0].count) for one in found.considered if one.frontier}
    assert edge == {(kind, count) for kind in "ab" for count in (1, 2, 4, 8)}
    told = {one.value: one.loss for one in reason(found, "workers").alternatives}
    for count in (1, 2, 4):
        priced, unpriced = (told[f"{count} {kind}, global batch 256"] for kind in "ab")
        assert priced.replace("cost", "worker-hours") == unpriced


def test_what_never_ends_is_refused_and_losses_have_bounds():
    goal = {"max_workers": 8, "preemptions_per_hour": 1000.0}
    advised = "loses workers so often.*: plan for workers that are not spot"
    with pytest.raises(PlanError, match=f"{advised}.*, or fewer workers$"):
        plan(make_kind_profile("a"), goal=goal, workers=8)
    with pytest.raises(PlanError, match=rf"{advised}.*\(goal.restart_seconds\)$"):
        plan(make_kind_profile("a"), goal=goal | {"preemptions_per_hour": 8000.0}, workers=1)
    losses = losses_of(Job(), make_network(), 0.0)
    assert losses.seconds(100.0) == 100.0
    assert losses.spread(100.0) == (100.0, 100.0)
    assert losses.reasons(Estimate(value=1, low=1, high=1)) == ()
    some = losses_of(Job(), make_network(), 2.0)
    low, high = some.spread(36_000.0)
    assert 36_000.0 <= low < some.seconds(36_000.0) < high
    low, high = some.spread(5.0)  # of a thousand such trainings a few lose a worker
    assert 5.0 <= low < some.seconds(5.0) <= high
    assert some.work(some.seconds(36_000.0)) == pytest.approx(36_000.0)
    averaging = losses_of(Job(average_weights="on"), make_network(), 2.0)
    assert averaging.cost - some.cost == pytest.approx(make_network().trained_bytes / 200e6)
    adamw = losses_of(Job(optimizer="adamw"), make_network(), 2.0)
    assert adamw.cost - some.cost == pytest.approx(make_network().trained_bytes / 200e6)
    served = losses_of(Job(method="dual-batch", optimizer="adamw"), make_network(), 2.0)
    assert served.cost == pytest.approx(4 * make_network().parameters / 200e6)
    many = losses_of(Job(), make_network(), 50.0).spread(360_000.0)
    assert many[0] < many[1]


def test_methods_of_several_rows_count_lost_work_too():
    keys = {"epochs": 21, "method": "cyclic", "workers": 1, "global_batch": 64}
    profile = make_kind_profile("a", sides=(96, 128))
    goal = {"preemptions_per_hour": 1.0}
    found = bw.plan(profile, goal=goal, **keys)
    assert reason(found, "lost work")
    assert found.job.checkpoint_seconds != "auto"
    slower, quicker = (
        float(reason(one, "training time").value.split()[0].replace(",", ""))
        for one in (found, bw.plan(profile, **keys))
    )
    assert slower > quicker
    assert found.train_seconds.value == pytest.approx(slower, rel=0.01)


@pytest.mark.parametrize("method", ["plain", "cyclic"])
def test_the_time_of_a_whole_training_is_the_same_wherever_it_is_told(method, capsys):
    """With evaluations and lost work, for plans of one row and of several."""
    keys = {"epochs": 21, "method": method, "workers": 1, "global_batch": 64}
    profile = make_kind_profile("a", sides=(96, 128))
    found = bw.plan(profile, goal={"preemptions_per_hour": 1.0}, **keys)
    whole, steps = found.train_seconds, found.seconds_of_steps
    assert whole.value > 1.02 * steps.value
    assert reason(found, "training time").value.startswith(between(whole, " s"))
    assert spending(make_summary(plan=found, epochs=())).planned == whole
    told = {name: value for name, value, _ in Answer(FilledForm({}), found, profile).tiles}
    assert told["The training"] == duration(whole.value)
    print_plan(found, explain=False)
    assert f", {duration(whole.value)} in all" in capsys.readouterr().err
    without = found.model_copy(update={"train_seconds": None})
    limits = [_time_limit(one) for one in (without, found)]
    assert limits[0] < limits[1]
    bare = bw.plan(profile, **keys)
    times = {"speed_spread": 0, "step_spread": 0}
    (simulated,) = bw.simulate(bare, **times).clusters
    assert simulated.seconds.value == pytest.approx(bare.train_seconds.value, rel=0.05)
    assert simulated.shares.evaluation > 0


def test_a_profile_of_one_machine_is_priced_as_before():
    found = bw.plan(make_profile(), goal={"price": 1.0})
    assert not [one for one in found.reasons if one.choice in ("lost work", "spot or on demand")]
