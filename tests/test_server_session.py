"""Sessions with a parameter server: real worker processes, held against what the rules say."""

from __future__ import annotations

import os
import socket
import struct
from collections import Counter
from contextlib import suppress
from statistics import median
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from batchwright import Session
from batchwright.algorithms.learning_rate import rate_factor
from batchwright.distributed.server_child import SERVER, SERVER_KEY
from batchwright.errors import PlanError, TrainingError
from batchwright.records import LearningRateRule, RunSummary
from batchwright.records.documents import read_record
from batchwright.training.batches.sampler import epoch_order, step_sizes
from batchwright.training.checkpoints.checkpoint import load_checkpoint
from batchwright.training.parameter_server import server_process
from batchwright.training.parameter_server.merging import layout, pack
from batchwright.training.parameter_server.messages import (
    Beat,
    Hello,
    Next,
    Round,
    Settled,
    Trained,
    Welcome,
)
from batchwright.training.parameter_server.server_client import ServerClient
from batchwright.training.parameter_server.server_coordinator import ServerCoordinator
from batchwright.training.parameter_server.server_process import ServerProcess
from batchwright.training.parameter_server.server_run import ServerRun
from batchwright.training.parameter_server.transport import Transport, connect
from gloo import Crew
from hosting import KEY, Pictures, Points, hosted, make_model, train, values_of, without_compiler
from served import make_served_plan

pytestmark = pytest.mark.slow
RULE = LearningRateRule(
    base=0.1, base_batch=8, scaling="linear", peak=0.15, warmup_epochs=1, decay="cosine"
)
EPOCHS = 3
TRAINED = Trained(steps=3, skipped=0, repeated=0, loss=1.0, rate=0.1, compute=0.5)


@pytest.fixture(autouse=True)
def own_environment():
    """A session in this very process reads the server's address from its environment."""
    before = dict(os.environ)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def crew():
    crew = Crew()
    yield crew
    crew.close()


def train_alone(plan, folder=None, **options):
    with hosted(plan, folder) as address:
        return train(0, plan.model_dump_json(), address, **options)


def train_both(crew, plan, folder=None, **options):
    with hosted(plan, folder) as address:
        return crew.together(train_with, plan.model_dump_json(), address, options, workers=2)


def train_with(rank, plan, address, options):
    without_compiler()
    return train(rank, plan, address, **options)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


# -------------------------------------------------------------------------------------- one worker


@pytest.mark.parametrize("hidden", [8, 0], ids=["perceptron", "resnet8"])
def test_one_worker_under_bsp_is_plain_sgd_to_the_bit(hidden):
    plan = make_served_plan((8,), (29,), server={"consistency": "bsp"}, rule=RULE, epochs=EPOCHS)
    served = train_alone(plan, hidden=hidden)["final"]
    assert same(served, plain_sgd(plan, samples=29, batch=8, hidden=hidden))


def plain_sgd(plan, samples, batch, hidden):
    """Written out: each epoch in its seeded order, a short tail joined to the step before."""
    model = make_model(hidden)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen, points = 0, (Points if hidden else Pictures)(samples)
    for epoch in range(EPOCHS):
        order = epoch_order(samples, epoch, plan.job.seed)
        for indices in order.split(step_sizes(samples, batch, workers=1, least=2)):
            items = [points[int(index)] for index in indices]
            features = torch.stack([item[0] for item in items])
            labels = torch.tensor([item[1] for item in items])
            factor = rate_factor(seen, rule=RULE, samples_per_epoch=samples, epochs=EPOCHS)
            optimizer.param_groups[0]["lr"] = 0.1 * (factor * RULE.peak / RULE.base)
            optimizer.zero_grad()
            functional.cross_entropy(model(features), labels).backward()
            optimizer.step()
            seen += len(indices)
    return values_of(model)


@pytest.mark.parametrize("rule", ["journal", "compsac"])
def test_one_worker_under_asp_follows_the_recurrence_of_its_rule(rule):
    factor = 0.4
    plan = make_served_plan((8,), (24,), factors=(factor,), server={"merge": rule}, epochs=EPOCHS)
    rounds = train_alone(plan)["rounds"]
    assert len(rounds) == EPOCHS
    for before, after in zip(rounds, [*rounds[1:], None], strict=True):
        for name, pushed in before["trained"].items():
            server, pulled = before["begun"][name], before["pulled"][name]
            expected = (server + factor * pushed) / (1 + factor)
            if rule == "compsac":
                expected = ((2 - factor) * server + factor * pushed) / 2
            if not pushed.is_floating_point():
                expected = pushed  # a counter: the largest
            assert torch.allclose(pulled, expected, atol=1e-6)
        assert after is None or same(after["begun"], before["pulled"])
    assert not same(rounds[0]["begun"], rounds[0]["pulled"])


