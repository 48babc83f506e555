"""The parameter server's process and its connections: workers, those replaced, and strangers."""

from __future__ import annotations

import os
import resource
import socket
import sys
import threading
from contextlib import contextmanager, suppress
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
from batchwright.training.parameter_server.transport import connect
from hosting import KEY, make_model
from served import make_served_plan
from test_server_checkpoints import SlowDisk, best_score

pytestmark = pytest.mark.slow
SECONDS = 300  # after which a test gives up waiting
TRAINED = Trained(steps=3, skipped=0, repeated=0, loss=1.0, rate=0.1, compute=0.5)


class Listener:
    """A listening socket that counts how often it is asked for a connection."""

    def __init__(self):
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.place = self._socket.getsockname()
        self.asked, self.close = 0, self._socket.close

    def accept(self):
        self.asked += 1
        return self._socket.accept()


class Served:
    """A server in a thread, and what workers say to it."""

    def __init__(self, plan, folder=None):
        self.plan, self.listener, self.problems = plan, Listener(), []
        self.ready = threading.Event()
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

    def stranger(self):
        return socket.create_connection(self.listener.place, timeout=SECONDS)

    def come(self, rank):
        """A worker connects, and is welcome."""
        link = connect("{}:{}".format(*self.listener.place), KEY, SECONDS)
        model = make_model()
        hello = Hello(
            rank=rank,
            place=f"here/cpu:{rank}",
            samples=self.plan.data.train_samples,
            plan=self.plan.model_dump_json(),
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


def test_strangers_are_few_at_a_time_and_keep_no_worker_out(monkeypatch):
    monkeypatch.setattr(server_process, "MAX_UNPROVEN", 3)
    monkeypatch.setattr(server_process, "CROWDED_SECONDS", 0.0)
    with serving(make_served_plan((8,), (24,))) as served:
        attending, most = served.server._attend, []

        def count(link):
            most.append(len(served.server._unproven._since))
            attending(link)

        monkeypatch.setattr(served.server, "_attend", count)
        crowd = [served.stranger() for _ in range(20)]
        link = served.come(0)
        link.send(Next())
        assert hear(link).ticket is not None
        assert max(most) <= 3
        for one in [*crowd, link]:
            one.close()


def test_a_stranger_that_says_nothing_is_sent_away(monkeypatch):
    monkeypatch.setattr(server_process, "UNPROVEN_SECONDS", 0.0)
    with serving(make_served_plan((8,), (24,))) as served:
        stranger = served.stranger()
        with suppress(ConnectionError):
            while stranger.recv(100):
                pass
        stranger.close()


# ---------------------------------------------------------------------------------- descriptors


class Steps:
    """An event that whoever waits for it is let through one by one."""

    def __init__(self):
        self.waiting, self.allowed = threading.Semaphore(0), threading.Semaphore(0)
        self._set = threading.Event()
        self.set, self.is_set = self._set.set, self._set.is_set

    def wait(self, seconds):
        self.waiting.release()
        return self.allowed.acquire(timeout=SECONDS)


def test_where_descriptors_run_out_the_server_waits_says_so_once_and_goes_on(capfd, monkeypatch):
    with serving(make_served_plan((8,), (24,))) as served, socket.socket() as stranger:
        over = Steps()
        monkeypatch.setattr(served.server, "_over", over)
        with none_left():
            before = served.listener.asked
            stranger.connect(served.listener.place)
            for _ in range(3):
                assert over.waiting.acquire(timeout=SECONDS)
                over.allowed.release()
            assert over.waiting.acquire(timeout=SECONDS)
            assert served.listener.asked <= before + 4  # it has waited before it asked again
        over.allowed.release(1000)
        link = served.come(0)
        link.close()
    told = capfd.readouterr().err
    assert told.count("takes no more connections for now: Too many open files") == 1


@contextmanager
def none_left():
    """Inside, this process can open nothing."""
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# ------------------------------------------------------------------------------------- its end


def test_that_the_server_ends_is_told_before_it_closes_a_connection(monkeypatch):
    """Whoever started it must not take the loss for that of the worker, and start that again."""

    def fails(*_):
        raise FileError("cannot write metrics.jsonl")

    served, happened = Served(make_served_plan((8, 8), (12, 12))), []
    link = served.come(0)
    monkeypatch.setattr(server_process, "_tell_parent", happened.append)
    monkeypatch.setattr(served.server._unproven, "remove", lambda _: happened.append("closing"))
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
