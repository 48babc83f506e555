"""`planning.planner`: what is chosen, why, and what is refused."""

import re
import subprocess
import sys

import pytest

from batchwright.cli.output import print_plan
from batchwright.errors import BatchwrightError, JobError, PlanError
from batchwright.planning.measurements import fewer_cores
from batchwright.planning.planner import make_plan, plan_without_profile
from batchwright.records import (
    CollectiveTime,
    Goal,
    GradientNoise,
    Job,
    Link,
    MemoryParts,
    MemoryPoint,
    NetworkFacts,
    OutOfMemory,
    Plan,
    ProbeSettings,
    Profile,
    StepLoading,
    StepTime,
)
from batchwright.records.documents import write_record
from batchwright.records.text.formatting import duration
from batchwright.workflows.verbs import plan as plan_verb
from samples import make_cluster, make_data, make_profile, make_summary, reason

MIB = 2**20


def data_of(samples=50_000):
    return make_data(name="cifar100", train_samples=samples, val_samples=100, classes=("a", "b"))


def network_of(**changes):
    plain = {"name": "resnet8", "parameters": 75_000, "trained_bytes": 300_000}
    return NetworkFacts(**{**plain, "batch_norm": True, **changes})


def step_of(batch, seconds, workers=2, resolution=32):
    return StepTime(
        resolution=resolution,
        local_batch_size=batch,
        workers=workers,
        compute_seconds=seconds,
        sync_seconds=0.003,
        step_seconds=seconds + 0.003,
        step_low=seconds + 0.0029,
        step_high=seconds + 0.0031,
        repeats=10,
    )


def memory_of(batch, resolution=32, workers=2):
    return MemoryPoint(
        resolution=resolution,
        local_batch_size=batch,
        workers=workers,
        peak_bytes=2 * MIB + batch * MIB,
    )


def profile_of(samples=50_000, job=None, fixed=0.02, batches=(16, 32, 64, 128, 256), **changes):
    """A worker that takes ``fixed`` seconds a step and 0.5 ms an image, and 1 MiB an image."""
    fields = {
        "job": job or Job(data="cifar100:x", workers=2, precision="float32", resolutions=(32,)),
        "data": data_of(samples),
        "network": network_of(),
        "cluster": make_cluster(memory_bytes=8192 * MIB),
        "steps": tuple(step_of(b, fixed - 0.003 + 0.0005 * b) for b in batches),
        "memory": tuple(memory_of(b) for b in batches[:3]),
        "memory_parts": MemoryParts(
            parameters=300_000, buffers=0, gradients=300_000, optimizer=300_000, reduction=300_000
        ),
        "collectives": (
            CollectiveTime(
                bytes=300_000, workers=2, seconds=0.003, low=0.0029, high=0.0031, repeats=9
            ),
        ),
        "noise": None,
        "evaluation_seconds_per_image": 0.0001,
        "probe_seconds": 9.0,
    }
    return Profile(**{**fields, **changes})


def job_of(**changes):
    return profile_of().job.model_copy(update=changes)


def test_the_global_batch_is_the_knee_of_the_predicted_epoch_time():
    # A local batch of b: 0.02 (1 - 2 0.05) / (2 0.05 0.0005) = 360, so 512.
    plan = make_plan(profile_of(), job_of(goal=Goal(objective="knee")))
    assert plan.stages[0].local_batch_sizes == (512, 512)
    assert "1024" in reason(plan, "global batch").value
    assert "Kneedle" in reason(plan, "global batch").why
    assert reason(plan, "global batch").source == "predicted"
    assert plan.considered[0].global_batch_size == 32
    assert [one.global_batch_size for one in plan.considered if one.extrapolated] == [
        *(1024, 2048, 4096, 5000),
        8192,  # leaves too few steps
    ]
    assert [one.global_batch_size for one in plan.considered if one.refused] == [8192]
    assert plan.knees[0].closed_form == pytest.approx(720)
    assert plan.knees[0].low < 720 < plan.knees[0].high


def test_predictions_follow_the_measured_times():
    chosen = make_plan(profile_of(), job_of(global_batch=128)).stages[0]
    # 390 whole steps of 64 each, and a last one with the 80 images left, 40 each.
    expected = 390 * (0.02 + 0.0005 * 64) + 0.02 + 0.0005 * 40
    assert chosen.predicted_epoch_seconds.value == pytest.approx(expected)
    assert chosen.predicted_epoch_seconds.low < expected < chosen.predicted_epoch_seconds.high
    assert chosen.predicted_bytes.value == pytest.approx(66 * MIB)


