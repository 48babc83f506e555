"""Simulated workers and a parameter server: `dual-batch` and `hybrid`, in the order of events.

The steps are those of real workers, in the same loop; events in simulated time take the place of
connections. A worker's round is trained when it begins, from the weights that it pulls then; what
comes of it lies there until its push arrives. In between others push, pull and train.

    ask --> (wait until ready) --> pull, train --> door --> merge --> ask
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from batchwright.algorithms.simulated_clock import Cluster, Events, step_times
from batchwright.records.run_folder import BEST, KEPT, LAST
from batchwright.training.batches.feeding import Batch
from batchwright.training.batches.sampler import Step
from batchwright.training.checkpoints.checkpoint_manager import RunState
from batchwright.training.evaluate.evaluation import Evaluation
from batchwright.training.parameter_server.merging import Weights, pack, unpack
from batchwright.training.parameter_server.messages import Trained
from batchwright.training.parameter_server.parameter_server import ParameterServer
from batchwright.training.parameter_server.round_log import RoundLog, round_record
from batchwright.training.parameter_server.rounds import RoundAssignment
from batchwright.training.parameter_server.server_run import RoundWorker
from batchwright.training.recorder import Recorder
from batchwright.training.running import Setup
from batchwright.training.signals import stopped
from batchwright.training.simulated.simulated_workers import (
    Randomness,
    SimulatedGroup,
    note_cluster,
)
from batchwright.training.step.micro_batches import Turns
from batchwright.training.step.stepper import Stepper
from batchwright.workload.task import build_optimizer

SERVER = -1
"""The server's number among the workers in events; of events at one time, its come first."""

# Fields of a worker's state that its later rounds need.
_LEARNT = ("noise", "tensors", "micro_limits", "loss_scale")


@dataclass
class _Round:
    """A round that is trained, and not in the records yet. All times are simulated seconds.

    Attributes:
        ticket: The round.
        start: Time at which it began.
        finish: Time at which the worker was done.
        merged: Time at which its model was merged.
        steps: Steps of the round.
        skipped: Steps whose update was left out, because a gradient was not finite.
        repeated: Steps taken again, because memory ran out.
        loss: Mean training loss; ``None`` if it is not finite.
        rate: Learning rate of the last step.
        lead: Rounds ahead of the slowest worker when it began.
    """

    ticket: RoundAssignment
    start: float
    finish: float
    steps: int
    skipped: int
    loss: float | None
    rate: float
    lead: int
    merged: float = 0.0
    repeated: int = 0


