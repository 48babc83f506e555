"""What a parameter server does for its workers: rounds out, models in, everything on record.

Each worker's connection has a thread of its own; whatever they share is here, under one lock.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

from batchwright.errors import PlanError, TrainingError
from batchwright.records import Plan, RoundRecord
from batchwright.training.parameter_server.evaluations import Evaluations
from batchwright.training.parameter_server.merging import Entry, Weights, layout_difference
from batchwright.training.parameter_server.parameter_server import ParameterServer
from batchwright.training.parameter_server.round_log import RoundLog
from batchwright.training.parameter_server.rounds import RoundAssignment
from batchwright.training.parameter_server.speed_estimate import SpeedEstimate
from batchwright.training.parameter_server.transport import Transport
from batchwright.training.recorder import Recorder


@dataclass(frozen=True)
class Arrival:
    """What a worker says of itself when it comes.

    Attributes:
        rank: The worker.
        place: Where it computes.
        samples: Size of its data set.
        entries: How its model's weights lie in a message.
        description: What a user of the network must know of its input.
    """

    rank: int
    place: str
    samples: int
    entries: tuple[Entry, ...]
    description: Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """What a worker gets that waits: a round, or the end (``done``, ``stop``, ``farewell``)."""

    kind: str
    weights: Weights | None
    values: Mapping[str, Any]


class ServerCoordinator:
    """Serves the workers of one run.

    Rounds begin when all workers have asked for one, and go out in rank order among those that
    wait, so that with ``bsp`` a run is the same whoever comes first.

    A worker speaks through the connection that it joined with. Once another has taken its place, or
    the worker is lost or given up, every method that takes the connection raises `ConnectionError`:
    what is still on its way through it counts for nothing.

    Args:
        plan: With a parameter server.
        recorder: Takes the records.

    Attributes:
        lock: Held by every method; for a caller that needs several answers of one moment.
        server: The core; ``None`` until worker 0 has brought the first weights.
        book: The rounds.
        entries: How the weights lie.
        description: Of the network's input.
        steps: Updates of all workers.
        begun: Whether the first rounds went out.
        evaluations: Who evaluates, and what came of it.
    """

    def __init__(self, plan: Plan, recorder: Recorder) -> None:
        self.lock = threading.Condition(threading.RLock())
        self.server: ParameterServer | None = None
        self.entries: tuple[Entry, ...] = ()
        self.description: dict[str, Any] = {}
        self.evaluations = Evaluations()
        self.steps = 0
        self._plan, self._recorder = plan, recorder
        self._samples = plan.data.train_samples
        self.book = RoundLog(recorder, plan, self._samples, [""] * plan.workers)
        self._pace = SpeedEstimate()
        self._links: dict[int, Transport] = {}
        self._lost: dict[int, float] = {}  # since when, by the clock of this process
        self._gone: set[int] = set()
        self._left: set[int] = set()
        self.begun = False
        self._dismissed = False
        self._asked: dict[int, float] = {}  # since when, as above
        self._idle: dict[int, float] = {}  # since when there has been nothing left to do
        self._answers: dict[int, Answer] = {}
        self._rounds_begun: dict[int, tuple[float, int]] = {}  # when, and how far ahead
        self._stop = 0

    # ----------------------------------------------------------------------------- coming and going

    def join(self, arrival: Arrival, weights: Weights | None, link: Transport) -> None:
        """A worker has come, for the first time or again.

        Raises:
            PlanError: Its data, its model or its rank is not that of the others.
        """
        with self.lock:
            self._refuse(arrival)
            rank = arrival.rank
            if rank in self._links:  # started again before its end was noticed
                self.lose(rank, self._links[rank], "it was started again")
            self._links[rank] = link
            self.book.places[rank] = arrival.place
            self.entries, self.description = arrival.entries, dict(arrival.description)
            if self.server is None and weights is not None:
                self.server = ParameterServer(weights, self._plan, self._samples)
                for worker in self._gone:
                    self.server.lose(worker, for_good=True)
            known = self.server.rounds.gone if self.server is not None else frozenset()
            if self.server is not None and (rank in self._lost or rank in known):
                self.server.come_back(rank)
                text = f"worker {rank} ({arrival.place}) came back"
                if rank in self.server.rounds.open:
                    text += ": its unfinished round is repeated, with fresh momentum"
                self._recorder.note(text)
            self._lost.pop(rank, None)
            self._gone.discard(rank)
            self._left.discard(rank)
            self.book.gone.discard(rank)
            self._hand_out()

    def lose(self, rank: int, link: Transport, why: str) -> None:
        """A worker's connection has ended; others go on.

        Args:
            rank: The worker.
            link: The connection; nothing happens if there is a newer one.
            why: In words.
        """
        with self.lock:
            if self._links.get(rank) is not link:
                return
            self._cut_off(rank)
            if rank in self._left or self._through or self._dismissed:
                return
            self._lost[rank] = perf_counter()
            text = f"worker {rank} ({self.book.places[rank]}) is lost ({why})"
            self._recorder.note(text if self.finished else f"{text}: the others go on")
            if self.server is not None:
                self.server.lose(rank, for_good=False)
            self._hand_out()

    def give_up(self, rank: int) -> None:
        """A worker is lost for good: the others share its samples.

        Raises:
            TrainingError: It was to bring the first weights.
        """
        with self.lock:
            self._cut_off(rank)  # it may have said something before its end
            self._give_up(rank)

    def give_up_lost(self, seconds: float) -> None:
        """Workers that have been lost for so long are so for good, if others are there.

        Nobody starts a process again that has ended without an error and without a word.
        """
        with self.lock:
            now = perf_counter()
            for rank in [one for one, since in self._lost.items() if now - since >= seconds]:
                if self._links:
                    self._give_up(rank)

    def leave(self, rank: int, link: Transport) -> None:
        """A worker has nothing more to do; before the end of training it is gone for good."""
        with self.lock:
            self._refuse_replaced(rank, link)
            self._left.add(rank)
            if not self.finished and not self._stop:
                self._give_up(rank)
            self.lock.notify_all()

    # ------------------------------------------------------------------------------------- rounds

    def ask(self, rank: int, link: Transport) -> None:
        """A worker waits for a round; see `answer`."""
        with self.lock:
            self._refuse_replaced(rank, link)
            self._asked.setdefault(rank, perf_counter())
            self._hand_out()

    def answer(self, rank: int, link: Transport, seconds: float) -> Answer | None:
        """What a worker gets, as soon as it is there, but after ``seconds`` nothing."""
        with self.lock:
            self.lock.wait_for(
                lambda: rank in self._answers or self._links.get(rank) is not link,
                timeout=seconds,
            )
            self._refuse_replaced(rank, link)
            return self._answers.pop(rank, None)

    def push(
        self, rank: int, link: Transport, weights: Weights, told: Mapping[str, Any], seconds: float
    ) -> None:
        """A worker's round has ended.

        Args:
            rank: The worker.
            link: The connection that its model came through.
            weights: Its model.
            told: ``steps``, those of them ``skipped`` and ``repeated``, ``loss``, ``rate`` and
                ``compute``, in seconds, of the round.
            seconds: That the message took to come in.
        """
        with self.lock:
            self._refuse_replaced(rank, link)
            assert self.server is not None  # noqa: S101 - or there were no rounds
            started = perf_counter()
            rounds = self.server.rounds
            epochs = rounds.epochs_done
            ticket = self.server.push(rank, weights)
            self.steps += told["steps"]
            spent = seconds + perf_counter() - started
            self._enter(ticket, told, spent)
            self._pace.add(rank, ticket.stage, ticket.samples, told["compute"])
            for epoch in range(epochs, rounds.epochs_done):
                self._end_epoch(rank, epoch)
            self.ask(rank, link)

    def settle(self, rank: int, link: Transport, told: Mapping[str, Any]) -> None:
        """A worker says how long its last exchange took, and how good the model is.

        Args:
            rank: The worker.
            link: The connection that it said so through.
            told: ``exchange`` and ``evaluation``, in seconds; ``scores``, sums by name, and their
                ``count``, or no scores.
        """
        with self.lock:
            self._refuse_replaced(rank, link)
            found = self.evaluations.take(rank, told)
            if found is not None:
                for epoch in found.epochs:
                    self.book.scored(epoch, found.sums, found.count, found.seconds)
            self.book.complete(
                rank, exchange_seconds=told["exchange"], evaluation_seconds=told["evaluation"]
            )
            if self._recorder.reached:  # those that wait for others are done, too
                self._hand_out()
            self.lock.notify_all()

    # ----------------------------------------------------------------------------- for the process

    @property
    def finished(self) -> bool:
        """Whether every sample of every epoch was trained on, or the target is reached."""
        with self.lock:
            ended = self.server is not None and self.server.rounds.finished
            return ended or self._recorder.reached

    @property
    def deserted(self) -> bool:
        """Whether nobody is there any more, nor will come."""
        with self.lock:
            absent = len(self._left | self._gone) == self._plan.workers
            through = self.begun and self._through and not set(self._links) - self._left
            return absent or through

    @property
    def stop_asked(self) -> int:
        """The signal with which a worker was asked to stop; 0: none."""
        return self._stop

    @property
    def empty(self) -> bool:
        """Whether no worker is connected."""
        with self.lock:
            return not self._links

    @property
    def progress(self) -> tuple[int, int, int]:
        """Whole epochs that are done, samples that are done, updates."""
        with self.lock:
            if self.server is None:
                return 0, 0, 0
            rounds = self.server.rounds
            return rounds.epochs_done, rounds.committed, self.steps

    def ask_to_stop(self, rank: int, link: Transport, number: int) -> None:
        """A worker was asked to stop, by a signal: all are to stop."""
        with self.lock:
            self._refuse_replaced(rank, link)
            self.stop(number)

    def stop(self, number: int) -> None:
        """All are to stop, because of a signal."""
        with self.lock:
            self._stop = self._stop or number
            self.lock.notify_all()

    def take_best(self) -> Weights | None:
        """A model that is the best so far and that nobody has taken yet."""
        with self.lock:
            return self.evaluations.take_best()

    def dismiss(self, answer: Answer) -> list[Transport]:
        """Give all workers that wait a last answer; returns the connections of those that don't."""
        with self.lock:
            self._dismissed = True
            waiting = set(self._links) & (self._asked.keys() | self._left)
            self._answers.update(dict.fromkeys(waiting, answer))
            self._asked.clear()
            self.lock.notify_all()
            return [link for rank, link in self._links.items() if rank not in waiting]

    def close_book(self) -> None:
        """Enter all rounds that have ended, whatever is still missing of them."""
        with self.lock:
            self.book.complete()

    def values(self) -> dict[str, Any]:
        """Plain values and tensors for a checkpoint."""
        with self.lock:
            assert self.server is not None  # noqa: S101 - or there is nothing to keep
            return {
                **self.server.state_dict(),
                "layout": [asdict(entry) for entry in self.entries],
                "book": self.book.values(),
                "entered": self.book.pending(),
                **self.evaluations.values(),
            }

    def restore(self, values: Mapping[str, Any], steps: int, best_score: float) -> None:
        """Go on from a checkpoint; nobody has come yet."""
        with self.lock:
            self.entries = tuple(
                Entry(**{**entry, "shape": tuple(entry["shape"])}) for entry in values["layout"]
            )
            self.server = ParameterServer(
                Weights(values["floats"], values["integers"]), self._plan, self._samples
            )
            self.server.load_state_dict(values)
            self.book.restore(values["book"], values["entered"])
            self.evaluations.restore(values, best_score)
            self.steps = steps

    # ------------------------------------------------------------------------------------ in here

    def _refuse(self, arrival: Arrival) -> None:
        rank, most = arrival.rank, self._plan.workers
        if not 0 <= rank < most:
            raise PlanError(f"worker {rank} is none of the plan's {most}: start {most} workers")
        if arrival.samples != self._samples:
            raise PlanError(
                f"worker {rank} has {arrival.samples} training samples and the plan "
                f"{self._samples}: give all workers the same data"
            )
        difference = layout_difference(self.entries, arrival.entries) if self.entries else ""
        if difference:
            raise PlanError(
                f"the model of worker {rank} is not that of the others: {difference}; build the "
                "same one on all workers"
            )

    def _refuse_replaced(self, rank: int, link: Transport) -> None:
        if self._links.get(rank) is not link:
            raise ConnectionError(f"this is not the connection of worker {rank} any more")

    def _cut_off(self, rank: int) -> None:
        """End a worker's connection, if it has one; whoever receives from it closes it."""
        link = self._links.pop(rank, None)
        if link is not None:
            link.cut()
        self._forget(rank)

    def _give_up(self, rank: int) -> None:
        """The others share a worker's samples."""
        if self.server is None and rank == 0:
            raise TrainingError(
                "worker 0 is gone for good and had not brought the first weights, which all "
                "begin with: look into its log, and resume the run"
            )
        self._gone.add(rank)
        self.book.gone.add(rank)
        self._lost.pop(rank, None)
        self._forget(rank)
        text = f"worker {rank} is gone for good"
        if self.server is not None and rank not in self.server.rounds.gone:
            self.server.lose(rank, for_good=True)
            others = len(self._gone) < self._plan.workers and not self.finished
            if others and self.server.rounds.whole:
                text += f": samples per round are now {self._told_shares()}"
        self._recorder.note(text)
        self._hand_out()

    def _forget(self, rank: int) -> None:
        """A worker is not there any more: it waits for nothing and tells nothing."""
        self._asked.pop(rank, None)
        self._idle.pop(rank, None)
        self._answers.pop(rank, None)
        self.book.complete(rank)
        self.evaluations.forget(rank)

    def _hand_out(self) -> None:
        """Give all that wait and need not what is theirs."""
        server = self.server
        if server is not None and not self._stop and self._all_asked():
            again = not self.finished
            while again:  # that there is no round left for one may set others free
                before, again = server.rounds.members, False
                for rank in sorted(self._asked):
                    if not server.ready(rank):
                        continue
                    ticket = server.take(rank)
                    if ticket is None:
                        self._idle.setdefault(rank, perf_counter())
                    else:
                        self._begin(server, rank, ticket)
                        again = True
                again = again or server.rounds.members != before
            if self.finished:
                for rank in list(self._asked):
                    self._reply(server, rank, "done")
        self.lock.notify_all()

    def _all_asked(self) -> bool:
        if not self.begun and len(self._asked.keys() | self._gone) == self._plan.workers:
            self.begun = True
            self._recorder.training_begins()
        return self.begun

    def _begin(self, server: ParameterServer, rank: int, ticket: RoundAssignment) -> None:
        self._rounds_begun[rank] = self._recorder.training_seconds, server.rounds.lead(rank)
        self._reply(server, rank, "round", ticket=asdict(ticket))

    def _reply(self, server: ParameterServer, rank: int, kind: str, **values: Any) -> None:
        now = perf_counter()
        since = self._idle.pop(rank, now)  # from then on it did not wait for others, but was done
        waited = since - self._asked.pop(rank)
        self.book.note(rank, wait_seconds=waited)
        told = {
            "evaluate": self.evaluations.ask(rank, server.weights),
            "scores": self.evaluations.scores,
            "wait": waited,
            "idle": now - since,
        }
        self._answers[rank] = Answer(kind, server.weights, {**values, **told})

    @property
    def _through(self) -> bool:
        """Whether there is nothing left to do for anybody."""
        return self.finished and not self.evaluations.missing

    def _end_epoch(self, rank: int, epoch: int) -> None:
        """By a worker's push an epoch's worth of samples is done."""
        assert self.server is not None  # noqa: S101 - it has just taken that
        if self._plan.evaluates_after(epoch):
            self.evaluations.want(epoch, rank)
        followed = self._plan.job.dual.shares == "measured" and len(self._pace.seconds) > 1
        if followed and not self.finished:
            shares = self.server.rounds.shares
            stage = self._plan.stages[self._plan.stage_of(min(epoch + 1, self._plan.epochs - 1))]
            present = {w for w, share in enumerate(shares(stage)) if share}
            if present <= self._pace.seconds.keys() and self.server.rounds.follow(
                self._pace.seconds
            ):
                self._recorder.note(
                    "so that all workers end their rounds together, samples per round are now "
                    + self._told_shares()
                )

    def _told_shares(self) -> str:
        assert self.server is not None  # noqa: S101 - the callers have looked
        rounds = self.server.rounds
        epoch = min(rounds.handed_out // self._samples, self._plan.epochs - 1)
        shares = rounds.shares(self._plan.stages[self._plan.stage_of(epoch)])
        return ", ".join(map(str, shares))

    def _enter(self, ticket: RoundAssignment, told: Mapping[str, Any], exchange: float) -> None:
        assert self.server is not None  # noqa: S101 - it has just taken the round
        stage = self._plan.stages[ticket.stage]
        start, lead = self._rounds_begun.get(ticket.worker, (0.0, 0))
        record = RoundRecord(
            worker=ticket.worker,
            number=ticket.number,
            epoch=ticket.epoch,
            resolution=stage.resolution,
            local_batch_size=stage.local_batch_sizes[ticket.worker],
            samples=ticket.samples,
            steps=told["steps"],
            skipped_steps=told["skipped"],
            repeated_steps=told["repeated"],
            update_factor=ticket.factor,
            loss=told["loss"],
            start=start,
            compute_seconds=told["compute"],
            exchange_seconds=exchange,
            wait_seconds=0.0,
            lead=lead,
            peak_bytes=told.get("peak") or None,
        )
        committed = self.server.rounds.committed
        self.book.await_rest(record, rate=told["rate"], committed=committed)
