"""Messages between a worker and the parameter server: a few words and, where asked, all weights.

The standard library's connection does the framing and the authentication by a shared key. The
weights follow a message over the same socket, into one buffer: the connection itself would read
them piece by piece and copy them twice. Nothing is unpickled.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import NamedTuple

import torch
from torch import Tensor

from batchwright.training.parameter_server.merging import Weights
from batchwright.training.parameter_server.messages import Message, as_text, of_text

BEAT_SECONDS = 1.0  # between two signs of life while there is nothing else to say
_LONGEST = 64 * 2**20  # bytes of a message without its weights


class Received(NamedTuple):
    """A message as received, the model with it, and seconds from its first byte to the last."""

    message: Message
    weights: Weights | None
    seconds: float


class Transport:
    """One end of a connection. Several threads may send, one at a time receives.

    Every failure is an `OSError`: the other end is gone (`ConnectionError`), or silent
    (`TimeoutError`).

    Args:
        connection: Open, over TCP; taken over.
        timeout: Seconds of silence after which the other end counts as lost.

    Attributes:
        heard: Time of the last message, by `time.monotonic`.
    """

    def __init__(self, connection: socket.socket, timeout: float) -> None:
        connection.setblocking(True)
        self._socket, self._timeout = connection, timeout
        self._connection = Connection(os.dup(connection.fileno()))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        limit = struct.pack("ll", int(timeout), int(timeout % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):  # for the connection's reads too
            self._socket.setsockopt(socket.SOL_SOCKET, option, limit)
        self._sending = threading.Lock()
        self.heard = time.monotonic()

    def authenticate(self, key: bytes, *, first: bool) -> None:
        """Have the other end prove that it knows the key, and prove it to the other end.

        Args:
            key: The shared secret.
            first: Whether this end asks first; the other end must not.

        Raises:
            ConnectionError: The other end does not know the key, or the protocol.
        """
        steps = [deliver_challenge, answer_challenge]
        with _naming(self._timeout):
            try:
                for step in steps if first else reversed(steps):
                    step(self._connection, key)
            except (AuthenticationError, AssertionError, ValueError) as error:
                raise ConnectionError("the keys differ") from error

    def send(self, message: Message, weights: Weights | None = None) -> None:
        """Send a message; returns when the system has taken all of it."""
        tensors = [weights.floats, weights.integers] if weights is not None else []
        formats = [(str(one.dtype).removeprefix("torch."), one.numel()) for one in tensors]
        text = as_text(message, tensors=formats)
        with self._sending, _naming(self._timeout):
            self._connection.send_bytes(text)
            for tensor in tensors:
                self._socket.sendall(_bytes_of(tensor))

    def receive(self) -> Received:
        """Wait for the next message, and return it."""
        with _naming(self._timeout):
            message, head = of_text(self._connection.recv_bytes(_LONGEST))
            started = time.perf_counter()
            tensors = [torch.empty(n, dtype=getattr(torch, name)) for name, n in head["tensors"]]
            for tensor in tensors:
                self._fill(_bytes_of(tensor))
        self.heard = time.monotonic()
        weights = Weights(*tensors) if tensors else None
        return Received(message, weights, time.perf_counter() - started)

    def has_word(self) -> bool:
        """Whether a message, or the end of the connection, is there to be received."""
        with _naming(self._timeout):
            return self._connection.poll(0)

    def cut(self) -> None:
        """End the connection; whoever receives at either end learns it at once.

        For threads other than the receiving one: a descriptor that is closed under it may be
        another connection's by the time it reads again.
        """
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection, and free its descriptors once no other thread sends through them."""
        self.cut()
        with self._sending:
            self._socket.close()
            self._connection.close()

    def _fill(self, buffer: memoryview) -> None:
        while len(buffer):
            count = self._socket.recv_into(buffer)
            if not count:
                raise EOFError
            buffer = buffer[count:]


def connect(address: str, key: bytes, timeout: float) -> Transport:
    """Connect to the server at ``host:port``; `OSError` if there is none, or the key is wrong."""
    host, _, port = address.rpartition(":")
    link = Transport(socket.create_connection((host, int(port)), timeout=timeout), timeout)
    try:
        link.authenticate(key, first=False)
    except OSError:
        link.close()
        raise
    return link


@contextmanager
def _naming(timeout: float) -> Iterator[None]:
    """Turn what sockets and connections raise into the two errors that `Transport` has."""
    try:
        yield
    except BlockingIOError as error:
        raise TimeoutError(f"silent for {timeout:g} s") from error
    except EOFError as error:
        raise ConnectionError("the connection ended") from error
    except OSError as error:
        raise ConnectionError(error.strerror or str(error) or "the connection ended") from error


def _bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a flat tensor on the CPU, without a copy."""
    return tensor.view(torch.uint8).numpy().data
