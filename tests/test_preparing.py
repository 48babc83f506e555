"""A job made concrete before anything is measured."""

from __future__ import annotations

import pytest

from batchwright.errors import JobError
from batchwright.preparing import resolve
from batchwright.records import Job
from samples import make_data


def test_what_needs_no_measuring_is_settled_and_the_worker_count_left_to_the_plan():
    job = resolve(Job(device="cpu"), make_data(side=8))
    assert (job.device, job.augment, job.resolutions) == ("cpu", "crop", (8,))
    assert (job.workers, job.precision, job.global_batch) == ("auto", "auto", "auto")


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_a_worker_count_that_was_asked_for_stays(workers):
    assert resolve(Job(device="cpu", workers=workers), make_data()).workers == workers


@pytest.mark.parametrize("workers", ["auto", 1])
def test_one_process_is_one_worker(workers):
    job = Job(device="cpu", workers=workers, launch="in-process")
    assert resolve(job, make_data()).workers == 1


def test_several_workers_in_one_process_are_refused():
    with pytest.raises(JobError, match="workers=2 with launch=in-process: that is one worker"):
        resolve(Job(device="cpu", workers=2, launch="in-process"), make_data())
