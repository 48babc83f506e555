"""What a plan says of loading, and what training records of it."""

from __future__ import annotations

import re
import traceback

import pytest
import torch

import batchwright as bw
from batchwright.planning.merging import merge_profiles
from batchwright.planning.planner import make_plan
from batchwright.prediction.loading import nearest_loaded, pooled_loading
from batchwright.records import Profile, StepLoading
from batchwright.reporting.data.accounting import worker_rows
from batchwright.training.batches.feeding import DatasetFeed
from samples import make_cluster, make_profile, make_summary
from test_session import make_session, make_tiny_plan, summary_in, train

LIGHT = StepLoading(
    loaders=2, batch_seconds=0.01, cpu_seconds=0.01, alone_seconds=0.05, input_seconds=0.0
)


def loaded(profile: Profile, **changes: float) -> Profile:
    """The profile as if it had been measured beside loading."""
    return profile.model_copy(
        update={
            "steps": tuple(
                point.model_copy(
                    update={
                        "loading": LIGHT.model_copy(
                            update={"alone_seconds": point.step_seconds, **changes}
                        )
                    }
                )
                for point in profile.steps
            )
        }
    )


def reason_of(profile):
    found = [reason for reason in make_plan(profile).reasons if reason.choice == "loading"]
    return found[0] if found else None


def test_a_plan_says_nothing_of_loading_that_is_part_of_a_step():
    assert reason_of(make_profile()) is None


def test_a_plan_says_with_how_many_loaders_it_was_measured_and_what_loading_costs():
    reason = reason_of(loaded(make_profile()))
    assert reason.value == "2 loader processes"
    assert reason.source == "measured"
    assert re.match(r"Measured with 2 loader processes for each of \d workers, ", reason.why)
    assert "of which it waits 0 ms for images. That is in all predicted times." in reason.why
    assert "try" not in reason.why


@pytest.fixture
def waiting():
    """A machine of many cores, steps of which nearly all is waiting for images."""
    profile = make_profile(cluster=make_cluster(cores=64))
    seconds = {"alone_seconds": 1e-6, "cpu_seconds": 1e-6}
    return profile.model_copy(
        update={
            "steps": tuple(
                point.model_copy(
                    update={
                        "loading": LIGHT.model_copy(
                            update=seconds | {"input_seconds": 0.9 * point.step_seconds}
                        )
                    }
                )
                for point in profile.steps
            )
        }
    )


def test_where_steps_wait_and_cores_are_idle_a_plan_advises_more_loader_processes(waiting):
    assert "while cores are idle: try loaders=4, smaller files" in reason_of(waiting).why


def test_where_loading_keeps_the_cores_busy_a_plan_advises_cheaper_samples(waiting):
    steps = tuple(
        point.model_copy(update={"loading": point.loading.model_copy(update={"cpu_seconds": 1e3})})
        for point in waiting.steps
    )
    why = reason_of(waiting.model_copy(update={"steps": steps})).why
    assert "more loader processes would not help: try smaller files" in why


def test_where_there_are_as_many_loaders_as_cores_a_plan_advises_cheaper_samples(waiting):
    few = waiting.model_copy(update={"cluster": make_cluster(cores=2)})
    assert "more loader processes would not help: try smaller files" in reason_of(few).why


def test_visits_are_pooled_by_their_medians():
    visits = [LIGHT.model_copy(update={"input_seconds": s}) for s in (0.1, 0.9, 0.2)]
    assert pooled_loading(visits) == LIGHT.model_copy(update={"input_seconds": 0.2})
    assert pooled_loading([]) is None


def test_the_number_of_workers_counts_most_for_what_is_near():
    points = loaded(make_profile()).steps
    point = points[-1]
    found = nearest_loaded(points, point.workers, point.resolution, point.local_batch_size + 1)
    assert found == point
    assert nearest_loaded(make_profile().steps, 1, 32, 64) is None


def test_merged_profiles_keep_what_loading_took():
    profile = loaded(make_profile())
    (merged,) = merge_profiles([profile, profile])
    assert [one.loading for one in merged.steps] == [one.loading for one in profile.steps]


def test_a_session_loads_as_the_plan_was_measured_and_warns_of_another_number():
    plan = make_tiny_plan()
    job = plan.job.model_copy(update={"loaders": 1})
    told = reason_of(loaded(make_profile()))
    planned = plan.model_copy(update={"job": job, "reasons": (told,)})
    with make_session(plan=planned, loaders=None) as one:
        assert one._feed.loading.loaders == 1
    with (
        pytest.warns(UserWarning, match=r"measured with loaders=1 and the session got loaders=0"),
        make_session(plan=planned, loaders=0),
    ):
        pass


@pytest.mark.parametrize("loaders", [0, 1])
def test_processor_time_of_loader_processes_stands_beside_computing(loaders, tmp_path):
    with make_session(plan=make_tiny_plan(epochs=2), loaders=loaders, run_folder=tmp_path) as one:
        train(one)
    for epoch in summary_in(tmp_path).epochs:
        (worker,) = epoch.workers
        assert (worker.loading_cpu_seconds > 0) == (loaders > 0)
    flat = bw.metrics(tmp_path)[-1]
    assert ("time/rank0/loading_cpu_s" in flat) == (loaders > 0)


def test_the_table_of_workers_has_it_where_there_is_any():
    summary = make_summary()
    assert "loaders (CPU)" not in worker_rows(summary)[0]
    epochs = tuple(
        epoch.model_copy(
            update={
                "workers": tuple(
                    one.model_copy(update={"loading_cpu_seconds": 1.5}) for one in epoch.workers
                )
            }
        )
        for epoch in summary.epochs
    )
    head, *rows = worker_rows(summary.model_copy(update={"epochs": epochs}))
    assert head[-1] == "loaders (CPU)"
    assert all(len(row) == len(head) for row in rows)


class Failing(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 5:
            raise ValueError("of the user's own")
        return torch.zeros(3), 0


@pytest.mark.parametrize("loaders", [0, 1])
def test_a_batch_that_fails_counts_as_loaded_so_that_nobody_waits_for_it(loaders):
    feed = DatasetFeed(Failing(), device=torch.device("cpu"), seed=0, loaders=loaders)
    stream = feed.training(torch.arange(8).split(4), epoch=0, resolution=0)
    next(stream)
    with pytest.raises(ValueError, match="of the user's own") as caught:
        next(stream)
    traceback.clear_frames(caught.tb)  # in a circle with the loader
    assert feed.loading.batches == feed.loading.asked == 2
    assert feed.loading.totals.seconds > 0
    del stream
    feed.close()
