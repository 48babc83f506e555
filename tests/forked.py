"""`batchwright` in processes of its own, forked from one that has imported it already.

A start takes two seconds of a core for its imports; tests that start dozens take their time from
all others. A process that runs tests has one to fork from, which all of its files share; where
several run them, each has it forked from one that has imported all for them (`start_root`). A
command that starts workers has a fork server of its own for them, which would import the same
again: the first of each command, and three of a script, are forked, too, and so are workers of a
torchrun that is started here and the verbs that a sweep or an agent runs. Where nothing is forked
(elsewhere than on Linux), each starts as usual.

    python -m forked FOLDER IN OUT ERR [-m] PROGRAM WORDS...

IN, OUT and ERR are paths, or ``&`` and the number of what is open already. All end as the installed
command does, which Python does not take apart: it would unload all that was imported, and so copy
the memory that it shares. The variable FORKED_ON names a network namespace and a host name, ``SPACE
NAME``, and moves it there; FORKED_BRIEFLY, which `forking` sets, leaves figures of reports empty,
and has two batch sizes measured side by side once, not until they agree: either takes seconds of
each run.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, chdir, contextmanager, nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from batchwright.distributed import fork_server, worker_processes
from batchwright.distributed.processes import (
    PARENT_PID,
    VERB_PARENT,
    child_environment,
    die_with_parent,
    end_with,
)

TORCHRUN = "torch.distributed.run"
_VERBS = "batchwright.cli.verb_child"
_SERVER = "batchwright.training.parameter_server.server_process"
_NUMBERS = count()
Server = fork_server._ForkServer
_ROOT = "FORKED_ROOT"
_SHARED: list[Server] = []
_COMMANDS = (  # what commands import as they come to it
    *("batchwright.probing.probe", "batchwright.distributed.joining.gathering"),
    *("batchwright.reporting.render.terminal", "batchwright.reporting.render.tables"),
    *("batchwright.workflows.verbs", "batchwright.workflows.together", "command_line"),
    *("batchwright.workflows.sweep.verb", "batchwright.workflows.simulating"),
    *("batchwright.workflows.doctor", "batchwright.workflows.exports", "matplotlib.figure"),
    *("batchwright.reporting.render.figures", "matplotlib.backends.backend_agg", TORCHRUN),
    *("torch._dynamo", "sklearn.datasets"),  # at an optimizer's first step; for `digits`
)
_ALL = (*fork_server._MODULES, *_COMMANDS)
_VERBS_OF_SCRIPT = 3  # that start workers of their own, one after another
_NEW_NETWORK, _NEW_NAMES = 0x40000000, 0x04000000  # CLONE_NEWNET, CLONE_NEWUTS of <linux/sched.h>


class Forked:
    """A running ``batchwright WORDS``; is asked as a `subprocess.Popen` is.

    Args:
        words: Its command line.
        cwd: Where it runs.
        env: All its variables.
        prints: Folder for what it prints.
        program: What runs instead: a module, or a script whose name ends in ``.py``.
        stdin: What it reads.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str],
        prints: Path,
        program: str = "batchwright",
        stdin: str = "",
    ) -> None:
        number = next(_NUMBERS)
        self._printed = [prints / f"{number}.{end}" for end in ("out", "err", "log")]
        read = prints / f"{number}.in"
        read.write_text(stdin)
        with self._printed[2].open("wb") as log:
            self._process = fork_server.start(
                "forked",
                [*map(str, (cwd, read, *self._printed[:2])), program, *words],
                environment={**env, "PYTHONPATH": with_tests(env)},
                log=log,
            )
        self.poll, self.wait = self._process.poll, self._process.wait
        self.kill, self.send_signal = self._process.kill, self._process.send_signal

    @property
    def pid(self) -> int:
        """Its number; waits until it is started."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Negative if a signal ended it; ``None`` while it runs."""
        return self.poll()

    def communicate(self, timeout: float = 500.0) -> tuple[str, str]:
        """What it has printed on standard output and error by its end."""
        self.wait(timeout)
        return self.said()

    def said(self) -> tuple[str, str]:
        """The same until now."""
        out, err, log = (one.read_text() if one.exists() else "" for one in self._printed)
        return out, log + err


