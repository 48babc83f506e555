"""A run with a parameter server, on a worker: it trains rounds alone, and exchanges models after.

Under our own launcher the server's address comes in the environment. Where another has started the
workers, such as torchrun, worker 0 starts the server and tells the others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from batchwright.distributed.group import Group
from batchwright.distributed.reducer import Reducer
from batchwright.distributed.rendezvous import own_address
from batchwright.distributed.server_child import PLACE, SERVER, SERVER_KEY, ServerChild
from batchwright.errors import LostWorkerError, PlanError
from batchwright.records import Stage
from batchwright.training.batches.feeding import Batch
from batchwright.training.batches.randomness import seed_worker
from batchwright.training.batches.sampler import Step
from batchwright.training.checkpoints.checkpoint_manager import RunState
from batchwright.training.evaluate.evaluation import Evaluation
from batchwright.training.parameter_server.merging import Weights, layout, pack, unpack
from batchwright.training.parameter_server.messages import Hello, Round, Settled, Trained
from batchwright.training.parameter_server.round_split import RoundSharing
from batchwright.training.parameter_server.rounds import RoundAssignment
from batchwright.training.parameter_server.server_client import ServerClient
from batchwright.training.running import Setup
from batchwright.training.session_checks import other_number
from batchwright.training.step.clock import clock_for
from batchwright.training.step.epoch_totals import EpochMeter
from batchwright.training.step.micro_batches import EpochBatches, Turns

_LAST_SECONDS = 30.0  # for the server to end, after it has said farewell


class RoundWorker:
    """Trains the rounds of one worker, in whose steps nobody else takes part.

    Args:
        setup: What is trained, and how.
        group: A group of this worker alone.
        turns: Contexts of its steps and micro-batches.

    Attributes:
        state: How far its steps are; the meter is the round's.
        clock: Books the time of its steps.
        sharing: Divides the round into steps.
        reducer: Sums gradients over micro-batches.
        stepper: Takes the steps.

    Raises:
        PlanError: What is trained is not all in the model, or exchanges statistics.
    """

    def __init__(self, setup: Setup, group: Group, turns: Turns | None = None) -> None:
        trained = setup.parameters
        if len(trained) != len(list(setup.model.parameters())):
            raise PlanError(
                "the optimizer trains parameters outside of the model, and a parameter server "
                "merges the model's only: make them a part of the model"
            )
        values = setup.model.state_dict().values()
        if any(isinstance(value, Tensor) and value.is_complex() for value in values):
            raise PlanError(
                "the model has complex numbers among its weights or buffers, and a parameter "
                "server merges real ones: use a method without a server"
            )
        if setup.synchronized:
            raise PlanError(
                "SyncBatchNorm exchanges statistics between all workers in each forward pass, and "
                "those of a parameter server step for themselves: use plain BatchNorm "
                "(batch_norm=worker), or a method without a server"
            )
        self._setup = setup
        self.state, self.clock = RunState(), clock_for(group.device)
        self.sharing = RoundSharing(
            setup.plan,
            self.state,
            group.places[0],
            samples=len(setup.feed),
            least=setup.least,
            weights=setup.sample_weights,
        )
        self.reducer = Reducer(trained, group, per_tensor=setup.per_tensor)
        self.rates = setup.rates()
        self.stepper, self._micro_batches = setup.step_loop(
            group, self.state, self.sharing, self.reducer, self.rates, self.clock, turns=turns
        )

    def take(self, weights: Weights, ticket: RoundAssignment | None) -> None:
        """Load the merged model, and begin a round from it; ``None``: no round is left."""
        unpack(weights, self._setup.model)
        assert self._setup.plan.server is not None  # noqa: S101 - or there were no rounds
        if self._setup.plan.server.momentum == "reset":
            self._setup.optimizer.state.clear()
        self.sharing.ticket = None
        if ticket is not None:
            self.sharing.begin(ticket)
            self.state.meter = EpochMeter(epoch=ticket.epoch)

    def batches(self, after_step: Callable[[Step], None]) -> Iterator[Batch]:
        """The round's micro-batches; ``after_step`` is called after each step."""
        self._setup.settings.enter(self.sharing.stage)
        for epoch, steps in self.sharing.stretches():
            resolution = self.sharing.stage.resolution
            yield from self._micro_batches.through(steps, epoch, resolution, after_step)

    def evaluate(self, what: Evaluation, epoch: int) -> tuple[dict[str, float], int, int]:
        """Evaluate a model on this worker alone, at the end of an epoch; see `Setup.evaluated`."""
        return self._setup.evaluated(
            what,
            group=self._setup.group.alone(),
            shares=(1,),
            order=self.sharing.order(epoch),
            epoch=epoch,
            between_epochs=True,
        )


