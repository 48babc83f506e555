"""Servers that are forked for all who ask: tasks of a scheduler, and processes that run tests.

A scheduler starts ``python -m batchwright`` itself, on what it takes for other hosts: that Python
then asks, before it imports anything (`tasks/sitecustomize.py`), for a fork of a process that has.
So does one that the scheduler starts as ``torchrun``. How tests ask: `forked.start_root`.

    python -m forked_tasks LINE [MODULES...]
"""

from __future__ import annotations

import gc
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from multiprocessing.connection import wait
from pathlib import Path

from batchwright.distributed import fork_server
from batchwright.distributed.processes import PARENT_PID, die_with_parent


@contextmanager
def forking_tasks(log: Path) -> Iterator[dict[str, str]]:
    """Inside, and inside of `forked.forking`, what is started with these variables is forked.

    Args:
        log: Takes what goes wrong.
    """
    name = f"forked-tasks-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line, log.open("wb") as said:
        line.bind(f"\0{name}")
        line.listen()
        number = line.fileno()
        server = fork_server.start(
            "forked_tasks", [str(number)], environment=os.environ, log=said, files=[number]
        )
        try:
            tasks = str(Path(__file__).parent / "tasks")
            yield {"FORKED_TASKS": name, "FORKED_BRIEFLY": "1", "PYTHONPATH": tasks}
        finally:
            server.kill()


def _serve(listener: socket.socket) -> fork_server._Order | None:
    """Have a fork server of its own for each who asks; returns in these and in what they fork."""
    parent, lines = os.getpid(), {}

    def reap(*_: object) -> None:
        """Close the lines of servers that have ended, so that who asked them learns of it."""
        for other, pid in [*lines.items()]:
            if os.waitpid(pid, os.WNOHANG)[0]:
                del lines[other]
                other.close()

    while True:
        signal.signal(signal.SIGCHLD, reap)
        line, _ = listener.accept()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        reap()
        for other, pid in [*lines.items()]:
            if _is_closed(other):  # what it has forked, with its ports, goes before the next begins
                os.waitpid(pid, 0)
                del lines[other]
                other.close()
        if _is_closed(line):  # who asked is gone, or has killed what it asked for
            line.close()
            continue
        pid = os.fork()
        if pid:
            lines[line] = pid
            continue
        for one in (listener, *lines):
            one.close()
        os.environ[PARENT_PID] = str(parent)
        die_with_parent(PARENT_PID)
        with line:
            return fork_server._serve(line)


def _is_closed(line: socket.socket) -> bool:
    """Whether the other end is closed, also where messages from it wait to be read."""
    ends = select.poll()
    ends.register(line, select.POLLRDHUP)
    return bool(ends.poll(0))


if __name__ == "__main__":
    die_with_parent(PARENT_PID)
    _, number, *modules = sys.argv
    with socket.socket(fileno=int(number)) as listener:
        wait([listener])  # until somebody asks
        for module in modules:
            import_module(module)
        gc.freeze()  # as `fork_server` does
        order = _serve(listener)
    if order is not None:
        sys.argv[1:] = order.arguments
        sys.modules.pop(order.module, None)  # it runs as the main one
        runpy.run_module(order.module, run_name="__main__", alter_sys=True)
