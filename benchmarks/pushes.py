"""How many models a parameter server takes in and hands out in a second, while nobody trains.

Every worker is a process that sends all weights of a `resnet18` to the server and gets the merged
ones back, as fast as it can, under `asp`; the server is the one that training has.
"""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection

from batchwright.distributed.server_child import ServerChild
from batchwright.records import (
    DataFacts,
    Job,
    LearningRateRule,
    Plan,
    Server,
    ServerRule,
    Stage,
)
from batchwright.training.parameter_server.merging import layout, pack
from batchwright.training.parameter_server.messages import Hello, Settled, Trained
from batchwright.training.parameter_server.server_client import ServerClient
from batchwright.training.signals import StopRequest
from batchwright.workload.task import build_network, network_facts

NETWORK, CLASSES, SIDE = "resnet18", 100, 32
SAMPLES, ENDLESS = 50_000, 1_000_000
LEAD_IN = 2
TIMEOUT_SECONDS = 120.0

TRAINED = Trained(steps=1, skipped=0, repeated=0, loss=1.0, rate=0.1, compute=0.01)


def pushes_per_second(workers: int, seconds: float) -> float:
    """Pushes, each with its merge and pull, of all ``workers`` together.

    Args:
        workers: Processes.
        seconds: Time to count, once all have begun.

    Raises:
        RuntimeError: The server does not start, or a worker ended.
    """
    context = multiprocessing.get_context("spawn")
    server = ServerChild(_plan(workers).model_dump(mode="json"), None)
    pipes: list[Connection] = []
    processes = []
    try:
        server.start(resume=False)
        if problem := server.wait_until_ready():
            raise RuntimeError(f"no parameter server: {problem}")
        for rank in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_push_and_pull,
                args=(theirs, server.address, server.key, rank, workers, seconds),
                daemon=True,
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
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


def _push_and_pull(
    pipe: Connection, address: str, key: str, rank: int, workers: int, seconds: float
) -> None:
    """Count the exchanges of so many seconds, and how long they truly took."""
    network = build_network(NETWORK, classes=CLASSES, side=SIDE)
    weights = pack(network)
    client = ServerClient(address, key, TIMEOUT_SECONDS, StopRequest())
    hello = Hello(
        rank=rank,
        place=f"here/cpu:{rank}",
        samples=SAMPLES,
        plan=_plan(workers).model_dump_json(),
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
    """Rounds of one step without end; nothing is evaluated."""
    job = Job(
        data="digits",
        network=NETWORK,
        method="dual-batch",
        workers=workers,
        precision="float32",
        resolutions=(SIDE,),
        epochs=ENDLESS,
        evaluate_epochs=ENDLESS,
        checkpoint_seconds=ENDLESS,
        server=Server(exchange_steps=1),
        timeout=TIMEOUT_SECONDS,
    )
    network = build_network(NETWORK, classes=CLASSES, side=SIDE)
    share, rest = divmod(SAMPLES, workers)
    return Plan(
        job=job,
        data=DataFacts(
            name="none",
            digest="0" * 64,
            train_samples=SAMPLES,
            val_samples=1,
            split="none",
            classes=tuple(map(str, range(CLASSES))),
            side=SIDE,
        ),
        network=network_facts(NETWORK, network, SIDE),
        method="dual-batch",
        merge="parameter server",
        server=ServerRule(
            consistency="asp",
            staleness=None,
            merge="journal",
            update_factor="ratio",
            exchange_steps=1,
            momentum="keep",
            small_workers=0,
            extra_time=1.0,
        ),
        update="sgd",
        precision="float32",
        learning_rate=LearningRateRule(
            base=0.1, base_batch=128, scaling="none", peak=0.1, warmup_epochs=0, decay="none"
        ),
        stages=(
            Stage(
                epochs=ENDLESS,
                resolution=SIDE,
                learning_rate=0.1,
                dropout=0.0,
                augmentation="none",
                samples_per_round=tuple(share + (rank < rest) for rank in range(workers)),
                update_factors=(1.0,) * workers,
                local_batch_sizes=(1,) * workers,
                micro_batch_size=1,
            ),
        ),
    )
