"""The exceptions of the project. Each message names the value, the place and what to try.

A message is one line. The command line prints it after ``error:`` and exits with `exit_code`.
"""

import errno
import signal
from collections.abc import Iterator
from contextlib import contextmanager

_LONGEST = 5000  # characters of a message: the names of all job keys are 2,000
_KEPT = 500  # characters of a longer one that are kept at its beginning, and at its end
_SHORT = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
_STARTING = ("subprocess", "multiprocessing", __name__.partition(".")[0])
NO_THREAD = "can't start new thread"  # what Python says where the system starts no more of them


def both_ends(text: str, longest: int) -> str:
    """A text, or beginning and end of one with more than ``longest`` characters (at least 1,005):
    the end of a message says what to try.
    """
    return text if len(text) <= longest else f"{text[:_KEPT]} ... {text[-_KEPT:]}"


def printable(text: str) -> str:
    r"""``text`` with control and direction characters made visible, so that names cannot act.

    >>> printable("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def one_line(error: BaseException) -> str:
    """An exception's message on one line, for a person."""
    text = " ".join(str(error).split())
    if isinstance(error, BatchwrightError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def shortage(error: BaseException, *, users: bool = False) -> str:
    """What the system said as it started no process or thread, or opened no file, for lack of them
    or of memory; empty for any other error. Limits on processes count threads, too.

    ``users``: The error may be of a user's own code, which hears the same of a lock that is taken
    or a socket without data; so it must come from where Python or we start processes.
    """
    if isinstance(error, OSError) and error.errno in _SHORT:
        if users and error.errno == errno.EAGAIN and not _in_starting(error):
            return ""
        return error.strerror or ""
    return NO_THREAD if isinstance(error, RuntimeError) and str(error) == NO_THREAD else ""


def _in_starting(error: BaseException) -> bool:
    """Whether an error was raised by code of Python or of ours that starts processes."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    module = "" if last is None else str(last.tb_frame.f_globals.get("__name__"))
    return module.partition(".")[0] in _STARTING


def not_installed(package: str, extra: str = "") -> str:
    """A message that a package is missing, with the command that installs it or our ``extra``."""
    wanted = f'"batchwright[{extra}]"' if extra else package
    return f"{package} is missing: pip install {wanted}"


class BatchwrightError(Exception):
    """Something the user can mend: bad input, bad file, bad environment. Exit code 2.

    The middle of a message is left out where that quotes a very long value.
    """

    exit_code = 2

    def __str__(self) -> str:
        return both_ends(super().__str__(), _LONGEST)


class JobError(BatchwrightError):
    """A job key is unknown, has the wrong type, or asks for something that cannot be done."""


class ArgumentError(BatchwrightError, TypeError):
    """A function got an argument of the wrong kind."""


class DataError(BatchwrightError):
    """A data set is missing, truncated, unreadable or inconsistent."""


class FileError(BatchwrightError):
    """A file or folder cannot be read or written, or is not what it should be."""


class PlanError(BatchwrightError):
    """A profile or plan does not fit the job, the data or the workers at hand."""


class WorkerError(BatchwrightError):
    """A worker process died or gave up; the message carries its own last error. Exit code 1."""

    exit_code = 1


class SharedMemoryError(WorkerError):
    """A loader process found too little shared memory for a batch."""


TOO_LITTLE_SHARED = (
    "a loader process found too little shared memory for a batch: give more of it "
    "(docker: --shm-size=1g), or loaders=0"
)
"""The message where shared memory is short."""


class LostWorkerError(WorkerError):
    """Another worker went away or fell silent; its own error is the one to read."""


class TrainingError(WorkerError):
    """Training cannot go on, for example because every gradient is infinite."""


class BrokenStepError(TrainingError):
    """A step changed some state and could not be completed: only the last checkpoint is whole."""


class Interrupted(BatchwrightError):  # noqa: N818 - a stop that was asked for is no error
    """A signal stopped the run after a checkpoint. Exit code 128 + the signal's number."""

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(message)
        self.signal_number = signal_number
        self.exit_code = 128 + signal_number


def stopped_by(number: int) -> str:
    """In words, which signal stopped the program; SIGINT is the one that Ctrl-C sends.

    >>> stopped_by(2), stopped_by(15), stopped_by(40)
    ('stopped by Ctrl-C', 'stopped by SIGTERM', 'stopped by signal 40')
    """
    if number == signal.SIGINT:
        return "stopped by Ctrl-C"
    known = number in {one.value for one in signal.Signals}
    return f"stopped by {signal.Signals(number).name if known else f'signal {number}'}"


class DeadlineReached(Interrupted):
    """The time that the job allows is over; a checkpoint was written. Exit code 124."""

    exit_code = 124  # as coreutils' timeout

    def __init__(self, message: str) -> None:
        super().__init__(0, message)
        self.exit_code = DeadlineReached.exit_code


class NewPlan(BatchwrightError):  # noqa: N818 - a change that was asked for is no error
    """A run stopped after an epoch, with a checkpoint, to continue with the run folder's new plan.

    Exit code 75.
    """

    exit_code = 75  # as sysexits' EX_TEMPFAIL: try again


@contextmanager
def said_by(variable: str) -> Iterator[None]:
    """Inside, error messages begin with the environment variable that a value came from."""
    try:
        yield
    except BatchwrightError as error:
        error.args = (f"{variable}: {error}",)
        raise
