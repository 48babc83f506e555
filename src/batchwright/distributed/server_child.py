"""The parameter server as the process sees it that starts it. Imports nothing heavy."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from batchwright.distributed.exit_reports import SERVER_RANK
from batchwright.distributed.processes import PARENT_PID, STARTED, spinning_shortly
from batchwright.storage.locks import Lock

SERVER = "BATCHWRIGHT_SERVER"  # host:port of the parameter server, for the workers
SERVER_KEY = "BATCHWRIGHT_SERVER_KEY"  # shared secret, hexadecimal; others' environments are hidden
_MODULE = "batchwright.training.parameter_server.server_process"
_NOT_FOR_IT = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_")


class ServerChild:
    """One parameter server's process, and the socket that outlives it.

    The socket listens before the process does: workers may connect as soon as this object is there.

    Args:
        plan: What is served, as plain values.
        folder: The run folder; ``None`` keeps nothing.
        host: Address of this machine to listen at.
        log: Takes what the process prints; unset: where this one prints.
        environment: Variables that the process has besides this one's.
        lock: Of the run folder, which the process holds too.

    Attributes:
        address: Where workers connect.
        key: The secret that they must know, hexadecimal.
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
        self._listener = socket.create_server((host, 0), backlog=64)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self.key = secrets.token_hex(32)
        self._events: deque[dict[str, Any]] = deque()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, resume: bool) -> None:
        """Start the process; again, after one has ended.

        Args:
            resume: Go on from the folder's last checkpoint, if there is one.
        """
        held = [] if self._lock is None else [self._lock.descriptor]
        handed = {} if self._lock is None else self._lock.environment
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", _MODULE, str(self._listener.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**_environment(), **self._more, **handed},
            pass_fds=[self._listener.fileno(), *held],
            start_new_session=True,  # the terminal's Ctrl-C is for the parent alone
        )
        self._say(
            {
                "plan": self._plan,
                "folder": str(self._folder) if self._folder else "",
                "resume": resume,
                "key": self.key,
            }
        )
        self._reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        self._reader.start()

    def give_up(self, rank: int) -> None:
        """Tell it that a worker will not come any more."""
        self._say({"gone": rank})

    def events(self) -> list[dict[str, Any]]:
        """What it said since this was last asked: ``ready``, ``silent`` and why, ``refused``."""
        found = []
        while self._events:
            found.append(self._events.popleft())
        return found

    def wait_until_ready(self) -> str:
        """Wait until it serves; returns why it does not, empty if it does."""
        while True:
            for event in self.events():
                if "ready" in event or "refused" in event:
                    return str(event.get("refused", ""))
            if self.returncode is not None and not self._reader.is_alive() and not self._events:
                return f"the parameter server ended with exit code {self.returncode}"
            time.sleep(0.02)

    def stop_listening(self) -> None:
        """Turn away those who wait for the process; it has ended and is not started again."""
        self._listener.close()

    @property
    def returncode(self) -> int | None:
        """Its exit code, negative if a signal ended it; ``None`` while it runs."""
        return self._started.poll()

    def wait(self, seconds: float) -> int | None:
        """Wait until it has ended, for so long at most; returns the exit code."""
        with suppress(subprocess.TimeoutExpired):
            self._started.wait(seconds)
        return self._started.poll()

    def terminate(self) -> None:
        """Ask it to write a checkpoint and end."""
        if self._started.poll() is None:
            self._started.terminate()

    def close(self) -> None:
        """End it, if it still runs, and stop listening."""
        if self._process is not None:
            if self._process.poll() is None:
                self._process.kill()
            self._process.wait()
            with suppress(OSError):
                assert self._process.stdin is not None  # noqa: S101 - it is a pipe
                self._process.stdin.close()
        self._listener.close()

    @property
    def _started(self) -> subprocess.Popen[bytes]:
        assert self._process is not None  # noqa: S101 - whoever asks has called `start`
        return self._process

    def _say(self, order: Mapping[str, Any]) -> None:
        pipe = self._started.stdin
        assert pipe is not None  # noqa: S101 - it is a pipe
        with suppress(OSError):  # it has ended: whoever started it will see
            pipe.write(json.dumps(order).encode() + b"\n")
            pipe.flush()

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None  # noqa: S101 - it is a pipe
        with process.stdout as lines:
            for line in lines:
                with suppress(ValueError):
                    self._events.append(json.loads(line))


def _environment() -> dict[str, str]:
    """This process's, without what makes it a worker among others."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_NOT_FOR_IT)}
    return {
        **spinning_shortly(kept),
        "OMP_NUM_THREADS": "1",
        "RANK": str(SERVER_RANK),
        PARENT_PID: str(os.getpid()),
        STARTED: str(time.time()),
    }
