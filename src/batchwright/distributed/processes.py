"""First and last acts of every worker process: it dies with its parent, and reports its error.

Imports nothing heavy, so that a worker is bound to its parent before torch is loaded.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import multiprocessing.process
import os
import signal
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NoReturn

from batchwright.distributed.exit_reports import leave_report
from batchwright.errors import (
    BatchwrightError,
    BrokenStepError,
    DeadlineReached,
    Interrupted,
    LostWorkerError,
    NewPlan,
    one_line,
    shortage,
)
from batchwright.storage.locks import keep_handed

_GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # NVIDIA's, AMD's, and those of WSL

PARENT_PID = "BATCHWRIGHT_PARENT"  # process number of the launcher, for its workers
LAUNCH = "BATCHWRIGHT_LAUNCH"  # names the launch, the same after each of its restarts
STORE_SOCKET = "BATCHWRIGHT_STORE_SOCKET"  # descriptor at which worker 0 holds the store
VERB_PARENT = "BATCHWRIGHT_VERB_PARENT"  # of a sweep or a job's agent, for verbs that it runs
ENGINE_PARENT = "BATCHWRIGHT_ENGINE_PARENT"  # of an engine's worker, for the command beside it
STARTED = "BATCHWRIGHT_STARTED"  # when the launcher started, in seconds of Unix time
STARTED_AGAIN = "BATCHWRIGHT_STARTED_AGAIN"  # when it last started all workers
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
"""Signals that ask a run for a checkpoint and an orderly end; SIGHUP is of a closed terminal."""
SHORT_SPIN = "3000"  # turns that a waiting OpenMP thread spins before it sleeps
_OF_TORCHRUN = "TORCHELASTIC_RUN_ID"  # set by torchrun's agents for their workers
_IMPORTED_BY = os.getpid(), os.getppid()  # process and parent at import; a fork has others
_FILE = io.IOBase.__base__  # of all of Python's own files, those in C among them
_PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>


def die_with_parent(variable: str) -> None:
    """Have the kernel kill this process when its parent ends (Linux; elsewhere nothing).

    Args:
        variable: Environment variable with the parent's process number; if the parent is gone
            already, this process ends at once.
    """
    if variable in os.environ:
        _die_with(int(os.environ[variable]))


def die_with_agent() -> None:
    """As `die_with_parent`, for a worker of torchrun, whose agent passes on no process number.

    If the agent was killed before this module was imported, nothing happens.
    """
    if _OF_TORCHRUN in os.environ:
        process, parent = _IMPORTED_BY
        _die_with(parent if process == os.getpid() else os.getppid())


def _die_with(parent: int) -> None:
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent has ended already
        os._exit(1)


def started_by_hand() -> bool:
    """Whether no program of ours or torchrun's has started this process, and would signal it."""
    others = (PARENT_PID, LAUNCH, VERB_PARENT, ENGINE_PARENT, _OF_TORCHRUN)
    return not any(name in os.environ for name in others)


def stop_signals() -> list[signal.Signals]:
    """The `STOP_SIGNALS` to set a handler for: not one whose handler is of C, which could not be
    put back, nor a SIGHUP that is ignored, as under nohup.
    """
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    if handlers[signal.SIGHUP] == signal.SIG_IGN:
        del handlers[signal.SIGHUP]
    return [number for number, handler in handlers.items() if handler is not None]


def refuse_unguarded_script() -> None:
    """End a process of multiprocessing that imports a script and would run it once more.

    It happens where processes are not forked, and the script does not hold what it runs under
    ``if __name__ == "__main__":``.

    Raises:
        SystemExit: After one line on standard error. Any other exception would be printed with
            the traceback of multiprocessing's own files, by each loader process; a fork server
            prints no message of this one.
    """
    if getattr(multiprocessing.process.current_process(), "_inheriting", False):
        sys.stderr.write(
            "error: a loader process imports the script, which would start all over in it: put "
            'what the script runs under `if __name__ == "__main__":`, or give loaders=0\n'
        )
        raise SystemExit(1)


def seconds_since_launch(*, last: bool = False) -> float:
    """Seconds since the launcher first started the workers; 0 without a launcher.

    With ``last`` since it last did so, after one of them was lost.
    """
    first = os.environ.get(STARTED, "inf")
    return max(0.0, time.time() - float(os.environ.get(STARTED_AGAIN, first) if last else first))


