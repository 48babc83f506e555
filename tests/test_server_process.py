"""The parameter server's process and its connections: workers, and those replaced."""

from __future__ import annotations

import socket
import sys
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from batchwright.errors import FileError
from batchwright.training.parameter_server import server_process
from batchwright.training.parameter_server.merging import layout, pack
from batchwright.training.parameter_server.messages import (
    Beat,
    Hello,
    Next,
    Settled,
    Trained,
    Welcome,
)
from batchwright.training.parameter_server.server_process import ServerProcess
from batchwright.training.parameter_server.transport import Transport, connect
from hosting import KEY, make_model
from served import make_served_plan
from test_server_checkpoints import SlowDisk, best_score

pytestmark = pytest.mark.slow
SECONDS = 300  # after which a test gives up waiting
TRAINED = Trained(steps=3, skipped=0, repeated=0, loss=1.0, rate=0.1, compute=0.5)


class Served:
    """A server in a thread, and what workers say to it."""

    def __init__(self, plan, folder=None):
        self.plan, self.problems = plan, []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.place, self.ready = self.listener.getsockname(), threading.Event()
        self.thread = threading.Thread(target=self._serve, args=(folder,), daemon=True)
        self.thread.start()
        assert self.ready.wait(SECONDS)

    def _serve(self, folder):
        try:
            self.server = ServerProcess(
                self.plan, folder, resume=False, listener=self.listener, key=KEY
            )
            self.ready.set()
            self.server.serve()
        except BaseException as error:  # noqa: BLE001 - shown at the end
            self.problems.append(error)

    def come(self, rank):
        """A worker connects, and is welcome."""
        link = connect("{}:{}".format(*self.place), KEY, SECONDS)
        model = make_model()
        hello = Hello(
            rank=rank,
            place=f"here/cpu:{rank}",
            entries=tuple(layout(model)),
            description={},
        )
        link.send(hello, pack(model) if rank == 0 else None)
        assert hear(link) == Welcome()
        return link


def hear(link):
    """What the server says next, signs of life aside."""
    while (message := link.receive().message) == Beat():
        pass
    return message


def push(link):
    link.send(TRAINED, pack(make_model()))


def settle(link, correct=None):
    scores = {"top1": correct} if correct is not None else None
    link.send(Settled(exchange=0.1, evaluation=0.1, scores=scores, count=12))


@contextmanager
def serving(plan, folder=None):
    """Ends the run; what the server raised is raised here."""
    served = Served(plan, folder)
    try:
        yield served
    finally:
        served.server._coordinator.stop(15)
        served.thread.join(SECONDS)
    assert not served.thread.is_alive()
    (stopped,) = served.problems
    assert "stopped by SIGTERM" in str(stopped)


# ------------------------------------------------------------------------------------- replaced


def test_a_late_push_of_a_worker_that_was_replaced_changes_nothing(monkeypatch):
    with serving(make_served_plan((8,), (24,), epochs=4)) as served:
        arrived, allowed = threading.Event(), threading.Event()
        take = served.server._coordinator.push

        def late(*args):
            if not arrived.is_set():
                arrived.set()
                assert allowed.wait(SECONDS)
            take(*args)

        monkeypatch.setattr(served.server._coordinator, "push", late)
        former = served.come(0)
        former.send(Next())
        first = hear(former).ticket
        push(former)
        assert arrived.wait(SECONDS)
        link = served.come(0)
        link.send(Next())
        assert hear(link).ticket == first
        allowed.set()
        with pytest.raises(ConnectionError):
            hear(former)
        assert served.server._coordinator.progress[1] == 0
        push(link)
        assert hear(link).ticket.start == 24
        former.close()
        link.close()


def test_the_answer_of_a_worker_that_was_replaced_goes_to_the_new_one():
    plan = make_served_plan((8, 8), (12, 12), epochs=4, server={"consistency": "bsp"})
    with serving(plan) as served:
        former = served.come(0)
        former.send(Next())  # it waits for the other
        link = served.come(0)
        link.send(Next())
        other = served.come(1)
        other.send(Next())
        assert hear(other).ticket is not None
        assert hear(link).ticket is not None
        with pytest.raises(ConnectionError):
            hear(former)
        for one in (former, link, other):
            one.close()


# ------------------------------------------------------------------------------------ strangers


def test_a_connection_for_whose_thread_there_is_no_room_keeps_no_worker_out(monkeypatch):
    start, refused = threading.Thread.start, []

    def scarce(thread):
        if "attend" in thread.name and not refused:  # as Python names it for what it runs
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    with serving(make_served_plan((8,), (24,))) as served:
        monkeypatch.setattr(threading.Thread, "start", scarce)
        with socket.create_connection(served.place, timeout=SECONDS) as stranger:
            assert stranger.recv(100) == b""
        served.come(0).close()


# ------------------------------------------------------------------------------------- its end


def test_that_the_server_ends_is_told_before_it_closes_a_connection(monkeypatch):
    """Whoever started it must not take the loss for that of the worker, and start that again."""

    def fails(*_):
        raise FileError("cannot write metrics.jsonl")

    served, happened = Served(make_served_plan((8, 8), (12, 12))), []
    link = served.come(0)
    monkeypatch.setattr(server_process, "_tell_parent", happened.append)
    closing = Transport.close

    def close(link):
        happened.append("closing")
        closing(link)

    monkeypatch.setattr(Transport, "close", close)
    monkeypatch.setattr(served.server._coordinator, "ask", fails)
    link.send(Next())
    served.thread.join(SECONDS)
    link.close()
    told = {"ends": "cannot write metrics.jsonl"}
    assert happened.index(told) < happened.index("closing")
    assert {"ends": ""} in happened
    assert [str(one) for one in served.problems] == ["cannot write metrics.jsonl"]


def test_a_server_whose_parent_reads_no_more_ends_as_any_other(monkeypatch):
    written = []

    def write(text):
        written.append(text)
        raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=write))
    with serving(make_served_plan((8,), (24,))) as served:
        pass
    assert served.server._over.is_set()
    assert written == ['{"ends": ""}\n']


# ----------------------------------------------------------------------------------- slow disks


def test_while_a_disk_is_slow_workers_get_rounds_and_signs_of_life(tmp_path, monkeypatch):
    disk = SlowDisk(monkeypatch)
    plan = make_served_plan((8, 8), (12, 12), epochs=9, server={"consistency": "bsp"})
    with serving(plan, tmp_path / "run") as served:
        links = [served.come(0), served.come(1)]
        for link in links:
            link.send(Next())
        for correct in (3.0, 6.0, 9.0):
            for link in links:
                assert hear(link).ticket is not None
                push(link)
            # The worker that ended the epoch is asked for its scores with the next round.
            messages = [hear(link) for link in links]
            for link, message in zip(links, messages, strict=True):
                due = message.evaluate is not None
                settle(link, correct if due else None)
                push(link)
            if correct == 3.0:
                disk.wait_for_write()
        assert hear(links[0]).ticket is not None
        assert hear(links[1]).ticket is not None
        push(links[0])
        assert links[0].receive().message == Beat()  # it waits for the other
        push(links[1])
        assert hear(links[0]).ticket is not None
        assert hear(links[1]).ticket is not None
        assert disk.names == ["best"]
        disk.let_through(100)
        for link in links:
            link.close()
    assert disk.names[-1] == "last"
    assert best_score(tmp_path / "run") == 0.75