def test_momentum_is_kept_unless_it_is_to_be_reset():
    plans = [
        make_served_plan((8,), (24,), server={"momentum": rule}, epochs=2)
        for rule in ("keep", "reset")
    ]
    kept, fresh = (train_alone(plan)["rounds"] for plan in plans)
    assert [one["momentum"] for one in fresh] == [0, 0]
    assert all(one["momentum"] for one in kept)
    assert same(kept[0]["trained"], fresh[0]["trained"])
    assert not same(kept[1]["trained"], fresh[1]["trained"])


def test_the_rate_follows_the_clock_of_the_rounds():
    plan = make_served_plan((8,), (24,), server={"exchange_steps": 2}, rule=RULE, epochs=2)
    steps = train_alone(plan)["steps"]
    rates = [
        0.1 * rate_factor(seen, rule=RULE, samples_per_epoch=24, epochs=2) * RULE.peak / RULE.base
        for seen in (0, 8, 16, 24, 32, 40)
    ]
    assert [rate for _, _, rate in steps] == pytest.approx(rates, rel=1e-12)


# ------------------------------------------------------------------------------------- two workers


@pytest.fixture(scope="module")
def weighted(crew, tmp_path_factory):
    """Two workers in step, the second with half the weight: what they did, and the run folder."""
    folder = tmp_path_factory.mktemp("served") / "run"
    plan = make_served_plan(
        (8, 4), (20, 13), factors=(1.0, 0.5), server={"consistency": "bsp"}, epochs=EPOCHS
    )
    return train_both(crew, plan, folder), folder


def test_under_bsp_all_get_the_weighted_mean_in_rank_order(weighted):
    (first, second), _ = weighted
    assert len(first["rounds"]) == len(second["rounds"]) == EPOCHS
    for one, other in zip(first["rounds"], second["rounds"], strict=True):
        assert same(one["begun"], other["begun"])
        assert same(one["pulled"], other["pulled"])
        for name, pulled in one["pulled"].items():
            ours, theirs = one["trained"][name], other["trained"][name]
            expected = torch.maximum(ours, theirs)
            if pulled.is_floating_point():
                expected = (ours * (1.0 / 1.5)).add(theirs, alpha=0.5 / 1.5)
            assert torch.equal(pulled, expected)


def test_every_sample_of_an_epoch_is_trained_on_once(weighted):
    (first, second), _ = weighted
    for one, other in zip(first["rounds"], second["rounds"], strict=True):
        assert sorted(one["indices"] + other["indices"]) == list(range(33))
        assert (len(one["indices"]), len(other["indices"])) == (20, 13)


def test_rounds_epochs_and_scores_are_on_record(weighted):
    workers, folder = weighted
    summary = read_record(folder / "summary.json", RunSummary)
    assert len(summary.rounds) == 2 * EPOCHS
    assert [epoch.samples for epoch in summary.epochs] == [33] * EPOCHS
    assert all(epoch.val_count == 7 for epoch in summary.epochs)
    assert {(one.worker, one.samples, one.steps) for one in summary.rounds} == {
        (0, 20, 3),
        (1, 13, 3),
    }
    assert {one.update_factor for one in summary.rounds if one.worker == 1} == {0.5}
    assert [due for due, _ in workers[0]["scores"]].count(True) + [
        due for due, _ in workers[1]["scores"]
    ].count(True) == EPOCHS


def test_the_checkpoint_is_the_merged_model_as_a_plain_state_dict(weighted):
    workers, folder = weighted
    model = make_model()
    content = load_checkpoint(folder / "checkpoints" / "last.pt")
    model.load_state_dict(content["model"])
    assert same(values_of(model), workers[0]["final"])
    assert content["state"]["samples_seen"] == 33 * EPOCHS
    best = load_checkpoint(folder / "checkpoints" / "best.pt")
    assert best["model"].keys() == content["model"].keys()


def test_evaluation_tells_the_others_the_last_known_scores(weighted):
    for worker in weighted[0]:
        assert all(scores == {} or scores.keys() == {"top1"} for _, scores in worker["scores"])
    known = [scores for worker in weighted[0] for _, scores in worker["scores"] if scores]
    assert len(known) >= EPOCHS


def test_of_several_evaluations_after_an_exchange_the_last_one_counts():
    """As without a server."""
    results = iter([({"top1": 1.0}, 4, 0), ({"top1": 3.0}, 4, 0)])
    run = SimpleNamespace(
        evaluation_due=True,
        _worker=SimpleNamespace(evaluate=lambda *_: next(results)),
        _state=SimpleNamespace(epoch=0),
        _clock=SimpleNamespace(leave_out=lambda _: None),
        _unsettled=Settled(0.5),
    )
    assert [ServerRun.evaluate(run, None)["top1"] for _ in range(2)] == [0.25, 0.75]
    assert (run._unsettled.scores, run._unsettled.count) == ({"top1": 3.0}, 4)


