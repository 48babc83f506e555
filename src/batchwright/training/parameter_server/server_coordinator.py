"""What a parameter server does for its workers: rounds out, models in, everything on record.

Each worker's connection has a thread of its own; whatever they share is here, under one lock.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import asdict
from time import perf_counter
from typing import Any

from batchwright.errors import PlanError, TrainingError
from batchwright.records import Plan
from batchwright.training.parameter_server.evaluations import Evaluations
from batchwright.training.parameter_server.membership import Membership
from batchwright.training.parameter_server.merging import Entry, Weights, layout_difference
from batchwright.training.parameter_server.messages import (
    Farewell,
    Hello,
    Round,
    Settled,
    Stopped,
    Trained,
)
from batchwright.training.parameter_server.parameter_server import ParameterServer
from batchwright.training.parameter_server.round_log import RoundLog, round_record
from batchwright.training.parameter_server.rounds import RoundAssignment
from batchwright.training.parameter_server.speed_estimate import SpeedEstimate
from batchwright.training.parameter_server.transport import Transport
from batchwright.training.recorder import Recorder

Answer = tuple[Round | Farewell | Stopped, Weights | None]
"""What a worker gets that waits: a round, or the end; and a model along with a round."""


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
        members: Who is there, and who is not.
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
        self._pace = SpeedEstimate(published=plan.job.dual.shares == "published")
        self.members = Membership(plan.workers)
        self.book.gone = self.members.gone
        self.begun = False
        self._dismissed = False
        self._asked: dict[int, float] = {}  # since when, by the clock of this process
        self._idle: dict[int, float] = {}  # since when there has been nothing left to do
        self._answers: dict[int, Answer] = {}
        self._rounds_begun: dict[int, tuple[float, int]] = {}  # when, and how far ahead
        self._stop = 0

    # ----------------------------------------------------------------------------- coming and going

    def join(self, hello: Hello, weights: Weights | None, link: Transport) -> None:
        """A worker has come, for the first time or again.

        Raises:
            PlanError: Its data, its model or its rank is not that of the others.
        """
        with self.lock:
            self._refuse(hello)
            rank = hello.rank
            if rank in self.members.links:  # started again before its end was noticed
                self.lose(rank, self.members.links[rank], "it was started again")
            self.book.places[rank] = hello.place
            self.entries, self.description = hello.entries, dict(hello.description)
            if self.server is None and weights is not None:
                self.server = ParameterServer(weights, self._plan, self._samples)
                for worker in self.members.gone:
                    self.server.lose(worker, for_good=True)
            known = self.server.rounds.gone if self.server is not None else frozenset()
            if self.server is not None and (rank in self.members.lost or rank in known):
                self.server.come_back(rank)
                text = f"worker {rank} ({hello.place}) came back"
                if rank in self.server.rounds.open:
                    text += ": its unfinished round is repeated, with fresh momentum"
                self._recorder.note(text)
            self.members.join(rank, link)
            self._hand_out()

    def lose(self, rank: int, link: Transport, why: str) -> None:
        """A worker's connection has ended; others go on.

        Args:
            rank: The worker.
            link: The connection; nothing happens if there is a newer one.
            why: In words.
        """
        with self.lock:
            if not self.members.speaks(rank, link):
                return
            self._cut_off(rank)
            if rank in self.members.left or self._through or self._dismissed:
                return
            self.members.lose(rank)
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
            for rank in self.members.lost_for(seconds):
                if self.members.links:
                    self._give_up(rank)

    def leave(self, rank: int, link: Transport) -> None:
        """A worker has nothing more to do; before the end of training it is gone for good."""
        with self.lock:
            self.members.refuse_replaced(rank, link)
            self.members.left.add(rank)
            if not self.finished and not self._stop:
                self._give_up(rank)
            self.lock.notify_all()

    # ------------------------------------------------------------------------------------- rounds

    def ask(self, rank: int, link: Transport) -> None:
        """A worker waits for a round; see `answer`."""
        with self.lock:
            self.members.refuse_replaced(rank, link)
            self._asked.setdefault(rank, perf_counter())
            self._hand_out()

    def answer(self, rank: int, link: Transport, seconds: float) -> Answer | None:
        """What a worker gets, as soon as it is there, but after ``seconds`` nothing."""
        with self.lock:
            self.lock.wait_for(
                lambda: rank in self._answers or not self.members.speaks(rank, link),
                timeout=seconds,
            )
            self.members.refuse_replaced(rank, link)
            return self._answers.pop(rank, None)

    def push(
        self, rank: int, link: Transport, weights: Weights, trained: Trained, seconds: float
    ) -> None:
        """A worker's round has ended.

        Args:
            rank: The worker.
            link: The connection that its model came through.
            weights: Its model.
            trained: What it says of the round.
            seconds: That the message took to come in.
        """
        with self.lock:
            self.members.refuse_replaced(rank, link)
            assert self.server is not None  # noqa: S101 - or there were no rounds
            started = perf_counter()
            rounds = self.server.rounds
            epochs = rounds.epochs_done
            ticket = self.server.push(rank, weights)
            self.steps += trained.steps
            spent = seconds + perf_counter() - started
            start, lead = self._rounds_begun.get(ticket.worker, (0.0, 0))
            record = round_record(
                self._plan,
                ticket,
                trained,
                start=start,
                exchange_seconds=spent,
                wait_seconds=0.0,
                lead=lead,
            )
            self.book.await_rest(record, rate=trained.rate, committed=rounds.committed)
            self._pace.add(rank, ticket.stage, ticket.samples, trained.compute)
            for epoch in range(epochs, rounds.epochs_done):
                self._end_epoch(rank, epoch)
            self.ask(rank, link)

    def settle(self, rank: int, link: Transport, settled: Settled) -> None:
        """A worker says how long its last exchange took, and how good the model is."""
        with self.lock:
            self.members.refuse_replaced(rank, link)
            for epoch in self.evaluations.take(rank, settled):
                assert settled.scores is not None  # noqa: S101 - it was taken
                self.book.scored(epoch, settled.scores, settled.count, settled.evaluation)
            self.book.complete(
                rank, exchange_seconds=settled.exchange, evaluation_seconds=settled.evaluation
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
            members = self.members
            through = self.begun and self._through and not set(members.links) - members.left
            return members.absent or through

    @property
    def stop_asked(self) -> int:
        """The signal with which a worker was asked to stop; 0: none."""
        return self._stop

    @property
    def empty(self) -> bool:
        """Whether no worker is connected."""
        with self.lock:
            return not self.members.links

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
            self.members.refuse_replaced(rank, link)
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

    def dismiss(self, word: Farewell | Stopped) -> list[Transport]:
        """Give all workers that wait a last answer; returns the connections of those that don't."""
        with self.lock:
            self._dismissed = True
            waiting = set(self.members.links) & (self._asked.keys() | self.members.left)
            self._answers.update(dict.fromkeys(waiting, (word, None)))
            self._asked.clear()
            self.lock.notify_all()
            return [link for rank, link in self.members.links.items() if rank not in waiting]

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

    def _refuse(self, hello: Hello) -> None:
        rank, most = hello.rank, self._plan.workers
        if not 0 <= rank < most:
            raise PlanError(f"worker {rank} is none of the plan's {most}: start {most} workers")
        if hello.samples != self._samples:
            raise PlanError(
                f"worker {rank} has {hello.samples} training samples and the plan "
                f"{self._samples}: give all workers the same data"
            )
        difference = layout_difference(self.entries, hello.entries) if self.entries else ""
        if difference:
            raise PlanError(
                f"the model of worker {rank} is not that of the others: {difference}; build the "
                "same one on all workers"
            )

    def _cut_off(self, rank: int) -> None:
        self.members.cut_off(rank)
        self._forget(rank)

    def _give_up(self, rank: int) -> None:
        """The others share a worker's samples."""
        if self.server is None and rank == 0:
            raise TrainingError(
                "worker 0 is gone for good and had not brought the first weights, which all "
                "begin with: look into its log, and resume the run"
            )
        self.members.give_up(rank)
        self._forget(rank)
        text = f"worker {rank} is gone for good"
        if self.server is not None and rank not in self.server.rounds.gone:
            self.server.lose(rank, for_good=True)
            others = len(self.members.gone) < self._plan.workers and not self.finished
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
        if server is not None and not self._stop and not self.begun:
            self.begun = len(self._asked.keys() | self.members.gone) == self._plan.workers
            if self.begun:
                self._recorder.training_begins()
        if server is not None and not self._stop and self.begun:
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
                    self._reply(server, rank, None)
        self.lock.notify_all()

    def _begin(self, server: ParameterServer, rank: int, ticket: RoundAssignment) -> None:
        self._rounds_begun[rank] = self._recorder.training_seconds, server.rounds.lead(rank)
        self._reply(server, rank, ticket)

    def _reply(self, server: ParameterServer, rank: int, ticket: RoundAssignment | None) -> None:
        now = perf_counter()
        since = self._idle.pop(rank, now)  # from then on it did not wait for others, but was done
        waited = since - self._asked.pop(rank)
        self.book.note(rank, wait_seconds=waited)
        evaluate, scores = self.evaluations.ask(rank, server.weights), self.evaluations.scores
        self._answers[rank] = (
            Round(ticket, evaluate, scores, wait=waited, idle=now - since),
            server.weights,
        )

    @property
    def _through(self) -> bool:
        """Whether there is nothing left to do for anybody."""
        return self.finished and not self.evaluations.missing

    def _end_epoch(self, rank: int, epoch: int) -> None:
        """By a worker's push an epoch's worth of samples is done."""
        assert self.server is not None  # noqa: S101 - it has just taken that
        if self._plan.evaluates_after(epoch):
            self.evaluations.want(epoch, rank)
        followed = self._plan.job.dual.shares != "planned" and len(self._pace.seconds) > 1
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
