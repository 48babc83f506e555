"""A parameter server in a thread of the test's own process; its workers are real processes."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

from batchwright import Session
from batchwright.distributed.server_child import SERVER, SERVER_KEY
from batchwright.records import Plan
from batchwright.training.parameter_server import server_run, transport
from batchwright.training.parameter_server.messages import Trained
from batchwright.training.parameter_server.server_process import ServerProcess
from batchwright.workload.task import build_network
from paced import PacedClock

FEATURES, CLASSES = 4, 3
KEY = bytes(32)


class Points(Dataset):
    """Points with their index and a label hidden in one feature."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        features = torch.randn(FEATURES, generator=torch.Generator().manual_seed(index))
        features[index % CLASSES] += 2
        return features, index % CLASSES, index


class Pictures(Points):
    """The same number of small images."""

    def __getitem__(self, index):
        image = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(index))
        return image, index % CLASSES, index


def without_compiler() -> None:
    """Optimizers load torch's compiler, only to be told not to compile: half the time of a start.

    For processes that do nothing else.
    """
    sys.modules["torch._dynamo"] = compiler = ModuleType("torch._dynamo")
    compiler.disable = lambda function=None, *_, **__: function
    compiler.graph_break = lambda *_, **__: None
    compiler.trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)


def make_model(hidden: int = 8) -> nn.Module:
    """With batch normalization, whose statistics are merged too; width 0 is `resnet8`."""
    if not hidden:
        return build_network("resnet8", classes=CLASSES, side=8, dropout=0.0, seed=0)
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, hidden), nn.BatchNorm1d(hidden), nn.Linear(hidden, CLASSES)
    )


def correct(outputs, labels):
    return {"top1": outputs.argmax(dim=1) == labels}


@contextmanager
def hosted(plan: Plan, folder: Path | None = None) -> Iterator[str]:
    """A server for one run; yields its address. What it raises is raised at the end."""
    listener = socket.create_server(("127.0.0.1", 0))
    problems = []

    def serve():
        try:
            ServerProcess(plan, folder, resume=False, listener=listener, key=KEY).serve()
        except Exception as error:  # noqa: BLE001 - shown below
            problems.append(error)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield "{}:{}".format(*listener.getsockname())
    thread.join(300)
    assert not thread.is_alive(), "the server has not ended"
    if problems:
        raise problems[0]


def train(rank, plan, address, *, momentum=0.9, hidden=8, samples=None, **slowness):
    """One worker's run: what it saw, and its model's values before and after each exchange.

    Args:
        rank: The worker.
        plan: As JSON text.
        address: Of the server.
        momentum: Of its optimizer.
        hidden: Width of its model, as for `make_model`.
        samples: Size of its data set; unset: as planned.
        slowness: By worker: ``delays``, seconds that its link takes longer for a push; ``paces``,
            seconds that its steps take longer; ``speeds``, samples per second at which it
            computes, whatever the machine does.
    """
    os.environ.update({SERVER: address, SERVER_KEY: KEY.hex(), "RANK": str(rank)})
    os.environ["WORLD_SIZE"] = "1"
    plan = Plan.model_validate_json(plan)
    os.environ["LOCAL_WORLD_SIZE"] = str(plan.workers)
    model = make_model(hidden)
    data = Points if hidden else Pictures
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    seen, rounds, scores = [], [], []
    delays, paces, speeds = (slowness.get(name) for name in ("delays", "paces", "speeds"))
    with (
        own_pace(speeds),
        slow_link((delays or {}).get(rank, 0)),
        Session(
            model,
            optimizer,
            data(samples or plan.data.train_samples),
            plan=plan,
            loaders=0,
        ) as session,
    ):
        for epoch in session.epochs():
            begun, trained = values_of(model), {}
            indices = []
            for features, labels, numbers in session.batches():
                if speeds:
                    session._run._clock.sleep(len(numbers) / speeds[rank])
                session.step(functional.cross_entropy(model(features), labels))
                if paces:
                    threading.Event().wait(paces.get(rank, 0))
                trained = values_of(model)
                indices += numbers.tolist()
                seen.append((epoch, len(numbers), optimizer.param_groups[0]["lr"]))
            state = [len(one) for one in optimizer.state.values()]
            rounds.append(
                {
                    "indices": indices,
                    "epoch": epoch,
                    "begun": begun,
                    "trained": trained,
                    "pulled": values_of(model),
                    "momentum": sum(state),
                }
            )
            due = session.evaluation_due
            scored = session.evaluate(data(7), correct, forward=lambda m, b: (m(b[0]), b[1]))
            scores.append((due, scored))
    return {"rounds": rounds, "steps": seen, "scores": scores, "final": values_of(model)}


def values_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


@contextmanager
def own_pace(speeds: dict[int, float] | None) -> Iterator[None]:
    """Runs that begin inside book the computing time that they are told."""
    usual = server_run.clock_for
    if speeds:
        server_run.clock_for = lambda _: PacedClock(alone=True)
    try:
        yield
    finally:
        server_run.clock_for = usual


@contextmanager
def slow_link(seconds: float) -> Iterator[None]:
    """Every model that this process pushes takes so much longer."""
    send = transport.Transport.send

    def sleep_and_send(self, message, weights=None):
        if isinstance(message, Trained):
            threading.Event().wait(seconds)
        send(self, message, weights)

    transport.Transport.send = sleep_and_send
    try:
        yield
    finally:
        transport.Transport.send = send
