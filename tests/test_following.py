"""`Follower`: what counts as a worker's own time in somebody else's loop."""

from __future__ import annotations

import torch
from torch import nn

import batchwright as bw
from batchwright.training.batches import following
from batchwright.training.batches.following import Follower


def test_a_pass_lasts_from_the_end_of_the_one_before_to_its_last_gradient(monkeypatch):
    now = 0.0
    monkeypatch.setattr(following.time, "perf_counter", lambda: now)
    first, last = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    frozen = nn.Parameter(torch.ones(1), requires_grad=False)
    sampler = bw.Sampler(10, 2, rank=0, workers=1)
    follower = Follower(sampler, (first, last, frozen))
    for began, computed, over, kind in (
        (10, 13, 15, "first"),  # from its batch at hand: 3
        (18, 19, 30, "usual"),  # 15 to 19
        (31, 33, 34, "one unused"),  # 30 to 33
        (90, 92, 93, "after an evaluation"),  # 90 to 92
    ):
        if kind == "after an evaluation":
            follower.leave_out()
        now = began
        follower.begin()
        loss = first if kind == "one unused" else first + last
        now = computed
        loss.sum().backward()
        now = over
        follower.exchanged()
    spans = [round(start.elapsed_time(end) / 1000) for start, end in follower._times]
    assert spans == [3, 4, 3, 2]
    assert len(list(sampler)) == 5
    follower.begin()  # the loop is left with this batch at hand
    watched = []
    monkeypatch.setattr(
        follower._balancer, "watch", lambda _, seconds, usual: watched.append((*seconds, usual))
    )
    follower.end_epoch()
    assert watched == [(3, False), (4, True), (3, True), (2, True)]
    assert not follower.timed
    follower.close()


def test_the_smaller_last_step_is_left_out_also_where_a_training_goes_on_within_an_epoch(
    monkeypatch,
):
    weight, sampler = nn.Parameter(torch.ones(1)), bw.Sampler(7, 2, rank=0, workers=1)
    assert len(list(sampler)) == 4
    follower, usual = Follower(sampler, [weight]), []
    follower.before = 1  # the Trainer goes through all batches, and skips the first
    for _ in range(3):
        follower.begin()
        weight.sum().backward()
        follower.exchanged()
    monkeypatch.setattr(follower._balancer, "watch", lambda *_, **how: usual.append(how["usual"]))
    follower.end_epoch()
    follower.close()
    assert usual == [False, True, False]
    assert follower.before == 0
