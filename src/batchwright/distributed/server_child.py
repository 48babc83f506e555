"""The parameter server's process, seen from the process that starts it. Imports nothing heavy."""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from batchwright.distributed.exit_reports import SERVER_RANK
from batchwright.distributed.processes import STARTED, child_environment
from batchwright.distributed.worker_processes import Companion
from batchwright.storage.locks import Lock

SERVER = "BATCHWRIGHT_SERVER"  # host:port of the parameter server, for the workers
SERVER_KEY = "BATCHWRIGHT_SERVER_KEY"  # shared secret, hexadecimal; others' environments are hidden
PLACE = "BATCHWRIGHT_PLACE"
"""A worker's place in its plan, where another launcher's ranks follow another order of kinds."""
_MODULE = "batchwright.training.parameter_server.server_process"
_NOT_FOR_IT = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_")


class ServerChild:
    """The process of a parameter server, and its listening socket, which outlives it.

    The socket listens from the start: workers may connect as soon as this object is made.

    Args:
        plan: The plan, as plain values.
        folder: The run folder; ``None`` keeps nothing.
        host: Address of this machine at which it listens.
        log: Takes the process's output; unset: this process's own standard error.
        environment: Variables of the process besides this one's.
        lock: Lock of the run folder; the process holds it as well.

    Attributes:
        address: host:port at which workers connect.
        key: Shared secret that workers must know, hexadecimal.
    """

    def __init__(
        self,
        plan: Mapping[str, Any],
        folder: Path | None,
        *,
        host: str = "127.0.0.1",
        log: IO[bytes] | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
        lock: Lock | None = None,
    ) -> None:
        self._plan, self._folder, self._log, self._lock = plan, folder, log, lock
        self._more = dict(environment)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), backlog=64, family=family)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self.key = secrets.token_hex(32)
        self._process: Companion | None = None

    def start(self, *, resume: bool) -> None:
        """Start the process, maybe again after it has ended.

        Args:
            resume: Go on from the folder's last checkpoint, if there is one.
        """
        if self._process is not None:
            self._process.close()
        listener = self._listener.fileno()
        held = [] if self._lock is None else [self._lock.descriptor]
        handed = {} if self._lock is None else self._lock.environment
        numbers = {"RANK": str(SERVER_RANK), STARTED: str(time.time())}
        environment = child_environment(threads=1, without=_NOT_FOR_IT) | numbers
        self._process = Companion(
            _MODULE,
            [str(listener)],
            environment={**environment, **self._more, **handed},
            log=self._log,
            files=[listener, *held],
        )
        folder = str(self._folder) if self._folder else ""
        self._process.say({"plan": self._plan, "folder": folder, "resume": resume, "key": self.key})

    def give_up(self, rank: int) -> None:
        """Tell the server that a worker will not come any more."""
        self._started.say({"gone": rank})

    def events(self) -> list[dict[str, Any]]:
        """Messages since the last call: ``ready``, ``silent``, ``refused`` or ``ends``, and why."""
        found = []
        for line in self._started.lines():
            with suppress(ValueError):
                found.append(json.loads(line))
        return found

    def wait_until_ready(self) -> str:
        """Wait until the server is ready; returns why it is not, empty if it is."""
        while True:
            for event in self.events():
                if "ready" in event or "refused" in event:
                    return str(event.get("refused", ""))
            if self._started.silent:
                return f"the parameter server ended with exit code {self.returncode}"
            time.sleep(0.02)

    def stop_listening(self) -> None:
        """Close the socket, once the process has ended for good: workers that wait get an error."""
        self._listener.close()

    @property
    def returncode(self) -> int | None:
        """Exit code, negative if a signal ended the process; ``None`` while it runs."""
        return self._started.poll()

    def wait(self, seconds: float) -> int | None:
        """Wait for its end, for so many seconds at most; returns the exit code."""
        return self._started.wait(seconds)

    def terminate(self) -> None:
        """Ask the server to write a checkpoint and end."""
        self._started.terminate()

    def answers(self, seconds: float) -> bool:
        """Whether the process says something to whoever connects, within so many seconds."""
        with suppress(OSError):
            place = self._listener.getsockname()[:2]
            with socket.create_connection(place, timeout=seconds) as one:
                return bool(one.recv(1))
        return False

    def kill(self) -> None:
        """Kill the process; workers that connect wait for the next one."""
        self._started.kill()

    def close(self) -> None:
        """Kill the process, if it still runs, and stop listening."""
        if self._process is not None:
            self._process.close()
        self._listener.close()

    @property
    def _started(self) -> Companion:
        assert self._process is not None  # noqa: S101 - whoever asks has called `start`
        return self._process
