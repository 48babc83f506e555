"""Messages between workers and parameter server: what arrives, and what a failure looks like."""

from __future__ import annotations

import socket
import threading

import pytest
import torch

from batchwright.distributed.server_child import ServerChild
from batchwright.training.parameter_server.merging import Entry, Weights
from batchwright.training.parameter_server.messages import (
    Beat,
    Bye,
    Farewell,
    Hello,
    Next,
    Refused,
    Round,
    Settled,
    Stop,
    Stopped,
    Trained,
    Welcome,
    of_text,
)
from batchwright.training.parameter_server.rounds import RoundAssignment
from batchwright.training.parameter_server.transport import Transport, connect
from samples import make_dual_plan

KEY = b"secret"
SECONDS = 300  # of silence, on a machine however busy


TRAINED = Trained(steps=3, skipped=1, repeated=0, loss=None, rate=0.1, compute=0.5, peak=7)


@pytest.fixture
def ends():
    """Both ends of a connection, after each has proved that it knows the key."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(SECONDS)
        pair = []

        def accept():
            pair.append(Transport(listener.accept()[0], timeout=SECONDS))
            pair[0].authenticate(KEY, first=True)

        thread = threading.Thread(target=accept)
        thread.start()
        ours = connect(f"127.0.0.1:{listener.getsockname()[1]}", KEY, timeout=SECONDS)
        thread.join()
        yield ours, pair[0]
        ours.close()
        pair[0].close()


@pytest.fixture
def silent():
    """An end that counts the other, which says nothing at all, as lost after 0.3 s."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname(), timeout=SECONDS),
    ):
        link = Transport(listener.accept()[0], timeout=0.3)
        yield link
        link.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_words_and_weights_arrive_as_they_were(ends, dtype):
    ours, theirs = ends
    floats = torch.randn(300_001, dtype=torch.float64).to(dtype)
    sender = threading.Thread(
        target=ours.send, args=(TRAINED, Weights(floats, torch.tensor([3, -(2**40)])))
    )
    sender.start()
    received = theirs.receive()
    sender.join()
    assert received.message == TRAINED
    assert torch.equal(received.weights.floats, floats)
    assert received.weights.integers.tolist() == [3, -(2**40)]


MESSAGES = [
    Hello(1, "here/cpu:1", (Entry("0.weight", (8, 4), "torch.float32", 0),), {"side": 8}),
    Round(RoundAssignment(1, 0, 24, 12, 1, 0, 0.5, 24, 24), 0, {"top1": 0.1}, 0.25, 1e-300),
    Round(None, None, {}, 0.0, 0.0),
    Settled(exchange=0.1 + 0.2, evaluation=1.0, scores={"loss": float("inf")}, count=12),
    TRAINED,
    Stopped(15, "stopped by SIGTERM"),
    *(Beat(), Bye(), Farewell(), Next(), Welcome(), Stop(2), Refused("no")),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda one: type(one).__name__)
def test_each_message_arrives_as_what_it_was(ends, message):
    ours, theirs = ends
    ours.send(message)
    assert theirs.receive().message == message


def test_what_is_no_message_of_ours_is_refused():
    with pytest.raises(ValueError, match="a message of kind 'push'"):
        of_text(b'{"kind": "push", "values": {}}')


def test_a_model_without_counters_and_a_message_without_weights_arrive(ends):
    ours, theirs = ends
    ours.send(TRAINED, Weights(torch.ones(2), torch.empty(0, dtype=torch.int64)))
    ours.send(Beat())
    assert theirs.receive().weights.integers.numel() == 0
    assert theirs.receive().weights is None
    assert not theirs.has_word()


def test_silence_is_named(silent):
    with pytest.raises(TimeoutError, match=r"silent for 0\.3 s"):
        silent.receive()


def test_the_end_is_no_silence(ends):
    ours, theirs = ends
    ours.close()
    assert theirs.has_word()
    with pytest.raises(ConnectionError):
        theirs.receive()
    with pytest.raises(ConnectionError):
        ours.send(Beat())


@pytest.mark.parametrize("end", [Transport.cut, Transport.close])
def test_whoever_receives_learns_that_another_thread_has_ended_the_connection(ends, end):
    ours, _ = ends
    problems, begun = [], threading.Event()

    def receive():
        try:
            begun.set()
            ours.receive()
        except OSError as error:
            problems.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    assert begun.wait(SECONDS)
    end(ours)
    thread.join(SECONDS)
    assert problems


def test_a_connection_that_another_thread_sends_through_keeps_its_descriptor(ends):
    """What is sent would else go into whatever has the descriptor next."""
    ours, theirs = ends
    closing = threading.Thread(target=ours.close)
    with ours._sending:
        closing.start()
        with pytest.raises(ConnectionError):
            theirs.receive()
        closing.join(0.1)
        assert ours._socket.fileno() >= 0
    closing.join(SECONDS)
    assert ours._socket.fileno() < 0
    with pytest.raises(ConnectionError):
        ours.send(Beat())


@pytest.mark.slow
def test_a_server_listens_at_an_address_of_ipv6():
    """As of hosts that have no other."""
    try:
        server = ServerChild(make_dual_plan().model_dump(mode="json"), None, host="::1")
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    try:
        server.start(resume=False)
        assert not server.wait_until_ready()
        assert server.answers(SECONDS)
        connect(server.address, bytes.fromhex(server.key), timeout=SECONDS).close()
    finally:
        server.close()


def test_without_the_key_nobody_gets_in():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(SECONDS)
        problems = []

        def accept():
            link = Transport(listener.accept()[0], timeout=SECONDS)
            try:
                link.authenticate(KEY, first=True)
            except OSError as error:
                problems.append(error)
            link.close()

        thread = threading.Thread(target=accept)
        thread.start()
        with pytest.raises(ConnectionError):
            connect(f"127.0.0.1:{listener.getsockname()[1]}", b"guess", timeout=SECONDS)
        thread.join()
        assert "keys differ" in str(problems[0])
