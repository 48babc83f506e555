"""Messages between workers and parameter server: what arrives, and what a failure looks like."""

from __future__ import annotations

import socket
import threading
import time

import pytest
import torch

from batchwright.training.link import Link, connect
from batchwright.training.merging import Weights

KEY = b"secret"
pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def ends():
    """Both ends of a connection, after each has proved that it knows the key."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pair = []

        def accept():
            pair.append(Link(listener.accept()[0], timeout=0.3))
            pair[0].authenticate(KEY, first=True)

        thread = threading.Thread(target=accept)
        thread.start()
        ours = connect(f"127.0.0.1:{listener.getsockname()[1]}", KEY, timeout=0.3)
        thread.join()
        yield ours, pair[0]
        ours.close()
        pair[0].close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_words_and_weights_arrive_as_they_were(ends, dtype):
    ours, theirs = ends
    floats = torch.randn(300_001, dtype=torch.float64).to(dtype)
    sender = threading.Thread(
        target=ours.send, args=("push", Weights(floats, torch.tensor([3, -(2**40)])))
    )
    sender.start()
    message = theirs.receive()
    sender.join()
    assert message.kind == "push"
    assert torch.equal(message.weights.floats, floats)
    assert message.weights.integers.tolist() == [3, -(2**40)]
    theirs.send("round", loss=None, rate=0.1)
    assert ours.receive().values == {"loss": None, "rate": 0.1}


def test_a_model_without_counters_and_a_message_without_weights_arrive(ends):
    ours, theirs = ends
    ours.send("push", Weights(torch.ones(2), torch.empty(0, dtype=torch.int64)))
    ours.send("beat")
    assert theirs.receive().weights.integers.numel() == 0
    assert theirs.receive().weights is None
    assert not theirs.has_word()


def test_silence_and_the_end_are_told_apart(ends):
    ours, theirs = ends
    with pytest.raises(TimeoutError, match=r"silent for 0\.3 s"):
        theirs.receive()
    ours.close()
    assert theirs.has_word()
    with pytest.raises(ConnectionError):
        theirs.receive()
    with pytest.raises(ConnectionError):
        ours.send("beat")


def test_closing_wakes_up_whoever_receives(ends):
    ours, _ = ends
    problems = []

    def receive():
        try:
            ours.receive()
        except OSError as error:
            problems.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    time.sleep(0.05)
    ours.close()
    thread.join(5)
    assert problems


def test_without_the_key_nobody_gets_in():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        problems = []

        def accept():
            link = Link(listener.accept()[0], timeout=5)
            try:
                link.authenticate(KEY, first=True)
            except OSError as error:
                problems.append(error)
            link.close()

        thread = threading.Thread(target=accept)
        thread.start()
        with pytest.raises(ConnectionError):
            connect(f"127.0.0.1:{listener.getsockname()[1]}", b"guess", timeout=5)
        thread.join()
        assert "keys differ" in str(problems[0])