def spinning_shortly(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` in which OpenMP threads that wait for each other soon go to sleep.

    By default GNU's wait spinning, for milliseconds. While another program has one of the cores,
    a thread then spins through its time at every operation, so that a step takes many times as long
    (docs/decisions/0015 has figures).

    It must be set before torch is loaded. A user's own setting is kept.
    """
    if {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & environment.keys():
        return dict(environment)
    return {**environment, "GOMP_SPINCOUNT": SHORT_SPIN}


def end_with(main: Callable[[], None]) -> NoReturn:
    """Run ``main``, the only purpose of this process, and `leave` with its exit code.

    Python's own end would be much of a short command's time, and of each verb of a sweep's. As with
    `sys.exit`, a text in place of a code is printed, and the code is 1. Other exceptions go on.
    """
    code = 0
    try:
        main()
    except SystemExit as end:
        if isinstance(end.code, int):
            code = end.code
        elif end.code is not None:
            code = 1
            with suppress(OSError, ValueError):
                print(end.code, file=sys.stderr)  # noqa: T201 - Python would
    leave(code)


def leave(code: int) -> NoReturn:
    """End this process as `sys.exit` does, but let the kernel take it apart.

    Python would unload PyTorch's modules one by one. Exit functions are called, threads that are
    not daemons waited for, and files that nobody has closed written to their end. What else Python
    does with objects that are left, such as to remove a `NamedTemporaryFile`, it does not do here.
    """
    threading._shutdown()  # type: ignore[attr-defined] # idle pools are let go first, then joined
    atexit._run_exitfuncs()
    _flush_files()
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = code or 1
    except (OSError, ValueError) as error:
        with suppress(OSError, ValueError):
            print(f"error: cannot write to standard output: {error}", file=sys.stderr)  # noqa: T201
        code = code or 1
    with suppress(OSError, ValueError):
        sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)  # what libraries have printed
    os._exit(code)


def _flush_files() -> None:
    """Flush the buffers of open files; not of pipes, where a write may block."""
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if _FILE in kind.__mro__}
    for one in objects:
        if type(one) not in kinds:
            continue
        try:
            if not one.closed and stat.S_ISREG(os.fstat(one.fileno()).st_mode):
                one.flush()
        except Exception as error:  # noqa: BLE001 - it may be of a class of the user's
            if isinstance(error, OSError) and not isinstance(error, io.UnsupportedOperation):
                with suppress(OSError, ValueError):
                    name = getattr(one, "name", "a file")
                    print(f"error: cannot write {name}: {error}", file=sys.stderr)  # noqa: T201


def child_environment(threads: int | None, without: tuple[str, ...] = ()) -> dict[str, str]:
    """Environment of a child that dies with this process.

    It has this process's variables, except those that begin with ``without``, and so many compute
    ``threads``; ``None``: as the variables say. Without a GPU, glibc joins small freed pieces in it
    (`workload.allocator`).
    """
    # It loads pydantic, which a process that only reports does without.
    from batchwright.workload.allocator import joining_pieces

    kept = {name: value for name, value in os.environ.items() if not name.startswith(without)}
    own = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    kept = spinning_shortly(kept)
    if not has_gpu_driver():
        kept = joining_pieces(kept)
    return {**kept, **own, PARENT_PID: str(os.getpid())}


def has_gpu_driver() -> bool:
    """Whether a GPU's driver is installed on this machine, found without PyTorch."""
    return any(os.path.exists(place) for place in _GPU_DRIVERS)  # noqa: PTH110 - devices


def worker_main(work: Callable[[], None]) -> None:
    """Run a worker's work and leave; its error is reported to the launcher as one line."""
    die_with_parent(PARENT_PID)
    keep_handed()
    leave(_exit_code(work))


def _exit_code(work: Callable[[], None]) -> int:
    try:
        work()
    except NewPlan:
        pass  # all went well, and the launcher sees that the run folder's plan is another
    except Exception as error:  # noqa: BLE001 - this is the last frame: report and end
        code = report_failure(error)
        if isinstance(error, BatchwrightError):
            print(f"error: {one_line(error)}", file=sys.stderr)  # noqa: T201 - the worker's own log
        else:
            traceback.print_exc()
        return code
    return 0


def report_failure(error: BaseException) -> int:
    """Report the error that ends this worker to the launcher, if one has started it.

    Whoever leaves a group for an error calls this before: a launcher that learns of the loss from
    the others then knows its cause.

    Returns:
        The exit code that goes with the error.
    """
    # The launcher also stops a worker by a signal because another one failed.
    stopped = isinstance(error, Interrupted) and not isinstance(error, DeadlineReached)
    # After either of these a start from the last checkpoint goes on.
    secondary = stopped or isinstance(error, LostWorkerError | BrokenStepError)
    code = error.exit_code if isinstance(error, BatchwrightError) else 1
    said = one_line(error)
    if isinstance(error, BlockingIOError) and (short := shortage(error, users=True)):
        said = f"its machine is short of processes: {short}"
    leave_report(said, code, secondary=secondary)
    return code