def test_how_far_the_line_is_from_a_measured_batch_is_told_as_a_share_of_its_time():
    """Not in standard errors of that time, of which it may be anything."""
    profile = make_profile()
    off = {8: 1.01, 16: 0.99, 32: 1.01}
    steps = tuple(
        step.model_copy(update={"visits": tuple(off[size] * one for one in step.visits)})
        if (size := step.local_batch_size) in off
        else step
        for step in profile.steps
    )
    why = reason(make_plan(profile.model_copy(update={"steps": steps})), "epoch time").why
    told = re.search(r"at its worst it is ([0-9.]+) % away from one of them", why)
    assert 0.5 <= float(told[1]) <= 1.5


def test_without_a_knee_the_largest_batch_is_taken_and_the_reason_says_so():
    plan = make_plan(profile_of(samples=1437), job_of(goal=Goal(objective="knee")))
    assert plan.stages[0].global_batch_size == 142
    assert "no knee: each doubling" in reason(plan, "global batch").why
    assert plan.knees[0].global_batch_size is None


def of_large_gpu(noise_scale=230.0):
    """A worker whose steps take 8 ms however small, so that doublings pay to the end."""
    batches = (16, 64, 256, 512, 1024, 2048, 4096, 5000)
    seconds = [max(0.008, 0.0036 + 16e-6 * b) for b in batches]
    noise = None
    if noise_scale:
        noise = GradientNoise(
            noise_scale=noise_scale, trace=noise_scale, sqr_norm=1, parts=32, repeats=1
        )
    learnt_before = {"pretrained": True}  # so nothing tells accuracy
    changes = {"workers": 1, "optimizer": "sgd", "scaling": "sqrt", "network_args": learnt_before}
    return profile_of(
        job=profile_of().job.model_copy(update=changes),
        batches=batches,
        cluster=make_cluster(workers=1, memory_bytes=80 * 1024 * MIB),
        steps=tuple(
            step_of(b, one - 0.003, workers=1) for b, one in zip(batches, seconds, strict=True)
        ),
        memory=tuple(memory_of(b, workers=1) for b in batches[:3]),
        noise=noise,
    )


def test_the_batch_ends_where_larger_ones_cost_more_progress_than_they_save_time():
    """Where small steps take as long as larger ones, time alone leaves ten steps an epoch."""
    profile = of_large_gpu()
    free = make_plan(profile)
    scale, batch = 230.0, free.stages[0].global_batch_size
    told = reason(free, "global batch")
    assert batch == 512
    assert "the upper end of the gradient noise scale" in told.why
    assert "as much progress would take" in told.why
    rows = {one.global_batch_size: one for one in free.considered}
    to_progress = {
        size: one.epoch_seconds.value / one.efficiency.value for size, one in rows.items()
    }
    assert all(to_progress[batch] < to_progress[size] for size in rows if size > batch)
    knee = make_plan(profile, profile.job.model_copy(update={"goal": Goal(objective="knee")}))
    at_knee = knee.stages[0].global_batch_size
    assert at_knee > 4 * scale
    assert f"By time alone doublings pay up to {at_knee} (goal.objective=knee)" in told.why
    assert f"1 worker, global batch {at_knee}" in [
        one.value.split(" (")[0] for one in reason(free, "workers").alternatives
    ]


def test_without_a_noise_scale_or_with_a_large_one_the_knee_holds():
    taken = [make_plan(of_large_gpu(scale)).stages[0].global_batch_size for scale in (None, 5000.0)]
    assert min(taken) > 1024
    assert taken[0] == taken[1]


def test_every_batch_that_leaves_fewer_than_ten_steps_an_epoch_is_refused():
    for samples in (100, 1437, 50_000):
        plan = make_plan(profile_of(samples=samples))
        for one in plan.considered:
            whole = samples // one.global_batch_size
            assert (whole < 10) == ("goal.least_steps=10" in one.refused)
            assert one.steps_per_epoch >= whole


