"""The command, `batchwright` or `python -m batchwright`: a signal to stop ends it with one line.

That is so at any time, Ctrl-C among them; while it measures or trains, something gentler takes its
place. Nothing heavy is imported before the signals have their handler.
"""

import _thread
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from batchwright.errors import Interrupted, stopped_by

if sys.platform == "win32":  # before anything that there is on other systems alone
    sys.stderr.write("error: batchwright does not run on Windows; use Linux or WSL 2\n")
    sys.exit(2)

_STOPS = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2]
if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as it is under nohup
    _STOPS.append(signal.SIGHUP)
_PROCESS, _MAIN_THREAD = os.getpid(), _thread.get_ident()
_RETRY = 0.05  # seconds: far more than the end of a finalizer takes


def _open_streams() -> None:
    """Open what the caller has closed: else the next file that is opened would be written to."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free, this one
            os.set_inheritable(number, True)  # as streams are: else our workers' would be closed
            setattr(sys, name, open(number, mode, encoding="utf-8"))  # noqa: PTH123, SIM115


_open_streams()
try:
    _OUT = os.dup(2)  # standard error, also while a probe keeps what libraries say from it
except OSError:  # it is closed
    _OUT = 2


def _end(number: int, frame: FrameType | None) -> None:
    """End at once: nothing is open that would have to be closed."""
    del frame
    _leave_to_parent(number)
    _tell(number, sys.exception())
    os._exit(128 + number)


def _leave_to_parent(number: int) -> None:
    """End a fork of this process without a word, as its parent expects who ends it so."""
    if number != signal.SIGINT and os.getpid() != _PROCESS:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _in_import(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _tell(number: int, during: BaseException | None = None) -> None:
    """Say what ended the command: of two signals, the first, whose line says how to go on."""
    said = stopped_by(number)
    while during is not None:
        if isinstance(during, Interrupted):
            said = " ".join(str(during).split())
            break
        during = during.__context__
    with suppress(OSError):
        os.write(_OUT, f"error: {said}\n".encode(errors="backslashreplace"))


def _on_stop(do: Callable[[int, FrameType | None], None]) -> None:
    for number in _STOPS:
        signal.signal(number, do)


def _repeat(number: int) -> None:
    """Signal once more, from a thread: the main one leaves meanwhile what lost the first."""
    time.sleep(_RETRY)
    signal.pthread_kill(_MAIN_THREAD, number)  # wakes it, too, which `interrupt_main` does not


def main() -> None:
    """Entry point."""
    _on_stop(_end)
    from batchwright.cli.commands import main as command

    stopped = 0

    def stop(number: int, frame: FrameType | None) -> None:
        """Unwind, so that what is open is closed."""
        nonlocal stopped
        _leave_to_parent(number)
        if _in_import(frame):  # where extension modules make errors of their own of it, or lose it
            _end(number, frame)
        stopped = number
        raise KeyboardInterrupt(number)

    def lost(told: "sys.UnraisableHookArgs") -> None:
        """Stop again where Python drops what is raised, as in `__del__` and in callbacks of C."""
        if issubclass(told.exc_type, KeyboardInterrupt) and stopped:
            _thread.start_new_thread(_repeat, (stopped,))
        else:
            former(told)

    former = sys.unraisablehook
    try:
        try:
            sys.unraisablehook = lost
            _on_stop(stop)
            command()
        finally:
            _on_stop(_end)
            sys.unraisablehook = former
    except KeyboardInterrupt as stop_now:
        number = stopped or signal.SIGINT
        _tell(number, stop_now)
        sys.exit(128 + number)
    except SystemExit as end:
        told = isinstance(end.__context__, Interrupted)  # by a line of ours
        if told or not (stopped and end.code):
            raise
        _tell(stopped, end)  # the commands' own parser says nothing of it
        sys.exit(128 + stopped)


def entry() -> None:
    """`main` for the installed command, whose process is nothing else."""
    _on_stop(_end)
    from batchwright.distributed.processes import end_with

    end_with(main)


if __name__ == "__main__":
    main()  # not `entry`: a profiler or a notebook may have called