def test_equal_batches_are_a_plain_server(crew):
    options = {"server": {"consistency": "bsp", "small_workers": 1}, "epochs": 2}
    dual = train_both(crew, make_served_plan((6, 6), (18, 18), **options))
    plain = train_both(
        crew, make_served_plan((6, 6), (18, 18), server={"consistency": "bsp"}, epochs=2)
    )
    assert same(dual[0]["final"], plain[0]["final"])


def test_a_slow_link_slows_only_its_own_worker_under_asp(crew, tmp_path):
    plan = make_served_plan((4, 4), (16, 16), server={"exchange_steps": 2}, epochs=6)
    first, second = train_both(
        crew, plan, tmp_path / "run", delays={1: 0.5}, paces={0: 0.01, 1: 0.01}
    )
    assert len(first["rounds"]) > 2 * len(second["rounds"])
    summary = read_record(tmp_path / "run" / "summary.json", RunSummary)
    counts = Counter(one.worker for one in summary.rounds)
    assert counts == {0: len(first["rounds"]), 1: len(second["rounds"])}
    waits = [one.wait_seconds for one in summary.rounds if one.worker == 0]
    exchanges = [one.exchange_seconds for one in summary.rounds]
    assert median(waits) < 0.25 < max(exchanges)


def test_under_ssp_nobody_is_further_ahead_than_allowed(crew, tmp_path):
    server = {"exchange_steps": 1, "consistency": "ssp", "staleness": 2}
    plan = make_served_plan((4, 4), (16, 16), server=server, epochs=3)
    train_both(crew, plan, tmp_path / "run", paces={1: 0.15})
    summary = read_record(tmp_path / "run" / "summary.json", RunSummary)
    assert max(one.lead for one in summary.rounds) == 2


def test_samples_per_round_follow_the_measured_speeds(crew, tmp_path):
    options = {"server": {"consistency": "bsp"}, "dual": {"shares": "measured"}, "epochs": 4}
    plan = make_served_plan((4, 4), (24, 24), **options)
    workers = train_both(crew, plan, tmp_path / "run", speeds={0: 800.0, 1: 400.0})
    sizes = [[len(one["indices"]) for one in worker["rounds"]] for worker in workers]
    assert [one[:3] for one in sizes] == [[24, 24, 32], [24, 24, 16]]
    assert sum(one[3] for one in sizes) == 48
    assert 30 <= sizes[0][3] <= 34  # by then its own speed is measured once more, in real time
    notes = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "samples per round are now 32, 16" in notes
    for one, other in zip(*(worker["rounds"] for worker in workers), strict=True):
        assert sorted(one["indices"] + other["indices"]) == list(range(48))


# ------------------------------------------------------------------------------------ silence


def test_a_silent_worker_is_named_and_may_come_back(tmp_path, monkeypatch):
    """The server's patience ends once the worker is silent: all else may take its time."""
    ends = []

    def server_end(*given):
        ends.append(Transport(*given))
        return ends[-1]

    monkeypatch.setattr(server_process, "Transport", server_end)
    plan = make_served_plan((8,), (24,), epochs=2)
    with hosted(plan, tmp_path / "run") as address:
        link = connect(address, KEY, timeout=200)
        say_hello(link.send, make_model())
        link.send(Next())
        assert first_round(link).ticket is not None
        lose_patience(ends[0], 0.2)
        link.send(Beat())  # the last that it hears
        with suppress(OSError):
            while True:  # it beats, and is not answered
                link.receive()
        train(0, plan.model_dump_json(), address)
    notes = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "worker 0 (here/cpu:0) is lost (silent for 0.2 s): the others go on" in notes
    assert "came back: its unfinished round is repeated, with fresh momentum" in notes


def lose_patience(end, seconds):
    """What this end receives from now on, but for the next, must come within so long."""
    limit = struct.pack("ll", 0, int(1e6 * seconds))
    end._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    end._timeout = seconds


def test_a_worker_that_comes_back_does_not_draw_its_first_numbers_again():
    """Dropout would leave out the same features in the rounds after each loss."""
    plan = make_served_plan((8,), (24,), epochs=2)
    begun, again = (numbers_of(plan, ended=ended) for ended in (0, 1))
    assert begun[0] != again[0]
    assert begun == numbers_of(plan, ended=0)


