"""Virtual workers and a parameter server: dual-batch and hybrid, in the true order of events.

A worker's round is trained when it begins, from the weights that it pulls then; what comes of it
lies there until its push arrives, in simulated time. In between others push, pull and train.

    ask --> (wait until ready) --> pull, train --> door --> merge --> ask
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from batchwright.algorithms.simulated_clock import Events
from batchwright.distributed.reducer import Reducer, Tally
from batchwright.errors import TrainingError
from batchwright.records import RoundRecord
from batchwright.training.batches.sampler import micro_batches, step_sizes
from batchwright.training.parameter_server.merging import Weights, pack, unpack
from batchwright.training.parameter_server.parameter_server import ParameterServer
from batchwright.training.parameter_server.round_log import RoundLog
from batchwright.training.parameter_server.rounds import RoundAssignment, segments
from batchwright.training.simulated.simulated_run import VirtualRun
from batchwright.training.simulated.simulated_workers import Randomness, SimulatedGroup
from batchwright.training.step.gradient_scaling import Adaptive, Learnt
from batchwright.training.step.normalization import Statistics
from batchwright.training.step.stepper import MOST_BAD_STEPS
from batchwright.workload.host import is_out_of_memory
from batchwright.workload.task import build_optimizer

SERVER = -1
"""Stands for the server among the workers; before all of them at the same time."""


@dataclass
class _Round:
    """A round that is trained, and not in the records yet.

    Attributes:
        ticket: What it was.
        start: When it began, in simulated seconds, as all times.
        finish: When the worker was done.
        merged: When its model was merged.
        steps: Updates asked for.
        skipped: Those left out because a gradient was not finite.
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


