"""Coordinates the workers of a parameter server: rounds out, models in, everything on record.

Each worker's connection has a thread of its own; what the threads share is here, under one lock.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from time import perf_counter
from typing import Any, NamedTuple

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
from batchwright.training.parameter_server.rounds import RoundAssignment, SpeedEstimate
from batchwright.training.parameter_server.transport import Transport
from batchwright.training.recorder import Recorder
from batchwright.training.step.epoch_totals import BestScore

Answer = tuple[Round | Farewell | Stopped, Weights | None]
"""Answer to a worker that waits: a round with the merged model, or the end without one."""


class KeptModel(NamedTuple):
    """A model that is to stay: the number of epochs trained, and `progress` as it was merged."""

    number: int
    weights: Weights
    progress: tuple[int, int, int]


class ServerCoordinator:
    """Coordinates the workers of one run.

    The first rounds go out when all workers have asked for one, in rank order among those that
    wait. So with ``bsp`` a run is the same whoever comes first. No round goes out while more than
    one model that is to stay waits to be taken for the disk: they would fill the memory. Only while
    there are two, a worker that is to evaluate goes on: with its round it gets the model of the
    epoch that has just ended, which would change while others end their rounds.

    A worker speaks through the connection that it joined with. Once another has taken its place, or
    the worker is lost or given up, every method that takes the connection raises `ConnectionError`:
    what is still on its way through it counts for nothing.

    Args:
        plan: A plan with a parameter server.
        recorder: Writes the records.

    Attributes:
        lock: Held by every method; for a caller that needs several answers of one moment.
        server: The merged model and its rounds; ``None`` until worker 0 has brought its weights.
        round_log: Records of the rounds.
        entries: How the model's weights lie in a message.
        description: What a user of the network must know about its input.
        steps: Updates so far, of all workers.
        begun: Whether the first rounds have gone out.
        members: Which workers are connected, lost or gone.
        evaluations: Which worker evaluates which epochs, and the scores.
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
        self.round_log = RoundLog(recorder, plan, self._samples, [""] * plan.workers)
        self._speeds = SpeedEstimate(published=plan.job.dual.shares == "published")
        self.members = Membership(plan.workers)
        self.round_log.gone = self.members.gone
        self.begun = False
        self._dismissed = False
        self._asked: dict[int, float] = {}  # workers that wait: since when, by this process's clock
        self._idle: dict[int, float] = {}  # workers without a round left: since when
        self._answers: dict[int, Answer] = {}
        self._rounds_begun: dict[int, tuple[float, int]] = {}  # seconds of the run, rounds ahead
        self._stop = 0
        self._kept: deque[KeptModel] = deque()  # not taken yet, the oldest first
        # Epochs that have ended with a model that waits for a merge, and whose it is.
        self._ended: list[tuple[int, int | None]] = []

    # ----------------------------------------------------------------------------- coming and going

    def join(self, hello: Hello, weights: Weights | None, link: Transport) -> None:
        """Let a worker join, for the first time or again.

        Raises:
            PlanError: Its model differs from the others'; plan and data it has compared itself.
        """
        with self.lock:
            rank = hello.rank
            difference = layout_difference(self.entries, hello.entries) if self.entries else ""
            if difference:
                raise PlanError(
                    f"the model of worker {rank} is not that of the others: {difference}; build "
                    "the same one on all workers"
                )
            if rank in self.members.links:  # started again before its end was noticed
                self.lose(rank, self.members.links[rank], "it was started again")
            self.round_log.places[rank] = hello.place
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
        """Note that a worker's connection has ended; the others go on.

        Args:
            rank: The worker.
            link: The connection; nothing happens if the worker has a newer one.
            why: The reason, in words.
        """
        with self.lock:
            if not self.members.is_current(rank, link):
                return
            self._cut_off(rank)
            if rank in self.members.left or self._dismissed:
                return
            if self.server is not None:
                self.server.lose(rank, for_good=False)
            self._hand_out()  # models that waited for this worker's may have ended an epoch
            if self._all_done:
                return
            self.members.lose(rank)
            text = f"worker {rank} ({self.round_log.places[rank]}) is lost ({why})"
            self._recorder.note(text if self.finished else f"{text}: the others go on")

    def give_up(self, rank: int) -> None:
        """Give up a worker that will not come back: the others share its samples.

        Raises:
            TrainingError: It is worker 0 and has not brought the first weights.
        """
        with self.lock:
            self._cut_off(rank)  # a message of it may still be on its way
            self._give_up(rank)

    def give_up_lost(self, seconds: float) -> None:
        """Give up workers that have been lost for so many seconds, if others are connected.

        A process that has ended without an error and without `leave` is not started again. Nor is
        one that other launchers have started, and that has ended before it came.
        """
        with self.lock:
            for rank in self.members.lost_for(seconds):
                begins = rank == 0 and self.server is None  # all need its weights, however late
                if self.members.links and not begins:
                    self._give_up(rank)

    def leave(self, rank: int, link: Transport) -> None:
        """Let a worker leave that needs nothing more; before training ends it is gone for good."""
        with self.lock:
            self.members.refuse_replaced(rank, link)
            self.members.left.add(rank)
            if not self.finished and not self._stop:
                self._give_up(rank)
            self.lock.notify_all()

    # ------------------------------------------------------------------------------------- rounds

    def ask(self, rank: int, link: Transport) -> None:
        """Note that a worker waits for a round; see `answer`."""
        with self.lock:
            self.members.refuse_replaced(rank, link)
            self._asked.setdefault(rank, perf_counter())
            self._hand_out()

    def answer(self, rank: int, link: Transport, seconds: float) -> Answer | None:
        """The answer to a worker that waits, once it is there; ``None`` after ``seconds``."""
        with self.lock:
            self.lock.wait_for(
                lambda: rank in self._answers or not self.members.is_current(rank, link),
                timeout=seconds,
            )
            self.members.refuse_replaced(rank, link)
            return self._answers.pop(rank, None)

    def push(
        self, rank: int, link: Transport, weights: Weights, trained: Trained, seconds: float
    ) -> None:
        """Take the model of a worker whose round has ended, and note that it waits for the next.

        Args:
            rank: The worker.
            link: The connection that the model came through.
            weights: The model.
            trained: Figures of the round.
            seconds: Seconds that the message took to arrive.
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
            self.round_log.await_rest(record, rate=trained.rate, committed=rounds.committed)
            self._speeds.add(rank, ticket.stage, ticket.samples, trained.compute)
            for epoch in range(epochs, rounds.epochs_done):
                self._ended.append((epoch, rank))
                self._follow_speeds(epoch)
            self.ask(rank, link)

    def settle(self, rank: int, link: Transport, settled: Settled) -> None:
        """Take a worker's figures of its last exchange and of an evaluation after it."""
        with self.lock:
            self.members.refuse_replaced(rank, link)
            for epoch in self.evaluations.take(rank, settled):
                assert settled.scores is not None  # noqa: S101 - it was taken
                self.round_log.scored(epoch, settled.scores, settled.count, settled.evaluation)
            self.round_log.complete(
                rank, exchange_seconds=settled.exchange, evaluation_seconds=settled.evaluation
            )
            if self._recorder.over:  # those that wait for others are done as well
                self._hand_out()
            self.lock.notify_all()

    # ----------------------------------------------------------------------------- for the process

    @property
    def finished(self) -> bool:
        """Whether every sample of every epoch was trained on, or an evaluation ended training."""
        with self.lock:
            ended = self.server is not None and self.server.rounds.finished
            return ended or self._recorder.over

    @property
    def deserted(self) -> bool:
        """Whether no worker is connected that needs anything, and none will come."""
        with self.lock:
            members = self.members
            needed = set(members.links) - members.left
            return members.absent or (self.begun and self._all_done and not needed)

    @property
    def stop_asked(self) -> int:
        """The signal with which a worker was asked to stop; 0: none."""
        return self._stop

    @property
    def time_is_up(self) -> bool:
        """Whether the deadline has passed while there is something left to train."""
        most = self._plan.job.goal.deadline
        late = most is not None and self._recorder.wall_seconds > most
        return late and self.begun and not self.finished

    @property
    def empty(self) -> bool:
        """Whether no worker is connected."""
        with self.lock:
            return not self.members.links

    @property
    def progress(self) -> tuple[int, int, int]:
        """Epochs trained, samples trained, updates of all workers."""
        with self.lock:
            if self.server is None:
                return 0, 0, 0
            rounds = self.server.rounds
            return rounds.epochs_done, rounds.committed, self.steps

    def ask_to_stop(self, rank: int, link: Transport, number: int) -> None:
        """Stop the run, because a worker was asked to by a signal."""
        with self.lock:
            self.members.refuse_replaced(rank, link)
            self.stop(number)

    def stop(self, number: int) -> None:
        """Stop the run, because of a signal; no more rounds go out."""
        with self.lock:
            self._stop = self._stop or number
            self.lock.notify_all()

    def take_best(self) -> Weights | None:
        """The model that is the best so far; ``None`` if it was taken already."""
        with self.lock:
            return self.evaluations.take_best()

    @property
    def keeps(self) -> bool:
        """Whether a model that is to stay was not taken yet."""
        with self.lock:
            return bool(self._kept)

    def take_kept(self) -> KeptModel | None:
        """The oldest model that is to stay and was not taken yet; ``None`` if there is none."""
        with self.lock:
            if not self._kept:
                return None
            kept = self._kept.popleft()
            self._hand_out()
            return kept

    def dismiss(self, word: Farewell | Stopped) -> list[Transport]:
        """Give all workers that wait a last answer; returns the connections of the others."""
        with self.lock:
            self._dismissed = True
            waiting = set(self.members.links) & (self._asked.keys() | self.members.left)
            self._answers.update(dict.fromkeys(waiting, (word, None)))
            self._asked.clear()
            self.lock.notify_all()
            return [link for rank, link in self.members.links.items() if rank not in waiting]

    def complete_rounds(self) -> None:
        """Record all rounds that have ended, whatever figures are still missing."""
        with self.lock:
            self.round_log.complete()

    def values(self) -> dict[str, Any]:
        """Plain values and tensors for a checkpoint."""
        with self.lock:
            assert self.server is not None  # noqa: S101 - or there is nothing to keep
            return {
                **self.server.state_dict(),
                "layout": [asdict(entry) for entry in self.entries],
                "book": self.round_log.values(),
                "entered": self.round_log.pending(),
                "ended": [epoch for epoch, _ in self._ended],
                **self.evaluations.values(),
            }

    def restore(self, values: Mapping[str, Any], steps: int, best: BestScore) -> None:
        """Go on from a checkpoint's `values`, before any worker has joined."""
        with self.lock:
            self.entries = tuple(
                Entry(**{**entry, "shape": tuple(entry["shape"])}) for entry in values["layout"]
            )
            self.server = ParameterServer(
                Weights(values["floats"], values["integers"]), self._plan, self._samples
            )
            self.server.load_state_dict(values)
            self.round_log.restore(values["book"], values["entered"])
            self.evaluations.restore(values, best)
            self._ended = [(epoch, None) for epoch in values.get("ended", ())]
            self.steps = steps

    # ----------------------------------------------------------------------------------- private

    def _cut_off(self, rank: int) -> None:
        self.members.cut_off(rank)
        self._forget(rank)

    def _give_up(self, rank: int) -> None:
        """Hand a worker's samples to the others."""
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
                text += f": samples per round are now {self._shares_in_words()}"
        self._recorder.note(text)
        self._hand_out()

    def _forget(self, rank: int) -> None:
        """Drop what a worker waits for and still owes: it is not there any more."""
        self._asked.pop(rank, None)
        self._idle.pop(rank, None)
        self._answers.pop(rank, None)
        self.round_log.complete(rank)
        self.evaluations.forget(rank)

    def _hand_out(self) -> None:
        """Answer all workers that wait and need not: with a round, or with none once finished."""
        server = self.server
        self._end_epochs()
        if server is not None and not self._stop and not self.begun:
            self.begun = len(self._asked.keys() | self.members.gone) == self._plan.workers
            if self.begun:
                self._recorder.training_begins()
        if server is not None and not self._stop and self.begun:
            again = not self.finished
            while again:  # a worker without a round left may set others free
                before, again = server.rounds.members, False
                for rank in sorted(self._asked):
                    if self._waits_for_disk(rank) or not server.ready(rank):
                        continue
                    ticket = server.take(rank)
                    if ticket is None:
                        self._end_epochs()  # those that waited for this worker have merged
                        self._idle.setdefault(rank, perf_counter())
                    else:
                        lead = server.rounds.lead(rank)
                        self._rounds_begun[rank] = self._recorder.training_seconds, lead
                        self._reply(server, rank, ticket)
                        again = True
                again = again or server.rounds.members != before
            if self.finished:
                for rank in self._asked:  # who pushes no more holds up no merge
                    server.lose(rank, for_good=False)
                self._end_epochs()
                for rank in list(self._asked):
                    self._reply(server, rank, None)
        self.lock.notify_all()

    def _waits_for_disk(self, rank: int) -> bool:
        """Whether a worker gets no round, since too many models that are to stay wait in memory."""
        kept = len(self._kept)
        return kept > 2 or (kept == 2 and not self.evaluations.wanted_of(rank))

    def _reply(self, server: ParameterServer, rank: int, ticket: RoundAssignment | None) -> None:
        now = perf_counter()
        since = self._idle.pop(rank, now)  # until then it waited for others, then it had no round
        waited = since - self._asked.pop(rank)
        self.round_log.note(rank, wait_seconds=waited)
        evaluate, scores = self.evaluations.ask(rank, server.weights), self.evaluations.scores
        self._answers[rank] = (
            Round(ticket, evaluate, scores, wait=waited, idle=now - since),
            server.weights,
        )

    @property
    def _all_done(self) -> bool:
        """Whether all is trained and evaluated."""
        return self.finished and not self.evaluations.missing

    def _end_epochs(self) -> None:
        """Have the model of ended epochs evaluated and kept, once it has all that was pushed.

        With ``bsp`` the push that completed an epoch's samples may wait for those of others. Its
        worker evaluates the epoch if it still waits for an answer then.
        """
        if self.server is None or not self.server.merged:
            return
        for epoch, rank in self._ended:
            if self._plan.evaluates_after(epoch):
                self.evaluations.want(epoch, rank if rank in self._asked else None)
            if self._plan.keeps_after(epoch):
                self._kept.append(KeptModel(epoch + 1, self.server.weights, self.progress))
        self._ended.clear()

    def _follow_speeds(self, epoch: int) -> None:
        """After a push that completed an epoch's samples: make shares anew."""
        assert self.server is not None  # noqa: S101 - it has just taken the push
        followed = self._plan.job.dual.shares != "planned" and len(self._speeds.seconds) > 1
        if followed and not self.finished:
            rounds = self.server.rounds
            stage = self._plan.stages[self._plan.stage_of(min(epoch + 1, self._plan.epochs - 1))]
            present = {w for w, share in enumerate(rounds.shares(stage)) if share}
            seconds = self._speeds.seconds
            if present <= seconds.keys() and rounds.follow(seconds):
                self._recorder.note(
                    "so that all workers end their rounds together, samples per round are now "
                    + self._shares_in_words()
                )

    def _shares_in_words(self) -> str:
        assert self.server is not None  # noqa: S101 - the callers have looked
        rounds = self.server.rounds
        epoch = min(rounds.handed_out // self._samples, self._plan.epochs - 1)
        shares = rounds.shares(self._plan.stages[self._plan.stage_of(epoch)])
        return ", ".join(map(str, shares))