def test_the_objective_time_takes_the_least_predicted_epoch_time():
    plan = make_plan(profile_of(), job_of(goal=Goal(objective="time")))
    allowed = [one for one in plan.considered if not one.refused]
    near = [one for one in allowed if one.local_batch_size < 2 * 256]  # 256 were measured
    fastest = min(near, key=lambda one: one.epoch_seconds.value)
    assert plan.stages[0].global_batch_size == fastest.global_batch_size


def test_memory_bounds_the_candidates_by_the_upper_end():
    plan = make_plan(profile_of(), job_of(goal=Goal(memory=100 * MIB)))
    allowed = [one for one in plan.considered if not one.refused]
    assert max(one.local_batch_size for one in allowed) == 64
    assert all(one.peak_bytes.high <= 100 * MIB for one in allowed)
    beyond = plan.considered[-1]  # one more, to show the limit
    assert beyond.local_batch_size == 128
    assert "the limit is 100.0 MiB" in beyond.refused


def test_an_asked_batch_beyond_the_memory_is_accumulated():
    stage = make_plan(profile_of(), job_of(global_batch=512, goal=Goal(memory=100 * MIB))).stages[0]
    assert stage.local_batch_sizes == (256, 256)
    assert stage.accumulation_steps == 3
    assert stage.micro_batch_size == 86
    assert stage.predicted_bytes.high <= 100 * MIB


def test_an_asked_micro_batch_is_kept():
    plan = make_plan(profile_of(), job_of(micro_batch=32, global_batch=256))
    assert plan.stages[0].micro_batch_size == 32
    assert plan.stages[0].accumulation_steps == 4
    assert "4 passes" in reason(plan, "local batches").why


def test_an_asked_batch_need_not_divide_evenly():
    stage = make_plan(profile_of(), job_of(global_batch=129)).stages[0]
    assert stage.local_batch_sizes == (65, 64)


def test_the_rate_is_scaled_and_says_by_which_rule():
    linear = make_plan(profile_of(), job_of(global_batch=512, scaling="linear"))
    assert linear.stages[0].learning_rate == pytest.approx(0.4)
    assert "512 / 128" in reason(linear, "learning rate").why
    assert "Goyal" in reason(linear, "learning rate").reference
    assert linear.learning_rate.warmup_epochs == 0.43
    root = make_plan(profile_of(), job_of(global_batch=512))
    assert root.stages[0].learning_rate == pytest.approx(0.2)
    assert "Krizhevsky" in reason(root, "learning rate").reference
    assert make_plan(profile_of(), job_of(global_batch=128)).learning_rate.warmup_epochs == 0


def test_a_batch_well_above_the_noise_scale_is_said_to_cost_progress():
    noise = GradientNoise(noise_scale=100, trace=1, sqr_norm=0.01, parts=2, repeats=20)
    above = make_plan(profile_of(noise=noise), job_of(global_batch=400))
    assert "well above" in reason(above, "gradient noise scale").why
    assert "20 %" in reason(above, "gradient noise scale").why
    below = make_plan(profile_of(noise=noise), job_of(global_batch=32))
    assert "well below" in reason(below, "gradient noise scale").why


def test_without_a_noise_scale_the_plan_says_whether_the_worth_of_a_batch_is_known():
    for scaling, known in (("sqrt", True), ("linear", False)):
        plan = make_plan(profile_of(), job_of(scaling=scaling))
        others = [one for one in plan.considered if one.global_batch_size != plan.job.base_batch]
        assert all(bool(one.efficiency) == known for one in others)
        assert ("is not predicted" in reason(plan, "gradient noise scale").why) != known


def test_the_plan_carries_the_resolved_job():
    job = make_plan(profile_of(), Job(data="cifar100:x", epochs=3)).job
    assert (job.workers, job.precision, job.resolutions) == (2, "float32", (32,))
    assert job.augment == "crop-flip"
    assert job.epochs == 3


def test_the_same_input_gives_the_same_bytes_and_comes_back_from_json():
    first, second = make_plan(profile_of()), make_plan(profile_of())
    assert first.model_dump_json() == second.model_dump_json()
    assert Plan.model_validate_json(first.model_dump_json()) == first
    again = make_plan(Profile.model_validate_json(profile_of().model_dump_json()))
    assert again.model_dump_json() == first.model_dump_json()


def test_the_plan_explains_itself():
    text = make_plan(profile_of()).explain()
    for word in ("global batch", "learning rate", "warm-up", "memory", "precision", "workers"):
        assert word in text