class VirtualRounds:
    """Trains as a plan with a parameter server says.

    Args:
        run: What it stands on; may be one that goes on.
    """

    def __init__(self, run: VirtualRun) -> None:
        self._run, plan, workers = run, run.plan, run.plan.workers
        self._network, job = run.task.network, plan.job
        self._optimizers = [
            run.task.optimizer,
            *(
                build_optimizer(self._network, job, plan.learning_rate.base, name=plan.update)
                for _ in range(1, workers)
            ),
        ]
        self._updaters = [run.updater(optimizer) for optimizer in self._optimizers]
        self._reducer = Reducer(
            run.parameters, SimulatedGroup(run.device, 1), per_tensor=self._updaters[0].per_tensor
        )
        self._statistics = Statistics(self._network)
        self._learnt = [Learnt() for _ in range(workers)]
        self._randomness = Randomness(job.seed, workers, run.device)
        weights = pack(self._network)
        self._size = weights.floats.numel() * weights.floats.element_size()
        self._server = ParameterServer(weights, plan, run.samples)
        self._link = run.cluster.server_link(self._size)
        places = SimulatedGroup(run.device, workers).places
        self._book = RoundLog(run.recorder, plan, run.samples, places)
        self._events = Events()
        for worker in range(workers):
            self._events.add(0.0, worker, "ask")
        self._now = 0.0
        self._waiting: set[int] = set()
        self._trained: dict[int, _Round] = {}  # of each worker, the last one
        self._pending: dict[int, Weights] = {}  # what is on its way to the server
        self._seconds: dict[int, tuple[int, float]] = {}  # row and seconds per sample, by worker
        self._booked = 0  # samples of the rounds that are in the records
        self._bad_steps = 0
        run.keeper.keep("virtual", self)

    def train(self) -> None:
        """From where the run is to its end."""
        run = self._run
        while self._events:
            event = self._events.next()
            self._now = event.time
            if event.kind == "ask":
                self._ask(event.worker)
            elif event.kind == "door":
                self._events.add(self._link.receive(event.time), event.worker, "merge")
            elif event.kind == "merge":
                self._merge(event.worker)
            else:
                self._score()
            if run.stop_wished(self._now) and self._events:
                self._publish()
                run.stop_if_asked(self._now)
        self._publish()
        run.keeper.save("last", run.state, 1.0)
        run.fields["rounds"] = tuple(self._book.rounds)

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors."""
        return {
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "learnt": [one.values() for one in self._learnt],
            "random": self._randomness.state_dict(),
            "server": self._server.state_dict(),
            "link": self._link.state_dict(),
            "events": self._events.state_dict(),
            "now": self._now,
            "waiting": sorted(self._waiting),
            "trained": {worker: asdict(one) for worker, one in self._trained.items()},
            "pending": {w: (one.floats, one.integers) for w, one in self._pending.items()},
            "seconds": {worker: list(one) for worker, one in self._seconds.items()},
            "booked": self._booked,
            "book": self._book.values(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        for optimizer, kept in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        self._learnt = [Learnt.from_values(values) for values in state["learnt"]]
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
        self._booked = state["booked"]
        self._book.restore(state["book"])

    # ------------------------------------------------------------------------------------- events

    def _ask(self, worker: int) -> None:
        """A worker wants to go on: it pulls and trains, or has to wait."""
        server = self._server
        if not server.ready(worker):
            self._waiting.add(worker)
            return
        merges = server.merges
        ticket = None if self._run.recorder.reached else server.take(worker)
        if ticket is None:
            self._book_round(worker, pull=0.0)
            self._look(merges)
            self._wake()
            return
        start = self._now
        if self._now > 0:  # at the start all have the weights
            start = self._link.send(self._now)
            start += self._run.cluster.transfer_seconds(worker, self._size)
        self._book_round(worker, pull=start - self._now)
        self._begin(worker, ticket, start)

    def _begin(self, worker: int, ticket: RoundAssignment, start: float) -> None:
        """Train a round; its push is under way as soon as the worker would be done."""
        run, lead = self._run, self._server.rounds.lead(worker)
        with self._randomness.of(worker):
            work, trained = self._train(worker, ticket)
        finish = run.cluster.workers[worker].finish(start, work)
        self._pending[worker] = pack(self._network)
        self._trained[worker] = _Round(ticket, start, finish, *trained, lead)
        self._seconds[worker] = ticket.stage, (finish - start) / ticket.samples
        arrival = finish + run.cluster.transfer_seconds(worker, self._size)
        self._events.add(arrival, worker, "door")

    def _merge(self, worker: int) -> None:
        """A worker's model is there."""
        server, merges = self._server, self._server.merges
        server.push(worker, self._pending.pop(worker))
        self._trained[worker].merged = self._now
        self._run.state.steps += self._trained[worker].steps
        self._look(merges)
        self._waiting.add(worker)
        self._wake()

    def _wake(self) -> None:
        """All that wait ask again."""
        for worker in sorted(self._waiting):
            self._events.add(self._now, worker, "ask")
        self._waiting.clear()

    def _look(self, merges: int) -> None:
        """Where the model has changed and an epoch's worth is in it, score it before all else."""
        if self._server.merges > merges and self._server.rounds.epochs_done > self._run.state.epoch:
            self._events.add(self._now, SERVER, "score")

    def _score(self) -> None:
        """An epoch is done: score the merged model, share anew, keep a checkpoint."""
        run, rounds, state = self._run, self._server.rounds, self._run.state
        done, best = rounds.epochs_done, False
        self._publish()
        for epoch in range(state.epoch, done):
            if not run.evaluation_due(epoch):
                continue
            scores = run.evaluate(epoch, (1,))  # by one worker, as real ones do
            if scores is None:  # a stop signal: once more, later
                self._events.add(self._now, SERVER, "score")
                return
            self._book.scored(epoch, *scores)
            best = run.is_best(*scores[:2]) or best
        state.epoch, state.samples_seen = done, rounds.committed
        if not rounds.finished:
            self._follow()
        if best:
            self._book.saved(run.keeper.save("best", state, 1.0))
        if run.keeper.due(state.steps):
            self._book.saved(run.keeper.save("last", state, 1.0))

    # ------------------------------------------------------------------------------------ training

    def _train(
        self, worker: int, ticket: RoundAssignment
    ) -> tuple[float, tuple[int, int, float | None, float]]:
        """Train a round from the server's weights; the network has what comes of it.

        Returns:
            Seconds of work, and (steps, skipped ones, mean loss, rate of the last step).
        """
        run = self._run
        stage, times = run.plan.stages[ticket.stage], run.times[ticket.stage]
        if run.plan.server is not None and run.plan.server.momentum == "reset":
            self._optimizers[worker].state.clear()
        run.settings.enter(stage)
        unpack(self._server.weights, self._network)
        work, loss, done, steps, skipped = 0.0, 0.0, 0, 0, 0
        batch = stage.local_batch_sizes[worker]
        for epoch, first, last in segments(ticket, run.samples):
            sizes = step_sizes(last - first, batch, workers=1, least=run.least)
            cut = [micro_batches(size, stage.micro_batch_size, run.least) for size in sizes]
            parts = run.order(epoch)[first:last].split([size for one in cut for size in one])
            fed = run.feed.training(list(parts), epoch, stage.resolution)
            for size, micros in zip(sizes, cut, strict=True):
                self._statistics.keep()
                for left, samples in zip(range(len(micros), 0, -1), micros, strict=True):
                    loss += self._backward(next(fed), samples, size) * samples
                    if left > 1:
                        self._reducer.take(samples / size)
                seen = ticket.samples_seen(done)
                skipped += not self._update(worker, ticket, seen, micros)
                work += times.work(size, run.cluster.workers[worker].overhead)
                done, steps = done + size, steps + 1
        mean = loss / done
        known = mean if mean - mean == 0 else None
        return work, (steps, skipped, known, self._updaters[worker].rate)

    def _backward(self, batch: Any, samples: int, size: int) -> float:
        """A micro-batch's part of a step's gradient; returns its mean loss."""
        images, labels = batch
        try:
            with self._run.cast():
                value = self._run.task.mean_loss(images, labels)
            (value * (samples / size)).backward()
            return float(value.detach())
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise TrainingError(
                f"not enough memory for {samples} samples at once: plan with micro_batch="
                f"{max(1, samples // 2)} or less"
            ) from error

    def _update(
        self, worker: int, ticket: RoundAssignment, samples_seen: float, micros: Sequence[int]
    ) -> bool:
        """A step of these micro-batches, of whose last the gradients are not summed yet.

        Returns:
            Whether the weights changed.
        """
        updater, plan, size = self._updaters[worker], self._run.plan, sum(micros)
        tally = self._reducer.finish(Tally(weight=size, loss=0.0), micros[-1] / size)
        norms = updater.rescale(tally, 1.0)
        adaptive = Adaptive(plan, self._learnt[worker])
        adaptation = adaptive.of_step(size)
        adaptive.learn(tally, norms, batch=size)
        updated = updater.apply(norms, samples_seen, plan.stages[ticket.stage], adaptation)
        updater.clear()
        self._statistics.end(updated=updated)
        self._bad_steps = 0 if updated else self._bad_steps + 1
        if self._bad_steps >= MOST_BAD_STEPS:
            raise TrainingError(
                f"gradients were infinite or not a number for {MOST_BAD_STEPS} steps in a row "
                f"(epoch {ticket.epoch + 1}, worker {worker}): lower learning_rate, now "
                f"{updater.rate:.3g}, or set clip_norm"
            )
        return updated

    # ------------------------------------------------------------------------------------- records

    def _book_round(self, worker: int, *, pull: float) -> None:
        """The worker's last round is over, its waiting and pulling included."""
        if worker not in self._trained:
            return
        one = self._trained.pop(worker)
        ticket = one.ticket
        stage = self._run.plan.stages[ticket.stage]
        self._booked += ticket.samples
        record = RoundRecord(
            worker=worker,
            number=ticket.number,
            epoch=ticket.epoch,
            resolution=stage.resolution,
            local_batch_size=stage.local_batch_sizes[worker],
            samples=ticket.samples,
            steps=one.steps,
            skipped_steps=one.skipped,
            update_factor=ticket.factor,
            loss=one.loss,
            start=one.start,
            compute_seconds=one.finish - one.start,
            exchange_seconds=one.merged - one.finish + pull,
            wait_seconds=self._now - one.merged,
            lead=one.lead,
        )
        self._book.add(record, rate=one.rate, committed=self._booked)

    def _follow(self) -> None:
        """Make shares again by the simulated times, so that all end their rounds together."""
        plan, rounds = self._run.plan, self._server.rounds
        latest = max(row for row, _ in self._seconds.values())
        seconds = {worker: one for worker, (row, one) in self._seconds.items() if row == latest}
        if plan.job.dual.shares != "measured" or len(seconds) < plan.workers:
            return
        made = rounds.follow(seconds)
        if made is not None:
            listed = ", ".join(map(str, made))
            self._run.recorder.note(f"samples per round, by measured speed: {listed}")

    def _publish(self) -> None:
        """The network is the server's model, as evaluation and checkpoints want it."""
        unpack(self._server.weights, self._network)