def numbers_of(plan, *, ended):
    """What a new process draws at each step, after another has ended so many rounds."""
    with hosted(plan) as address:
        if ended:
            link = connect(address, KEY, timeout=200)
            say_hello(link.send, make_model())
            link.send(Next())
            first_round(link)
            link.send(TRAINED, pack(make_model()))
            first_round(link)
            link.close()
        os.environ.update({SERVER: address, SERVER_KEY: KEY.hex(), "RANK": "0"})
        os.environ.update({"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"})
        model, drawn = make_model(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Session(model, optimizer, Points(24), plan=plan, loaders=0) as session:
            torch.manual_seed(0)
            for _ in session.epochs():
                for features, labels, _ in session.batches():
                    drawn.append(float(torch.rand(())))
                    session.step(functional.cross_entropy(model(features), labels))
    return drawn


def test_an_evaluation_that_was_cut_short_is_all_that_is_left_to_do(tmp_path):
    plan = make_served_plan((8,), (24,), epochs=1)
    with hosted(plan, tmp_path / "run") as address:
        link = connect(address, KEY, timeout=200)
        say_hello(link.send, make_model())
        link.send(Next())
        pushed = pack(make_model())
        pushed.floats.add_(1.0)
        link.send(TRAINED, pushed)
        while first_round(link).ticket is not None:
            pass
        link.close()
        seen = train(0, plan.model_dump_json(), address)
    (turn,) = seen["rounds"]
    assert (turn["epoch"], turn["indices"]) == (0, [])
    ((due, scored),) = seen["scores"]
    assert due
    (epoch,) = read_record(tmp_path / "run" / "summary.json", RunSummary).epochs
    assert epoch.top1 == scored["top1"]
    assert not same(turn["pulled"], values_of(make_model()))  # it is the server's that counts


def test_a_worker_that_leaves_without_a_word_leaves_its_round_to_the_others(monkeypatch):
    """It is waited for as long as silence is borne: here not at all."""
    usual = ServerCoordinator.give_up_lost
    monkeypatch.setattr(
        ServerCoordinator,
        "give_up_lost",
        lambda self, _: usual(self, 0.0 if self.members.lost else 1e9),  # not before it has come
    )
    plan = make_served_plan((8, 8), (12, 12), epochs=1)
    with hosted(plan) as address:
        link = connect(address, KEY, timeout=200)
        say_hello(link.send, make_model())
        link.send(Next())
        other = ServerClient(address, KEY.hex(), 200, SimpleNamespace(number=0))
        other.hello(hello_of(make_model(), rank=1), None)
        starts = [other.next()[1].ticket.start]
        link.close()
        starts.append(other.push(pack(make_model()), TRAINED)[1].ticket.start)
        assert other.push(pack(make_model()), TRAINED)[1].ticket is None
        other.settle(Settled(exchange=0.0))
        other.bye()
        other.close()
    assert sorted(starts) == [0, 12]


def test_a_worker_has_left_the_server_that_it_waits_for():
    """Else each waits for the other, as long as either has patience."""
    done = []
    told = {
        name: SimpleNamespace(**{one: lambda *_, one=one: done.append(one) for one in names})
        for name, names in (("_client", ("bye", "close")), ("_child", ("wait",)))
    }
    stepper = SimpleNamespace(refuse_failed=lambda: None)
    ServerRun.finish(SimpleNamespace(**told, stepper=stepper, _settle=lambda: None))
    assert done == ["bye", "close", "wait"]


def test_a_run_whose_first_weights_will_never_come_ends():
    plan, orders = make_served_plan((8, 8), (12, 12)), [{"gone": 0}]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = ServerProcess(plan, None, resume=False, listener=listener, key=KEY, orders=orders)
        with pytest.raises(TrainingError, match="worker 0 is gone for good and had not brought"):
            server.serve()


# -------------------------------------------------------------------------------------- bad input


def test_another_model_is_refused_with_the_first_difference():
    plan = make_served_plan((8,), (24,))
    with hosted(plan) as address:
        visitor = connect(address, KEY, timeout=200)
        say_hello(visitor.send, make_model())
        assert visitor.receive().message == Welcome()
        visitor.close()
        with pytest.raises(
            PlanError, match=r"0\.weight \[9, 4\] float32 where they have 0\.weight \[8, 4\]"
        ):
            train(0, plan.model_dump_json(), address, hidden=9)
        train(0, plan.model_dump_json(), address)


def hello_of(model, *, rank=0):
    """What a worker says when it comes."""
    return Hello(
        rank=rank,
        place=f"here/cpu:{rank}",
        entries=tuple(layout(model)),
        description={},
    )


def say_hello(send, model):
    """What worker 0 says, which brings its weights."""
    send(hello_of(model), pack(model))


def first_round(link):
    """The next round that comes, or the news that there is none left."""
    while not isinstance(message := link.receive().message, Round):
        pass
    return message


def test_other_data_is_refused():
    plan = make_served_plan((8,), (24,))
    with hosted(plan) as address:
        with pytest.raises(PlanError, match="24"):
            train(0, plan.model_dump_json(), address, samples=25)
        train(0, plan.model_dump_json(), address)