class ServerRun:
    """A worker's run with a parameter server: its rounds, and the exchanges between them.

    Args:
        setup: What is trained, and how.

    Attributes:
        stepper: Takes the steps.

    Raises:
        PlanError: The plan is for another number of workers, or what is trained is not all in the
            model.
        LostWorkerError: The server cannot be reached.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup, self._plan = setup, setup.plan
        self._model, self._group = setup.model, setup.group.alone()
        self._worker = RoundWorker(setup, self._group)
        self._state, self._clock = self._worker.state, self._worker.clock
        self._sharing, self.stepper = self._worker.sharing, self._worker.stepper
        self._batches: EpochBatches | None = None
        self._answer: Round | None = None  # the server's last answer
        self._unsettled: Settled | None = None  # of an exchange before an evaluation
        self.rank, self.world_size = _place(setup)
        if self.world_size != self._plan.workers:
            raise other_number(self._plan.workers, self.world_size)
        self._child: ServerChild | None = None
        try:
            self._client = self._connect()
        except BaseException:
            self._close_child()
            raise

    @property
    def stage(self) -> Stage:
        """The plan's row of the round in progress."""
        return self._sharing.stage

    @property
    def local_batch_sizes(self) -> tuple[int, ...]:
        """Samples per step of each worker, in rank order, in the plan's row of this round."""
        return self.stage.local_batch_sizes

    @property
    def noise_scale(self) -> float | None:
        """Gradient noise scale of this worker's micro-batches, in samples; ``None``: unknown."""
        return self._state.noise.noise_scale

    @property
    def evaluation_due(self) -> bool:
        """Whether the server has asked this worker to evaluate the model that it has just given."""
        return self._answer is not None and self._answer.evaluate is not None

    def keep(self, name: str, thing: Any) -> None:
        """Refuse to keep a thing: checkpoints are the server's, which has no worker's things."""
        del thing
        raise PlanError(
            f"session.keep({name!r}): with a parameter server checkpoints hold the merged model "
            f"only, and what else a worker has is lost with it; train with method=plain to keep it"
        )

    def epochs(self) -> Iterator[int]:
        """The rounds that are left, each as the epoch that most of its samples are of.

        Before them comes an epoch without batches, if a lost worker or a stop has left it to be
        evaluated.
        """
        weights, answer = self._client.next()
        if answer.evaluate is not None:
            self._take(weights, replace(answer, ticket=None))
            self._sharing.stand(answer.evaluate)
            self._setup.settings.enter(self.stage)
            self._unsettled = Settled(exchange=0.0)
            yield answer.evaluate
            self._settle()
        self._take(weights, replace(answer, evaluate=None))
        if answer.ticket is not None and answer.ticket.number >= self.world_size:
            # Not a first round: this process stands in for one that has drawn its numbers already.
            seed_worker(self._plan.job.seed, answer.ticket.number, self.rank)
        while self._sharing.ticket is not None:
            ticket = self._sharing.ticket
            self._batches = EpochBatches(self._round(), self.stepper, self._clock)
            yield ticket.epoch
            if self._sharing.ticket is ticket:
                raise RuntimeError(
                    f"a round of {ticket.samples} samples in epoch {ticket.epoch + 1} was not "
                    "ended: go through all of session.batches()"
                )
            self._settle()
        self._batches = None

    def batches(self) -> Iterator[Batch]:
        """The micro-batches that are left of the round; after them the model is exchanged."""
        if self._unsettled is not None:
            return  # there is only an evaluation to do
        if self._batches is None:
            raise RuntimeError(
                "session.batches() outside of session.epochs(): loop over the epochs first"
            )
        yield from self._batches

    def _round(self) -> Generator[Batch, None, None]:
        yield from self._worker.batches(self._after_step)
        self._exchange()

    def evaluate(self, what: Evaluation) -> dict[str, float]:
        """Mean of each value over all of a held-out set, if it is this worker's turn.

        The last of several evaluations after an exchange is the one that counts.
        """
        if not self.evaluation_due:
            return dict(self._answer.scores) if self._answer is not None else {}
        started = time.perf_counter()
        sums, count, stopped = self._worker.evaluate(what, self._state.epoch)
        if stopped:
            self._client.stop(self._setup.stop.number)
        seconds = time.perf_counter() - started
        self._clock.leave_out(seconds)
        settled = self._unsettled
        if settled is not None:
            whole = settled.evaluation + seconds
            self._unsettled = replace(settled, scores=sums, count=count, evaluation=whole)
        return {name: value / count for name, value in sums.items()}

    def finish(self) -> None:
        """Say goodbye to the server; returns when it has written everything.

        Raises:
            RuntimeError: The loop was left for an error of a step that it has caught.
        """
        self.stepper.refuse_failed()
        self._settle()
        self._client.bye()
        self._client.close()  # the server waits for all to go, and is waited for below
        if self._child is not None:
            self._child.wait(_LAST_SECONDS)

    def close(self) -> None:
        """Close the connection, and end the server if it is this worker's child."""
        if self._batches is not None:
            self._batches.close()
        self._client.close()
        self._worker.reducer.close()
        self._worker.rates.close()
        self._close_child()

    # ------------------------------------------------------------------------------------ exchanges

    def _after_step(self, step: Step) -> None:
        del step
        if self._setup.stop.number:
            self._client.stop(self._setup.stop.number)
        self._client.look()

    def _exchange(self) -> None:
        """Push the model of the round; get the merged model and the next round."""
        meter = self._state.meter
        started = time.perf_counter()
        trained = Trained(
            steps=meter.steps,
            skipped=meter.skipped,
            repeated=meter.repeated,
            loss=meter.mean_loss,
            rate=meter.rate,
            compute=meter.training,
            peak=meter.peak,
        )
        weights, answer = self._client.push(pack(self._model), trained)
        self._take(weights, answer)
        exchange = time.perf_counter() - started - answer.wait - answer.idle
        self._unsettled = Settled(max(0.0, exchange))
        if answer.evaluate is None:
            self._settle()

    def _take(self, weights: Weights, answer: Round) -> None:
        self._worker.take(weights, answer.ticket)
        self._answer = answer

    def _settle(self) -> None:
        """Tell the server how long exchange and evaluation took, once no evaluation follows."""
        if self._unsettled is not None:
            self._client.settle(self._unsettled)
            self._unsettled = None

    # --------------------------------------------------------------------------------------- set-up

    def _connect(self) -> ServerClient:
        """Connect to the server, and introduce this worker."""
        if SERVER in os.environ:
            address, key = os.environ[SERVER], os.environ[SERVER_KEY]
        else:
            address, key = self._start_server()
        timeout = self._plan.job.timeout
        client = ServerClient(address, key, timeout, self._setup.stop)
        try:
            own = int(os.environ.get(PLACE, self.rank))
            hello = Hello(
                rank=own,
                place=self._group.places[0],
                entries=tuple(layout(self._model)),
                description=self._setup.feed.description(),
            )
            client.hello(hello, pack(self._model) if own == 0 else None)
        except BaseException:
            client.close()
            raise
        return client

    def _start_server(self) -> tuple[str, str]:
        """Worker 0 starts the server; returns its address and key, on all workers.

        Raises:
            PlanError: On worker 0: the server refuses the plan or the run folder.
            LostWorkerError: On the others, for the same reason.
        """
        problem = ""
        if self.rank == 0:
            plan = self._plan.model_dump(mode="json")
            lock = self._setup.lock
            self._child = ServerChild(plan, self._setup.folder, host=own_address(), lock=lock)
            self._child.start(resume=self._setup.resume)
            problem = self._child.wait_until_ready()
        child = self._child
        reached = (child.address, child.key, problem) if child is not None else None
        address, key, problem = self._setup.group.hand_out(reached, 0)
        if problem:
            raise PlanError(problem) if self.rank == 0 else LostWorkerError(problem)
        return address, key

    def _close_child(self) -> None:
        if self._child is not None:
            self._child.close()


def _place(setup: Setup) -> tuple[int, int]:
    """Rank and number of workers; under our own launcher they are no process group."""
    if SERVER in os.environ:
        return int(os.environ["RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    return setup.group.rank, setup.group.size
