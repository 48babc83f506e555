"""Which optimizer `auto` comes to, why, and what its updates take."""

from __future__ import annotations

import pytest
import torch

from batchwright.distributed.group import Group
from batchwright.errors import PlanError
from batchwright.planning.candidates.optimizer import (
    Compared,
    chosen_optimizer,
    extra_seconds,
    optimizer_reason,
)
from batchwright.planning.merging import merge_profiles
from batchwright.planning.planner import make_plan, plan_without_profile
from batchwright.probing.bench import Bench
from batchwright.probing.measure import update_time
from batchwright.probing.measure.update_time import update_times
from batchwright.records import Job, Profile, UpdateTime
from batchwright.records.registries.optimizers import OPTIMIZERS
from batchwright.training.loop import open_task
from batchwright.workload.data.sources import open_data
from batchwright.workload.muon import Muon
from batchwright.workload.task import build_optimizer
from samples import make_cluster, make_data, make_job, make_network, make_profile
from test_choice import chosen
from test_learning import trial
from test_probe import tiny_image_data, tiny_job

SGD_SECONDS, MUON_SECONDS = 0.0001, 0.0041


def update(name: str, seconds: float) -> UpdateTime:
    return UpdateTime(
        optimizer=name, seconds=seconds, low=0.9 * seconds, high=1.2 * seconds, repeats=9
    )


def profile_of(**changes) -> Profile:
    """Measured for a plan that chooses the optimizer."""
    job = make_job(optimizer="auto", learning_rate="auto", **changes)
    updates = update("sgd", SGD_SECONDS), update("muon", MUON_SECONDS)
    return make_profile(job=job, updates=updates)


def test_the_optimizer_is_as_asked_or_predicted_near_the_batch_and_else_sgd():
    told = [Compared(64, 0.6, 0.5, 0.1, runs=0), Compared(512, 0.5, 0.6, 0.1, runs=0)]
    expected = {16: "sgd", 64: "sgd", 300: "muon", 1024: "muon", 2048: "sgd"}
    assert {batch: chosen_optimizer(Job(), batch, told) for batch in expected} == expected
    assert chosen_optimizer(Job(optimizer="adamw"), 100_000) == "adamw"
    assert chosen_optimizer(Job(optimizer="muon"), 2) == "muon"


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"method": "cyclic", "resolutions": (16, 32)}, "method=cyclic was published with SGD"),
        ({"learning_rate": 0.05}, "learning_rate=0.05 is given"),
        ({"ags": {"mode": "norm"}}, "act on SGD"),
        ({"scaling": "gain"}, "act on SGD"),
        ({"momentum": 0}, "momentum=0 leaves none"),
        ({"frozen": ("0",)}, "Some layers are frozen"),
    ],
)
def test_what_speaks_for_sgd_is_said(keys, why):
    job = make_job(optimizer="auto", **({"learning_rate": "auto", "global_batch": 512} | keys))
    plan = plan_without_profile(job, make_data(), make_network())
    assert plan.update == "sgd"
    assert plan.job.optimizer == "auto"
    (reason,) = (one for one in plan.reasons if one.choice == "optimizer")
    assert reason.value == "sgd"
    assert why in reason.why


def test_a_rate_that_costs_muon_is_told_with_the_way_out():
    job = Job(global_batch=4096, learning_rate=0.1, workers=1)  # the number of the default
    data = make_data(train_samples=50_000)
    plan = plan_without_profile(job, data, make_network())
    (why,) = (one.why for one in plan.reasons if one.choice == "optimizer")
    assert "Without it, trials or other tasks' trainings decide; optimizer=muon takes Muon" in why
    for way in ({"learning_rate": "auto"}, {"learning_rate": "auto", "optimizer": "muon"}):
        other = plan_without_profile(job.model_copy(update=way), data, make_network())
        assert (other.update, other.learning_rate.base) == ("muon", 0.1)