def begin(module: str, *words: Any, server: Server | None = None, **how: Any) -> Any:
    """As `fork_server.start`; forked from ``server``, or from what all files share."""
    with _forked_from(server or _one_for_all()):
        return fork_server.start(module, *words, **how)


@contextmanager
def forking(*more: str) -> Iterator[None]:
    """Inside, what this thread starts is forked, and figures of reports are not drawn.

    So are parameter servers, and the verbs of a sweep.

    Args:
        more: Modules that it has imported besides.
    """
    with (
        imported(*more) as server,
        mock.patch.dict(os.environ, FORKED_BRIEFLY="1"),
        _forked_from(server),
        _forking_verbs(),
        _forking_servers(),
    ):
        yield


@contextmanager
def imported(*more: str) -> Iterator[Server | None]:
    """What to fork from, with more modules imported than all files share; ``None``: nothing."""
    shared = _one_for_all()
    if not more or shared is None:
        yield shared
        return
    with _environment(), mock.patch.object(fork_server, "_start_server", _fork_server):
        server = Server(more)
    try:
        yield server
    finally:
        server.close()


def _fork_server(line: int, more: Sequence[str]) -> fork_server.Process:
    """A server that is forked from the one that all files share, and imports but the rest."""
    words, own = [str(line), *more], child_environment(threads=1)
    with open(2, "wb", closefd=False) as log:
        return begin("forked_server", words, environment=own, log=log, files=[line])


@contextmanager
def _forked_from(server: Server | None) -> Iterator[None]:
    with mock.patch.object(fork_server._of_thread, "server", server, create=True):
        yield


def _one_for_all() -> Server | None:
    """The server that all files share; another where a test has ended it before it was ready."""
    if sys.platform != "linux":
        return None
    if _SHARED:
        _SHARED[-1]._listen()
    if not _SHARED or _SHARED[-1]._gone:
        # The folder of the test that asks first may go.
        with _environment(), chdir(Path(__file__).parent.parent):
            root = os.environ.get(_ROOT)
            _SHARED.append(_Rooted(root) if root else Server(_COMMANDS))
        atexit.register(_SHARED[-1].close)
    return _SHARED[-1]


def start_root() -> subprocess.Popen[bytes]:
    """Start what the servers of all processes that run tests are forked from; ends with this one.

    It imports once the first of them asks. Its socket is named by the variable FORKED_ROOT.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line, _environment():
        line.bind(f"\0{os.environ[_ROOT]}")
        line.listen()
        return subprocess.Popen(
            [sys.executable, "-m", "forked_tasks", str(line.fileno()), *_ALL],
            stdin=subprocess.DEVNULL,
            env=child_environment(threads=1),
            pass_fds=[line.fileno()],
            start_new_session=True,
        )


class _Rooted(Server):
    """A server that is forked from what `start_root` has started.

    Args:
        name: Of its socket.
    """

    def __init__(self, name: str) -> None:
        ends = SimpleNamespace(kill=lambda: None, wait=lambda: None)  # with its line
        with mock.patch.object(fork_server, "_start_server", return_value=ends):
            super().__init__(())
        self._line.close()
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, fork_server._MAX_BYTES)
        self._line.connect(f"\0{name}")


@contextmanager
def _environment() -> Iterator[None]:
    """Where modules of the tests and benchmarks are found, which are not installed."""
    paths = os.pathsep.join([with_tests(os.environ), str(Path(__file__).parent.parent)])
    with mock.patch.dict(os.environ, PYTHONPATH=paths):
        os.environ.pop("PYTHONUNBUFFERED", None)  # what they print comes as it does elsewhere
        yield


def with_tests(env: Mapping[str, str]) -> str:
    """PYTHONPATH for processes that read modules of the tests."""
    tests = str(Path(__file__).parent)
    return os.pathsep.join([tests, *filter(None, [env.get("PYTHONPATH")])])


def command(*words: object, **how: Any) -> subprocess.CompletedProcess[str]:
    """What ``batchwright WORDS`` comes to; ``how`` is as `Forked` takes it."""
    one = Forked([*map(str, words)], **how)
    try:
        out, err = one.communicate()
    finally:
        one.kill()
    return subprocess.CompletedProcess(words, one.returncode or 0, out, err)


class LightServer(fork_server._ForkServer):
    """A fork server without PyTorch that several threads ask, each for processes of its own.

    Args:
        more: Modules that it imports.
    """

    def __init__(self, more: Sequence[str]) -> None:
        self._turn = threading.Lock()
        with mock.patch.object(fork_server, "_start_server", start_light):
            super().__init__(more)

    @property
    def pid(self) -> int:
        """Its number, which its processes have as their parent's."""
        return self._process.pid

    def _listen(self) -> None:
        with self._turn:
            super()._listen()


