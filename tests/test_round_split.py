"""`training.parameter_server.round_split`: the steps of a worker's round."""

from __future__ import annotations

import torch

from batchwright.training.batches.sampler import epoch_order
from batchwright.training.checkpoints.checkpoint_manager import RunState
from batchwright.training.parameter_server import round_split
from batchwright.training.parameter_server.round_split import RoundSharing
from batchwright.training.parameter_server.rounds import Rounds
from servers import make_rule, make_server_plan


def test_an_epochs_order_is_made_once_for_all_its_rounds(monkeypatch):
    made = []

    def counted(samples, epoch, *rest):
        made.append(epoch)
        return epoch_order(samples, epoch, *rest)

    monkeypatch.setattr(round_split, "epoch_order", counted)
    plan = make_server_plan((7, 6), rule=make_rule(exchange_steps=1), epochs=4)
    sharing = RoundSharing(plan, RunState(), "here", samples=13, least=1, weights=None)
    rounds = Rounds(plan, 13)
    while (ticket := rounds.take(0)) is not None:
        sharing.begin(ticket)
        for epoch, _ in sharing.stretches():
            assert torch.equal(sharing.order(epoch), epoch_order(13, epoch, plan.job.seed, None))
        rounds.commit(0)
        assert len(sharing._orders) <= 2
    assert made == [0, 1, 2, 3]
