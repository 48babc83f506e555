"""The command, `batchwright` or `python -m batchwright`: Ctrl-C ends it with one line at any time.

Nothing heavy is imported before the signal has its handler.
"""

import os
import signal
import sys
from contextlib import suppress
from types import FrameType

_EXIT_CODE = 128 + signal.SIGINT


def _open_streams() -> None:
    """Open what the caller has closed: else the next file that is opened would be written to."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free, this one
            setattr(sys, name, open(number, mode, encoding="utf-8"))  # noqa: PTH123, SIM115


_open_streams()
try:
    _OUT = os.dup(2)  # standard error, also while a probe keeps what libraries say from it
except OSError:  # it is closed
    _OUT = 2


def _end(number: int, frame: FrameType | None) -> None:
    """End at once: nothing is open that would have to be closed."""
    del number, frame
    _tell()
    os._exit(_EXIT_CODE)


def _in_import(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _tell() -> None:
    with suppress(OSError):
        os.write(_OUT, f"error: stopped by signal {signal.SIGINT:d}\n".encode())


def main() -> None:
    """Entry point."""
    signal.signal(signal.SIGINT, _end)
    from batchwright.cli.commands import main as command

    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        """Unwind, so that what is open is closed."""
        nonlocal stopped
        if _in_import(frame):  # where extension modules make errors of their own of it, or lose it
            _end(number, frame)
        stopped = True
        raise KeyboardInterrupt

    try:
        try:
            signal.signal(signal.SIGINT, stop)
            command()
        finally:
            signal.signal(signal.SIGINT, _end)
    except KeyboardInterrupt:
        _tell()
        sys.exit(_EXIT_CODE)
    except SystemExit as end:
        if not (stopped and end.code):
            raise
        _tell()  # the commands' own parser says nothing of it
        sys.exit(_EXIT_CODE)


def entry() -> None:
    """`main` for the installed command, whose process is nothing else."""
    try:
        main()
        code: object = 0
    except SystemExit as end:
        code = end.code
    from batchwright.distributed.processes import leave

    leave(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    main()  # not `entry`: a profiler or a notebook may have called