def start_light(line: int, more: Sequence[str]) -> subprocess.Popen[bytes]:
    """In place of `fork_server._start_server`: it imports these modules alone."""
    light = "from batchwright.distributed import fork_server as f; f._MODULES = (); f._main()"
    return subprocess.Popen(
        [sys.executable, "-c", light, str(line), *more],
        stdin=subprocess.DEVNULL,
        env={**child_environment(threads=1), "PYTHONPATH": with_tests(os.environ)},
        cwd=Path(__file__).parent,  # the folder of the test that asks first may go
        pass_fds=[line],
        start_new_session=True,
    )


class _Spare:
    """Forked before a command has done anything, to become the fork server of its workers."""

    def __init__(self) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        self._pid = os.fork()
        if not self._pid:
            self._line.close()
            if _wait_to_serve(theirs, parent):
                sys.exit()  # as a process of its own would: what it has printed is written
            os._exit(0)
        theirs.close()
        self._usual, fork_server._start_server = fork_server._start_server, self._start

    def _start(self, line: int, more: Sequence[str]) -> fork_server.Process:
        fork_server._start_server = self._usual
        if more or threading.current_thread() is not threading.main_thread():
            return self._usual(line, more)  # it would end with that thread
        order = json.dumps([line, child_environment(threads=1)]).encode()
        self._line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, len(order) + 4096)
        socket.send_fds(self._line, [order], [line])
        self._line.close()
        return _Child(self._pid)


class _Child:
    """A forked process of this one's own, as far as it is asked."""

    def __init__(self, pid: int) -> None:
        self.pid, self._code = pid, None

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def poll(self) -> int | None:
        return self._ended(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        del timeout  # it is asked of what was killed
        return self._ended(0)

    def _ended(self, how: int) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, how)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code


def _wait_to_serve(line: socket.socket, parent: int) -> bool:
    """Become the fork server; whether this is a worker by now, which has done its work."""
    os.environ[PARENT_PID] = str(parent)
    die_with_parent(PARENT_PID)
    os.setsid()
    order, files, _, _ = socket.recv_fds(line, 1 << 20, 1)
    if not order:  # no workers were wanted
        return False
    (given,), (number, environment) = files, json.loads(order)
    line.close()
    if given != number:
        os.dup2(given, number)
        os.close(given)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv, server = ["fork_server", str(number)], os.getpid()
    fork_server._main()
    return os.getpid() != server


@contextmanager
def _forking_workers() -> Iterator[None]:
    """Inside, torchrun forks its workers.

    Where hosts meet it notes the name of each function, for which Python goes through all that is
    imported: with as much as here that takes so long that hosts may not meet for minutes.
    """
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    def begin(handler: SubprocessHandler, args: Sequence[str], env: Mapping[str, str]) -> object:
        del handler
        words = [one for one in args[1:] if one != "-u"]  # args[0] is Python
        out = os.dup(1)
        order = [os.getcwd(), "/dev/null", f"&{out}", "&2", *words]  # noqa: PTH109
        with open(2, "wb", closefd=False) as log:
            try:
                return fork_server.start("forked", order, environment=env, log=log, files=[out])
            finally:
                os.close(out)

    with (
        fork_server.imported_once(),
        mock.patch.object(SubprocessHandler, "_popen", begin),
        mock.patch.object(dynamic_rendezvous, "get_method_name", _name_of_caller),
    ):
        yield


@contextmanager
def _forking_verbs() -> Iterator[None]:
    """Inside, a sweep or an agent forks its verbs, of which each takes two imports otherwise."""
    usual = fork_server.start

    def begin(module: str, arguments: Sequence[str], **how: Any) -> fork_server.Process:
        if module == _VERBS:
            here = os.getcwd()  # noqa: PTH109
            module, arguments = "forked", [here, "/dev/null", "&1", "&2", _VERBS, *arguments]
        return usual(module, arguments, **how)

    with fork_server.imported_once(), mock.patch.object(fork_server, "start", begin):
        yield