class SimulatedRounds(Turns):
    """A run with a parameter server whose workers are all in this process.

    Args:
        setup: What is trained, and how; its group is this process alone.

    Attributes:
        state: How far the run is.

    Raises:
        PlanError: Nothing says how long a step takes.
        JobError: The job names workers that the plan does not have.
        FileError: The run folder holds a run already, or cannot be written.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup, self._plan, self._model = setup, setup.plan, setup.model
        plan, device, count = setup.plan, setup.group.device, setup.plan.workers
        self._cluster, self._times = Cluster(plan.job, count), step_times(plan)
        setups = [setup]
        for _ in range(1, count):
            rate = plan.learning_rate.base
            optimizer = build_optimizer(setup.model, plan.job, rate, name=plan.update)
            setups.append(replace(setup, optimizer=optimizer))
        self._workers = [
            RoundWorker(one, SimulatedGroup(device, count, rank).alone(), self)
            for rank, one in enumerate(setups)
        ]
        self._optimizers = [one.optimizer for one in setups]
        self._running = self._row = 0  # the worker and the plan's row of the round in progress
        self._work = 0.0  # seconds of the round in progress, at the usual speed
        self._scoring: int | None = None  # the epoch whose evaluation is due
        self._best = False  # whether an evaluation since the last checkpoint had the best score
        self.state, self._recorder = RunState(), Recorder(setup.folder, plan)
        self._checkpoints = setup.checkpoints(self._recorder)
        try:
            self._checkpoints.prepare(may_exist=setup.resume)
            if setup.resume:
                self._checkpoints.restore(self.state)
            note_cluster(self._recorder, count)
        except BaseException:
            self._checkpoints.close()
            raise
        self._randomness = Randomness(plan.job.seed, count, device)
        weights, samples = pack(setup.model), len(setup.feed)
        self._size = weights.floats.numel() * weights.floats.element_size()
        self._server = ParameterServer(weights, plan, samples)
        self._link = self._cluster.server_link(self._size)
        places = SimulatedGroup(device, count).places
        self._round_log = RoundLog(self._recorder, plan, samples, places)
        self._events = Events()
        for rank in range(count):
            self._events.add(0.0, rank, "ask")
        self._now = 0.0
        self._waiting: set[int] = set()
        self._trained: dict[int, _Round] = {}  # last round of each worker
        self._pending: dict[int, Weights] = {}  # models on their way to the server
        self._seconds: dict[int, tuple[int, float]] = {}  # row and seconds per sample, by worker
        self._recorded_samples = 0  # samples of the rounds that are in the records
        self._checkpoints.keep("virtual", self)

    @property
    def stepper(self) -> Stepper:
        """Takes the steps of the worker whose round is in progress."""
        return self._workers[self._running].stepper

    @property
    def evaluation_due(self) -> bool:
        """Whether an epoch has ended that is to be evaluated."""
        return self._scoring is not None

    def epochs(self) -> Iterator[int]:
        """The epochs of the rounds that are left, and epochs to evaluate, without batches."""
        self._recorder.training_begins()
        while self._events:
            event = self._events.next()
            self._now = event.time
            if event.kind == "ask":
                yield from self._ask(event.worker)
            elif event.kind == "door":
                self._events.add(self._link.receive(event.time), event.worker, "merge")
            elif event.kind == "merge":
                server, merges = self._server, self._server.merges
                server.push(event.worker, self._pending.pop(event.worker))
                self._trained[event.worker].merged = self._now
                self.state.steps += self._trained[event.worker].steps
                self._schedule_scoring(merges)
                self._waiting.add(event.worker)
                self._wake()
            else:
                yield from self._score()
            if self._events:
                self._stop_if_asked()

    def batches(self) -> Iterator[Batch]:
        """The micro-batches of the round in progress."""
        if self._scoring is None:
            yield from self._workers[self._running].batches(lambda _: None)

    def evaluate(self, what: Evaluation) -> None:
        """Score the merged model, by one worker as real ones do, outside of the simulated time."""
        assert self._scoring is not None  # noqa: S101 - it is due
        started, epoch = time.perf_counter(), self._scoring
        sums, count, stopping = self._workers[0].evaluate(what, epoch)
        if stopping:
            self._events.add(self._now, SERVER, "score")  # once more, after a resume
            self._stop_if_asked()
        self._round_log.scored(epoch, sums, count, time.perf_counter() - started)
        self._best = self.state.note_score(sums, count) or self._best

    def finish(self) -> None:
        """Write the last checkpoint and the summary, which says that the seconds are simulated."""
        self._publish()
        self._checkpoints.save(LAST, self.state, 1.0)
        self._checkpoints.settle()
        self._recorder.finish(simulated=True, rounds=tuple(self._round_log.rounds))

    def close(self) -> None:
        """Finish what is being written."""
        self._checkpoints.close()

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors."""
        return {
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "learnt": [{key: one.state.values()[key] for key in _LEARNT} for one in self._workers],
            "random": self._randomness.state_dict(),
            "server": self._server.state_dict(),
            "link": self._link.state_dict(),
            "events": self._events.state_dict(),
            "now": self._now,
            "waiting": sorted(self._waiting),
            "trained": {worker: asdict(one) for worker, one in self._trained.items()},
            "pending": {w: (one.floats, one.integers) for w, one in self._pending.items()},
            "seconds": {worker: list(one) for worker, one in self._seconds.items()},
            "booked": self._recorded_samples,
            "book": self._round_log.values(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        for optimizer, kept in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        for worker, learnt in zip(self._workers, state["learnt"], strict=True):
            worker.state.restore(learnt, worker.state.meter)
        self._randomness.load_state_dict(state["random"])
        self._server.load_state_dict(state["server"])
        self._link.load_state_dict(state["link"])
        self._events.load_state_dict(state["events"])
        self._now, self._waiting = state["now"], set(state["waiting"])
        self._trained = {
            worker: _Round(**{**kept, "ticket": RoundAssignment(**kept["ticket"])})
            for worker, kept in state["trained"].items()
        }
        self._pending = {w: Weights(*tensors) for w, tensors in state["pending"].items()}
        self._seconds = {worker: (row, one) for worker, (row, one) in state["seconds"].items()}
        self._recorded_samples = state["booked"]
        self._round_log.restore(state["book"])

    # ------------------------------------------------------------------------------------- events

    def _ask(self, rank: int) -> Iterator[int]:
        """Handle a worker that is ready: it pulls the model and trains a round, or has to wait."""
        server, merges, over = self._server, self._server.merges, self._recorder.over
        if over:  # who pushes no more holds up nobody
            for worker in set(range(self._plan.workers)) - self._pending.keys():
                server.lose(worker, for_good=False)
        if not server.ready(rank):
            self._waiting.add(rank)
            return
        ticket = None if over else server.take(rank)
        if ticket is None:
            self._record_round(rank, pull=0.0)
            self._schedule_scoring(merges)
            self._wake()
            return
        start = self._now
        if self._now > 0:  # at the start all have the weights
            start = self._link.send(self._now)
            start += self._cluster.transfer_seconds(rank, self._size)
        self._record_round(rank, pull=start - self._now)
        yield from self._train(rank, ticket, start)

    def _train(self, rank: int, ticket: RoundAssignment, start: float) -> Iterator[int]:
        """Train a round, and schedule the arrival of its push after the time that it takes."""
        lead, worker = self._server.rounds.lead(rank), self._workers[rank]
        self._running, self._row, self._work = rank, ticket.stage, 0.0
        worker.take(self._server.weights, ticket)
        with self._randomness.of(rank):
            yield ticket.epoch
        finish = self._cluster.workers[rank].finish(start, self._work)
        self._pending[rank] = pack(self._model)
        meter = worker.state.meter
        self._trained[rank] = _Round(
            ticket,
            start,
            finish,
            steps=meter.steps,
            skipped=meter.skipped,
            repeated=meter.repeated,
            loss=meter.mean_loss,
            rate=meter.rate,
            lead=lead,
        )
        self._seconds[rank] = ticket.stage, (finish - start) / ticket.samples
        arrival = finish + self._cluster.transfer_seconds(rank, self._size)
        self._events.add(arrival, rank, "door")

    @contextmanager
    def attempt(self, step: Step) -> Iterator[None]:
        """Add the simulated time of a step to the round in progress."""
        yield
        overhead = self._cluster.workers[self._running].overhead
        self._work += self._times[self._row].work(step.samples, overhead)

    def _wake(self) -> None:
        """Let all workers that wait ask again."""
        for worker in sorted(self._waiting):
            self._events.add(self._now, worker, "ask")
        self._waiting.clear()

    def _schedule_scoring(self, merges: int) -> None:
        """Schedule an evaluation if the model has changed since ``merges`` and an epoch is done."""
        if self._server.merges > merges and self._server.rounds.epochs_done > self.state.epoch:
            self._events.add(self._now, SERVER, "score")

    def _score(self) -> Iterator[int]:
        """End an epoch: have the merged model scored, make shares anew, write checkpoints."""
        rounds, state, checkpoints = self._server.rounds, self.state, self._checkpoints
        done, self._best = rounds.epochs_done, False
        self._publish()
        for epoch in filter(self._plan.evaluates_after, range(state.epoch, done)):
            self._scoring = epoch
            yield epoch
        self._scoring = None
        kept = [epoch + 1 for epoch in range(state.epoch, done) if self._plan.keeps_after(epoch)]
        state.epoch, state.samples_seen = done, rounds.committed
        if not rounds.finished:
            self._follow()
        for number in kept:
            checkpoints.settle()
            self._round_log.saved(checkpoints.save(f"{KEPT}{number}", state, 1.0))
        if self._best:
            self._round_log.saved(checkpoints.save(BEST, state, 1.0))
        if checkpoints.due(state.steps):
            self._round_log.saved(checkpoints.save(LAST, state, 1.0))

    def _stop_if_asked(self) -> None:
        """Write a checkpoint and stop, if a signal or the simulated deadline asks for it."""
        deadline, number = self._plan.job.goal.deadline, self._setup.stop.number
        late = deadline is not None and self._now > deadline and not self._recorder.over
        if not (number or late):
            return
        self._publish()
        self._checkpoints.save(LAST, self.state, 1.0)
        self._checkpoints.settle()
        where = f"at epoch {self.state.epoch + 1}, {self._now:.6g} simulated seconds"
        raise stopped(number, deadline, where)

    # ------------------------------------------------------------------------------------- records

    def _record_round(self, worker: int, *, pull: float) -> None:
        """Record the worker's last round, once its waiting and its ``pull`` seconds are known."""
        if worker not in self._trained:
            return
        one = self._trained.pop(worker)
        self._recorded_samples += one.ticket.samples
        compute = one.finish - one.start
        trained = Trained(one.steps, one.skipped, one.repeated, one.loss, one.rate, compute)
        record = round_record(
            self._plan,
            one.ticket,
            trained,
            start=one.start,
            exchange_seconds=one.merged - one.finish + pull,
            wait_seconds=self._now - one.merged,
            lead=one.lead,
        )
        self._round_log.add(record, rate=one.rate, committed=self._recorded_samples)

    def _follow(self) -> None:
        """Make shares anew by the simulated times, so that all end their rounds together."""
        plan, rounds = self._plan, self._server.rounds
        latest = max(row for row, _ in self._seconds.values())
        seconds = {worker: one for worker, (row, one) in self._seconds.items() if row == latest}
        if plan.job.dual.shares == "planned" or len(seconds) < plan.workers:
            return
        shares = rounds.follow(seconds)
        if shares is not None:
            listed = ", ".join(map(str, shares))
            self._recorder.note(f"samples per round, by measured speed: {listed}")

    def _publish(self) -> None:
        """Load the server's model into the network, for an evaluation or a checkpoint."""
        unpack(self._server.weights, self._model)