@pytest.mark.parametrize("name", OPTIMIZERS.own)
def test_an_optimizer_keeps_as_many_numbers_for_each_weight_as_its_entry_says(name):
    network = torch.nn.Linear(8, 4)
    optimizer = build_optimizer(network, make_job(optimizer=name), 0.1)
    network(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    kept = [one for state in optimizer.state.values() for one in state.values() if one.ndim]
    weights = sum(one.numel() for one in network.parameters())
    assert sum(one.numel() for one in kept) == OPTIMIZERS[name].kept * weights


@pytest.mark.parametrize("batch", [32, 512])
def test_without_trials_the_optimizer_is_that_which_other_tasks_lead_to_expect(batch):
    plan = make_plan(profile_of(global_batch=batch))
    bare = plan_without_profile(plan.job, plan.data, plan.network)
    assert plan.update == bare.update == "muon"
    for one in (plan, bare):
        (reason,) = (one for one in one.reasons if one.choice == "optimizer")
        assert (reason.value, reason.source) == ("muon", "assumed")
        assert "No trial of this training was measured. By trainings of other tasks" in reason.why
    asked = make_plan(make_profile(job=make_job(optimizer="sgd", global_batch=512)))
    assert all(one.choice != "optimizer" for one in asked.reasons)


@pytest.mark.parametrize(
    ("muon", "said"),
    [
        (0.9004, "as accurate as SGD on held-out"),
        (0.901, "0.1 points more accurate"),
        (0.89, "1.0 points l"),
    ],
)
def test_a_difference_that_rounds_to_nothing_is_told_as_none(muon, said):
    (reason,) = optimizer_reason(
        make_job(optimizer="auto", learning_rate="auto"),
        128,
        (Compared(batch=128, sgd=0.9, muon=muon, error=0.01, runs=0, by="the trials"),),
    )
    assert f"Muon would be {said}" in reason.why


def test_the_optimizers_are_compared_in_the_same_time():
    """Muon learns more an epoch, but not if its update takes many times the step."""
    slow = profile_of(global_batch=32)
    slow = slow.model_copy(update={"updates": (slow.updates[0], update("muon", 2.0))})
    taught = slow.model_copy(update={"trials": (trial("sgd", 32, 3000, 0.5),)})
    for profile, words in (
        (slow, "points less accurate than SGD on held-out images in the same time, give or take"),
        (taught, "; a step with Muon takes"),
    ):
        (reason,) = (one for one in make_plan(profile).reasons if one.choice == "optimizer")
        assert reason.value == "sgd"
        assert words in reason.why
    # In an epoch, by what sets the two apart: not by the means, which the wider prior lowers.
    long = make_job(optimizer="auto", learning_rate="auto", global_batch=256, epochs=1000)
    bare = plan_without_profile(long, make_data(train_samples=50_000), make_network())
    assert bare.update == "muon"


@pytest.mark.parametrize(
    "keys", [{"weights": "w.pt"}, {"network_args": {"pretrained": True}}], ids=str
)
def test_other_tasks_tell_nothing_of_weights_that_were_learnt_before(keys):
    plan = make_plan(profile_of(global_batch=512, **keys))
    (reason,) = (one for one in plan.reasons if one.choice == "optimizer")
    assert (plan.update, reason.source) == ("sgd", "assumed")
    assert "weights were learnt before" in reason.why
    assert chosen(plan).accuracy is None


def test_other_tasks_accuracy_says_so_where_the_images_are_augmented_in_another_way():
    def why(augment, **changes):
        profile = profile_of(augment=augment, global_batch=512).model_copy(update=changes)
        (told,) = (one.why for one in make_plan(profile).reasons if one.choice == "accuracy")
        return told

    said = "The prediction does not count what augment=resized-crop does to accuracy"
    assert said in why("resized-crop")
    assert "in the prediction" not in why("crop-flip")
    assert "in the prediction" not in why("auto")
    assert "in the prediction" not in why("resized-crop", trials=(trial("sgd", 32, 3000, 0.5),))


def test_an_optimizer_that_the_network_has_no_use_for_is_not_expected_to_be_better():
    profile = profile_of(global_batch=512)
    plan = make_plan(profile.model_copy(update={"updates": profile.updates[:1]}))
    assert plan.update == "sgd"
    assert chosen(plan).accuracy is not None


def test_every_candidate_has_the_time_of_its_own_optimizers_update():
    muon, sgd, given = (
        {one.global_batch_size: one for one in make_plan(profile_of(), make_job(**keys)).considered}
        for keys in (
            {"optimizer": "auto", "learning_rate": "auto"},
            {"optimizer": "sgd", "learning_rate": "auto"},
            {"optimizer": "auto", "learning_rate": 0.1},
        )
    )
    extra = MUON_SECONDS - SGD_SECONDS
    assert muon.keys() & sgd.keys() & given.keys()
    for batch in muon.keys() & sgd.keys():
        one, other = muon[batch].step_seconds, sgd[batch].step_seconds
        assert one.value == pytest.approx(other.value + extra)
        assert one.low > other.low
        assert one.high > other.high + extra
    for batch in given.keys() & sgd.keys():
        assert given[batch].step_seconds == sgd[batch].step_seconds


def test_a_profile_for_choosing_serves_either_optimizer_and_no_third():
    profile = profile_of(global_batch=512)
    for name in ("sgd", "muon"):
        assert make_plan(profile, make_job(optimizer=name, global_batch=512)).update == name
    with pytest.raises(PlanError, match="optimizer=auto, the job says optimizer=adamw"):
        make_plan(profile, make_job(optimizer="adamw"))
    with pytest.raises(PlanError, match="optimizer=sgd, the job says optimizer=muon"):
        make_plan(make_profile(job=make_job(optimizer="sgd")), make_job(optimizer="muon"))


def test_what_an_update_takes_more_is_known_only_where_both_were_timed():
    job = make_job(optimizer="muon")
    found = extra_seconds(job, profile_of(), "muon", 2)
    assert found.value == pytest.approx(MUON_SECONDS - SGD_SECONDS)
    assert 0 < found.low < found.value < found.high
    alone = profile_of().model_copy(update={"cluster": make_cluster(cores=1)})
    narrower = extra_seconds(job, alone, "muon", 2)  # no other core has to hand it anything
    assert found.low < 0.6 * found.value < narrower.low
    assert narrower.high < 1.7 * found.value < found.high
    gpu = profile_of().model_copy(update={"cluster": make_cluster(device="cuda")})
    assert extra_seconds(job, gpu, "muon", 2) == narrower
    assert extra_seconds(make_job(optimizer="sgd"), profile_of(), "sgd", 2) is None
    assert (
        extra_seconds(make_job(optimizer="muon", launch="virtual"), profile_of(), "muon", 2) is None
    )
    only = profile_of().model_copy(update={"updates": (update("sgd", SGD_SECONDS),)})
    assert extra_seconds(job, only, "muon", 2) is None
    assert extra_seconds(job, make_profile(job=make_job(optimizer="muon")), "muon", 2) is None


def test_an_update_is_that_of_as_many_workers_or_of_the_nearest_number():
    """Workers that share a machine have fewer threads each, and a small update needs none."""
    job, told = make_job(optimizer="muon"), {1: 0.003, 2: 0.002, 8: 0.004}
    updates = tuple(
        update(name, seconds).model_copy(update={"workers": workers})
        for workers, muon in told.items()
        for name, seconds in (("sgd", 0.001), ("muon", muon))
    )
    profile = profile_of().model_copy(update={"updates": updates})
    found = {n: extra_seconds(job, profile, "muon", n).value for n in (1, 2, 3, 6, 64)}
    assert found == pytest.approx({1: 0.002, 2: 0.001, 3: 0.001, 6: 0.003, 64: 0.003})
    merged = merge_profiles([profile_of(), profile])[0].updates
    assert {one.workers for one in merged} == {None, 1, 2, 8}


def test_a_stated_faster_kind_updates_faster_too():
    job = make_job(optimizer="muon", workers=1)
    extra = {}
    for speed in (1.0, 2.0):
        kinds = [{"kind": "ours", "like": make_cluster().device_name, "count": 1, "speed": speed}]
        steps = [
            make_plan(profile_of(), job_with).considered[0].step_seconds.value
            for job_with in (
                Job(**(job.model_dump() | {"optimizer": name, "goal": {"kinds": kinds}}))
                for name in ("muon", "sgd")
            )
        ]
        extra[speed] = steps[0] - steps[1]
    assert extra[1] == pytest.approx(MUON_SECONDS - SGD_SECONDS)
    assert extra[2] == pytest.approx(extra[1] / 2)


def test_merged_profiles_keep_the_times_of_updates():
    without = profile_of().model_copy(update={"updates": ()})
    (merged,) = merge_profiles([without, profile_of()])
    assert merged.updates == profile_of().updates


def test_timing_updates_leaves_weights_state_and_gradients_alone():
    bench = Bench(tiny_job(network="resnet8"), tiny_image_data(), Group(torch.device("cpu")))
    before = [one.detach().clone() for one in bench.network.state_dict().values()]
    state = [len(one) for one in bench.optimizer.state.values()]
    times = {one.optimizer: one for one in update_times(bench, seconds=0.01)}
    assert set(times) == {"sgd", "muon"}
    assert all(0 < one.low <= one.seconds <= one.high for one in times.values())
    after = list(bench.network.state_dict().values())
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert [len(one) for one in bench.optimizer.state.values()] == state
    assert all(one.grad is None for one in bench.trained)


def test_each_timed_update_follows_a_backward_pass(monkeypatch):
    """As in a training: straight after one another they find their weights in the caches."""
    seen: list[str] = []
    clock = iter(range(10_000))
    monkeypatch.setattr(update_time, "now", lambda _: 0.001 * next(clock))
    bench = Bench(tiny_job(network="resnet8"), tiny_image_data(), Group(torch.device("cpu")))
    loss, seconds = bench.loss, update_time._seconds
    monkeypatch.setattr(bench, "loss", lambda batch: (seen.append("pass"), loss(batch))[1])
    monkeypatch.setattr(
        update_time, "_seconds", lambda *given: (seen.append("update"), seconds(*given))[1]
    )
    times = update_times(bench, seconds=0.01)
    timed = sum(one.repeats for one in times)
    assert timed >= 6
    assert "".join(word[0] for word in seen).count("pu") == timed == seen.count("pass")


@pytest.mark.parametrize(("each", "repeats"), [(60.0, 1), (0.001, 50)])
def test_an_update_that_takes_longer_than_its_share_of_the_probe_is_timed_once(
    monkeypatch, each, repeats
):
    clock = iter(range(10_000))
    monkeypatch.setattr(update_time, "now", lambda _: each * next(clock))
    job = tiny_job(network="kept_network:network")
    bench = Bench(job, tiny_image_data(), Group(torch.device("cpu")))
    times = update_times(bench, seconds=0.6)
    assert [one.repeats for one in times] == [repeats] * 2
    assert [one.seconds for one in times] == pytest.approx([each] * 2)
    assert all((one.low < one.seconds < one.high) == (repeats == 1) for one in times)


def test_training_has_the_optimizer_that_the_plan_decided():
    job = Job(data="digits", global_batch=479, workers=1, launch="in-process", precision="float32")
    data = open_data(job).facts
    plan = plan_without_profile(job, data, make_network())
    assert plan.update == "muon"
    assert isinstance(open_task(plan, torch.device("cpu")).optimizer, Muon)