@contextmanager
def _forking_servers() -> Iterator[None]:
    """Inside, a parameter server is forked, which imports as long as its workers do."""
    usual = worker_processes.subprocess
    with ExitStack() as stack:

        def begin(words: Sequence[str], **how: Any) -> object:
            if words[2] != _SERVER:
                return usual.Popen(words, **how)
            if getattr(fork_server._of_thread, "server", None) is None:
                stack.enter_context(fork_server.imported_once())
            return _Piped(words[2:], how["env"], how["stderr"], how["pass_fds"])

        stands = SimpleNamespace(**{**vars(usual), "Popen": begin})
        stack.enter_context(mock.patch.object(worker_processes, "subprocess", stands))
        yield


class _Piped:
    """A forked process with pipes to its input and output; is asked as a `Popen` with them is."""

    def __init__(
        self, words: Sequence[str], env: Mapping[str, str], log: Any, files: Sequence[int]
    ) -> None:
        read, write = os.pipe(), os.pipe()
        err = os.dup(2 if log is None else log if isinstance(log, int) else log.fileno())
        theirs = [read[0], write[1], err]
        order = [os.getcwd(), *(f"&{one}" for one in theirs), *words]  # noqa: PTH109
        with open(err, "wb", closefd=False) as said:
            self._process = fork_server.start(
                "forked", order, environment=env, log=said, files=[*theirs, *files]
            )
        for one in theirs:
            os.close(one)
        self.stdin, self.stdout = os.fdopen(read[1], "wb"), os.fdopen(write[0], "rb")
        self.poll, self.wait = self._process.poll, self._process.wait
        self.kill = self._process.kill

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)


def _name_of_caller(depth: int = 2) -> str:
    return sys._getframe(depth).f_code.co_name


def _move_to(space: str, name: str) -> None:
    """As ``ip netns exec SPACE`` and ``hostname NAME`` do; what is forked from here on is there."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", space).open("rb") as there:
        if libc.setns(there.fileno(), _NEW_NETWORK) or libc.unshare(_NEW_NAMES):
            raise OSError(ctypes.get_errno(), f"cannot move to {space}")
    socket.sethostname(name)


def _run(program: str, starting: Callable[[], AbstractContextManager[None]]) -> None:
    with starting(), _forking_servers():
        if program.endswith(".py"):
            sys.path[0] = str(Path(program).parent.absolute())  # as `python SCRIPT` does
            runpy.run_path(program, run_name="__main__")
        else:
            if program == TORCHRUN:
                sys.modules.pop(TORCHRUN)  # it runs as the main one
            runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    folder, read, out, err, program, *words = sys.argv[1:]
    if program == "-m":
        program, *words = words
    for number, path, mode in ((0, read, "rb"), (1, out, "wb"), (2, err, "wb")):
        if path.startswith("&"):  # it is open already
            os.dup2(int(path[1:]), number)
            if number:  # Python's own was made for a file, and this may be a pipe
                stream = open(number, "w", closefd=False)  # noqa: SIM115 - open to its end
                setattr(sys, ("stdout", "stderr")[number - 1], stream)
            continue
        with open(path, mode) as file:  # noqa: PTH123 - as the shell does
            os.dup2(file.fileno(), number)
    os.chdir(folder)
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 - as `python -m` does
    parent = os.environ.pop(PARENT_PID, "")  # it is a command, not a worker of somebody's
    if program == _VERBS and parent:
        os.environ[VERB_PARENT] = parent  # which has forked it, and goes with the sweep or agent
    if host := os.environ.pop("FORKED_ON", ""):
        _move_to(*host.split())
    if os.environ.get("FORKED_BRIEFLY"):
        from batchwright.reporting.render import figures
        from batchwright.workflows import match_rounds

        figures.figure, figures.file_bytes = lambda *_, **__: None, lambda *_: b""
        match_rounds.MAX_TIMES = 1
    if program != _SERVER:  # which starts nothing, and holds a lock that goes with it
        alone = program.endswith(".py") and "RANK" not in os.environ
        for _ in range(_VERBS_OF_SCRIPT if alone else 1):
            _Spare()
    sys.argv = [program, *words]
    starting = _forking_workers if program == TORCHRUN else nullcontext
    if words[:1] in (["sweep"], ["agent"]):
        starting = _forking_verbs
    end_with(partial(_run, program, starting))
