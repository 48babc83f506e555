"""Parts of `methods.dual_batch`: its network, and timed pushes to a parameter server."""

from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing.connection import Connection

from torch import nn

from batchwright.distributed.server_child import ServerChild
from batchwright.records import Plan, ServerRule
from batchwright.training.parameter_server.merging import layout, pack
from batchwright.training.parameter_server.messages import Hello, Settled, Trained
from batchwright.training.parameter_server.server_client import ServerClient
from batchwright.training.signals import StopRequest
from batchwright.workload.task import build_network
from benchmarks.harness.loads import pin
from benchmarks.harness.plans import ENDLESS, facts_of, fixed_plan, job_from, made_up_data

RESNET8 = "benchmarks.methods.served_arms:resnet8"
SIDE, CLASSES = 32, 100

PUSHED, SAMPLES = "resnet18", 50_000
LEAD_IN = 2
TIMEOUT_SECONDS = 120.0
TRAINED = Trained(steps=1, skipped=0, repeated=0, loss=1.0, rate=0.1, compute=0.01)


def resnet8(num_classes: int) -> nn.Module:
    """`resnet8`, whose worker keeps to the core of its local rank.

    A job names this function by its import path, so a process that builds the network to measure or
    to train, is pinned then. A process that is no worker is not pinned.
    """
    rank = os.environ.get("LOCAL_RANK")
    if rank is not None and int(os.environ.get("RANK", "0")) >= 0:
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) > 1:  # else it is pinned already
            pin(cores[int(rank) % len(cores)])
    return build_network("resnet8", classes=num_classes, side=SIDE)


# ----------------------------------------------------------------------------------------- pushes


def pushes_per_second(workers: int, seconds: float) -> float:
    """Pushes a second, each with its merge and pull, of all ``workers`` together.

    Every worker is a process that sends all weights of a `resnet18` to the parameter server of a
    training and gets the merged ones back, as fast as it can, under `asp`.

    Args:
        workers: Number of processes.
        seconds: Time during which each counts its pushes, once all have begun.

    Raises:
        RuntimeError: The server does not start, or a worker ended.
    """
    context = multiprocessing.get_context("spawn")
    server = ServerChild(_plan(workers).model_dump(mode="json"), None)
    pipes, processes = [], []
    try:
        server.start(resume=False)
        if problem := server.wait_until_ready():
            raise RuntimeError(f"no parameter server: {problem}")
        for rank in range(workers):
            ours, theirs = context.Pipe()
            arguments = (theirs, server.address, server.key, rank, seconds)
            processes.append(context.Process(target=_push, args=arguments, daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        counted = [_received(pipe, seconds) for pipe in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()
        server.close()
    return sum(count / elapsed for count, elapsed in counted)


def _received(pipe: Connection, seconds: float) -> tuple[int, float]:
    if not pipe.poll(TIMEOUT_SECONDS + seconds):
        raise RuntimeError("a worker that pushes and pulls hangs")
    try:
        found: tuple[int, float] = pipe.recv()
    except EOFError:
        raise RuntimeError("a worker that pushes and pulls ended") from None
    return found


def _push(pipe: Connection, address: str, key: str, rank: int, seconds: float) -> None:
    """Push for ``seconds``; send the number of pushes, and the seconds that they really took."""
    network = build_network(PUSHED, classes=CLASSES, side=SIDE)
    weights = pack(network)
    client = ServerClient(address, key, TIMEOUT_SECONDS, StopRequest())
    hello = Hello(
        rank=rank,
        place=f"here/cpu:{rank}",
        entries=tuple(layout(network)),
        description={},
    )
    client.hello(hello, weights if rank == 0 else None)
    client.next()  # once all have come
    count, began = -LEAD_IN, time.perf_counter()
    while count < 1 or time.perf_counter() - began < seconds:
        if count == 0:
            began = time.perf_counter()
        started = time.perf_counter()
        client.push(weights, TRAINED)
        client.settle(Settled(exchange=time.perf_counter() - started))
        count += 1
    pipe.send((count, time.perf_counter() - began))
    while True:  # the others are still counting
        client.push(weights, TRAINED)
        client.settle(Settled(exchange=0.0))


def _plan(workers: int) -> Plan:
    """A plan of endless rounds of one step, without evaluation."""
    job = job_from(
        f"data=digits network={PUSHED} method=dual-batch workers={workers} precision=float32 "
        f"learning_rate=0.1 decay=none augment=none resolutions={SIDE} epochs={ENDLESS} "
        f"evaluate_epochs={ENDLESS} checkpoint_seconds={ENDLESS} timeout={TIMEOUT_SECONDS} "
        "server.exchange_steps=1"
    )
    facts = made_up_data("none", SAMPLES, CLASSES, SIDE, held_out=1)
    rule = ServerRule(
        consistency="asp",
        staleness=None,
        merge="journal",
        update_factor="ratio",
        exchange_steps=1,
        momentum="keep",
        small_workers=0,
        extra_time=1.0,
    )
    share, rest = divmod(SAMPLES, workers)
    row = {
        "samples_per_round": tuple(share + (rank < rest) for rank in range(workers)),
        "update_factors": (1.0,) * workers,
    }
    network = facts_of(PUSHED, CLASSES, SIDE)
    more = {"merge": "parameter server", "server": rule}
    return fixed_plan(job, facts, network, row, batches=(1,) * workers, **more)