def test_the_line_of_a_plan_tells_the_time_of_the_whole_training(capsys):
    plan = make_plan(profile_of())
    print_plan(plan, explain=False)
    whole = duration(plan.chosen.train_seconds.value)
    assert f" s per epoch, {whole} in all" in capsys.readouterr().err
    job = plan.job.model_copy(update={"goal": Goal(accuracy=0.9)})
    print_plan(plan.model_copy(update={"job": job, "target_epochs": 7}), explain=False)
    assert f"per epoch, 7 epochs of {plan.epochs}, {whole} in all" in capsys.readouterr().err


def test_hours_and_large_costs_are_told_without_powers_of_ten(capsys):
    asked = {"data": "cifar100:x", "workers": 2, "precision": "float32", "resolutions": (32,)}
    job = Job(**asked, goal=Goal(price=500, deadline=1e9))
    plan = make_plan(profile_of(samples=20_000_000, job=job))
    print_plan(plan, explain=False)
    print_plan(plan, explain=True)
    assert "e+0" not in capsys.readouterr().err.replace("1e+09", "")  # the deadline as it is given
    assert plan.stages[0].predicted_epoch_seconds.value > 3600
    late = job.model_copy(update={"goal": Goal(deadline=2e4)})
    with pytest.raises(PlanError, match=r"may take \d+,\d{3}.* s, goal.deadline=20000: raise"):
        make_plan(profile_of(samples=20_000_000), late)


@pytest.mark.parametrize(
    ("profile", "changes", "named"),
    [
        ({}, {"network": "vgg8"}, "network=resnet8.*network=vgg8.*probe again"),
        ({}, {"precision": "bfloat16"}, "precision=float32"),
        ({}, {"workers": 4}, "workers=2.*workers=4"),
        ({}, {"resolutions": (24, 32)}, "no step times at 24 px, only .*resolutions=24,32"),
        ({}, {"probe": ProbeSettings(steps=3)}, "probe"),
        ({}, {"launch": "in-process"}, "in-process"),
        ({}, {"global_batch": 60_000}, "60000.*50000"),
        ({}, {"global_batch": 3}, "global_batch=3.*at least 4"),
        ({}, {"micro_batch": 1}, "micro_batch=1"),
        ({}, {"micro_batch": 9000, "global_batch": 18_000}, "raise goal.memory"),
        ({}, {"goal": Goal(deadline=1)}, "may take .* goal.deadline=1: raise goal.deadline"),
        ({}, {"goal": Goal(price=1, max_cost=1e-6)}, "may cost .* goal.max_cost=1e-06: raise"),
        ({}, {"goal": Goal(max_workers=1)}, "2 workers, goal.max_workers=1: .*measure fewer"),
        ({}, {"goal": Goal(max_workers=4)}, "2 were measured together.*link.latency"),
        ({}, {"goal": Goal(objective="cost")}, "needs the price.*goal.price"),
        ({}, {"goal": Goal(max_cost=3)}, "goal.max_cost=3.* needs the price"),
        ({}, {"goal": Goal(objective="target-accuracy")}, "give goal.accuracy"),
        (
            {},
            {"goal": Goal(objective="target-accuracy", accuracy=0.9), "scaling": "gain"},
            "no gradient noise scale",
        ),
        ({}, {"goal": Goal(kinds=({"kind": "t4", "count": 1},))}, "no profile of 't4', only"),
        ({}, {"goal": Goal(memory=MIB)}, r"px, may take .* MiB for 2 images.*is 1\.00 MiB: raise"),
        ({"samples": 3}, {}, "3 training images.*2 worker"),
        ({"samples": 30}, {}, "least_steps=10.*least_steps=7 or less, or fewer workers"),
        (
            {"samples": 30},
            {"workers": 20, "link": Link(latency=1e-4, bandwidth=1e9)},
            "30 training images, too few for 20 workers with at least 2 each: give fewer workers",
        ),
        ({"steps": ()}, {}, "no step times: probe again"),
        ({"memory": ()}, {}, "no memory peaks at 32 px"),
        ({"steps": (step_of(16, 0.1),)}, {}, "only batch measured.*measure batch 32"),
        ({"steps": (step_of(16, 0.1), step_of(16, 0.2))}, {}, "16.* is there twice"),
        ({"network": network_of(least_side=33)}, {}, "at least 33 px, not 32"),
        ({"job": Job(data="cifar100:x")}, {}, "precision"),
        ({"job": Job(data="cifar100:x", workers=4, precision="float32")}, {}, "workers=4"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(profile, changes, named):
    made = profile_of(**profile)
    with pytest.raises(BatchwrightError, match=named) as caught:
        make_plan(made, made.job.model_copy(update=changes) if changes else None)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("samples", "said"), [(1, "1 training image, .*: give more images$"), (15, "=7 or less$")]
)
def test_one_worker_is_not_told_to_be_fewer(samples, said):
    made = make_profile(data=data_of(samples))
    with pytest.raises(PlanError, match=said):
        make_plan(made, made.job.model_copy(update={"workers": 1}))


def test_a_warmup_longer_than_the_training_is_refused():
    with pytest.raises(JobError, match="warmup_epochs"):
        make_plan(profile_of(), job_of(warmup_epochs=31, epochs=30))


def test_tiny_data_falls_back_to_batches_smaller_than_measured():
    plan = make_plan(profile_of(samples=45))
    assert plan.stages[0].global_batch_size == 4
    assert all(one.extrapolated for one in plan.considered)


def test_without_a_profile_the_asked_batches_are_kept_and_nothing_is_predicted():
    plan = plan_without_profile(Job(workers=2, global_batch=64), data_of(), network_of())
    stage = plan.stages[0]
    assert stage.local_batch_sizes == (32, 32)
    assert stage.predicted_epoch_seconds is None
    assert stage.predicted_bytes is None
    assert plan.considered == ()
    assert reason(plan, "global batch").source == "asked"


def test_without_a_profile_the_base_batch_is_assumed_or_what_the_data_allows():
    job = Job(workers=2)
    assumed = plan_without_profile(job, data_of(), network_of())
    assert assumed.stages[0].local_batch_sizes == (64, 64)
    assert reason(assumed, "global batch").source == "assumed"
    assert plan_without_profile(job, data_of(400), network_of()).stages[0].global_batch_size == 40


@pytest.mark.parametrize(
    ("job", "named"),
    [
        (Job(global_batch=60_000), "60000"),
        (Job(global_batch=3, workers=2), "global_batch=3"),
        (Job(micro_batch=1, workers=2), "micro_batch=1"),
    ],
)
def test_without_a_profile_contradictions_are_refused(job, named):
    with pytest.raises(PlanError, match=named):
        plan_without_profile(job, data_of(), network_of())


def test_planning_starts_without_torch_scipy_and_numpy():
    code = (
        "import sys, batchwright.planning.planner; "
        "print([name for name in ('torch', 'scipy', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=500
    )
    assert done.stdout.strip() == "[]"


def test_a_resolution_between_measured_ones_is_predicted():
    sides, batches = (24, 32), (16, 32, 64)
    job = Job(data="cifar100:x", workers=2, precision="float32", resolutions=sides)
    profile = profile_of(
        job=job,
        steps=tuple(
            step_of(b, 0.01 + 5e-7 * side**2 * b, resolution=side)
            for side in sides
            for b in batches
        ),
        memory=tuple(memory_of(b, side) for side in sides for b in batches),
    )
    plan = make_plan(profile, job.model_copy(update={"resolutions": (28,), "global_batch": 64}))
    assert plan.stages[0].resolution == 28
    chosen = next(one for one in plan.considered if one.global_batch_size == 64)
    assert chosen.step_seconds.value == pytest.approx(0.013 + 5e-7 * 28**2 * 32)


def test_a_batch_that_ran_out_of_memory_bounds_the_candidates():
    failed = OutOfMemory(resolution=32, local_batch_size=200, workers=2)
    plan = make_plan(profile_of(out_of_memory=(failed,)))
    assert max(one.local_batch_size for one in plan.considered if not one.refused) == 128
    assert "At 200 images memory ran out." in reason(plan, "largest local batch").why
    (refused, *_) = [one.refused for one in plan.considered if one.local_batch_size > 128]
    assert refused.startswith("may take too much for ")
    assert refused.endswith("at once on a worker: a step of 200 found too little memory")


def test_a_plan_says_where_too_little_shared_memory_bounds_the_batch():
    failed = OutOfMemory(resolution=32, local_batch_size=200, workers=2, short_of="shared memory")
    plan = make_plan(profile_of(out_of_memory=(failed,)))
    why = reason(plan, "largest local batch").why
    assert "At 200 images a loader process found too little shared memory" in why
    (refused, *_) = [one.refused for one in plan.considered if one.local_batch_size > 128]
    assert refused.endswith("found too little shared memory")
    none = failed.model_copy(update={"local_batch_size": 2})
    with pytest.raises(PlanError, match=r"found too little shared memory: .*--shm-size=1g"):
        make_plan(profile_of(out_of_memory=(none,)))


def test_the_measured_number_of_workers_is_not_asked_for_and_the_goal_may_allow_others():
    job = job_of(link=Link(latency=1e-5, bandwidth=1e9))
    assert reason(make_plan(profile_of(job=job)), "workers").source == "measured"
    wider = job.model_copy(update={"goal": Goal(max_workers=8, objective="time")})
    plan = make_plan(profile_of(job=job), wider)
    assert {one.workers for one in plan.considered} == {2, 4, 8}
    assert plan.workers == 8
    asked = make_plan(profile_of(job=job), wider.model_copy(update={"workers": 4}))
    assert asked.workers == 4
    assert reason(asked, "workers").source == "asked"


def test_the_verb_takes_several_profiles_and_runs_as_records_or_files(tmp_path):
    profile, run = make_profile(), make_summary()
    write_record(profile, tmp_path / "profile.json")
    write_record(run, tmp_path / "summary.json")
    by_file = plan_verb([tmp_path / "profile.json"], ["epochs=7"], runs=[tmp_path])
    by_record = plan_verb(profile, runs=[run], epochs=7)
    assert by_file == by_record
    assert by_file.job.epochs == 7
    assert next(one for one in by_file.reasons if one.choice == "accuracy").value != "not known"
    assert plan_verb(profile, runs=[run, tmp_path, run], epochs=7) == by_record  # it is one seed
    twice = plan_verb([profile, profile])
    assert twice.stages[0].global_batch_size == plan_verb(profile).stages[0].global_batch_size
    assert reason(plan_verb(profile, workers=2), "workers").source == "asked"
    with pytest.raises(PlanError, match="at least one profile"):
        plan_verb([])


@pytest.mark.parametrize(
    ("batch_seconds", "cores"),
    [
        (None, 4),  # nothing is loaded beside the steps
        (0.1, 4 + 2),  # a loader process keeps up with the steps, and has another beside it
        (1.6, 4 + 32),
        (1e3, 4 + 64),  # all that there were keep no pace: predicted times need them
    ],
)
def test_engines_are_not_asked_for_all_cores_of_a_machine_with_a_gpu(batch_seconds, cores):
    profile = make_profile(cluster=make_cluster(device="cuda", workers=1, cores=208, threads=208))
    steps = tuple(
        one.model_copy(
            update={
                "step_seconds": 0.1,
                "visits": (),
                "loading": batch_seconds
                and StepLoading(
                    loaders=64,
                    batch_seconds=batch_seconds,
                    cpu_seconds=0.0,
                    alone_seconds=0.1,
                    input_seconds=0.0,
                ),
            }
        )
        for one in profile.steps
    )
    stage = make_plan(make_profile()).stages[0]
    found = fewer_cores(profile.model_copy(update={"steps": steps}), [stage], 208)
    assert found == cores
    assert fewer_cores(profile, [stage], 4) is None


@pytest.mark.parametrize(
    ("facts", "workers", "threads"),
    [
        ({"cores": 8, "threads": 4}, 2, 4),
        ({"cores": 8, "threads": 4}, 1, 8),  # timed alone, it had all cores
        ({"cores": 8, "threads": 3}, 1, 3),  # given, by OMP_NUM_THREADS
        ({"cores": 2, "threads": 1}, 2, 1),
    ],
)
def test_the_plan_holds_how_many_threads_workers_were_timed_with(facts, workers, threads):
    profile = make_profile(cluster=make_cluster(**facts))
    plan = make_plan(profile, profile.job.model_copy(update={"workers": workers}))
    assert (plan.workers, plan.threads) == (workers, threads)
    told = f"Each with {threads} compute threads, as it was timed." in reason(plan, "workers").why
    assert told == (threads > 1)
    assert (plan.cores, plan.worker_cores) == (None, threads)
    before = plan.model_dump(exclude={"threads"})  # of an earlier version
    assert type(plan).model_validate(before).threads is None
