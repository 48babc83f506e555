"""What tests of several modules share.

What takes long to import is imported by the fixtures that want it: the process that hands out tests
reads this file, too, before it starts the others.
"""

from __future__ import annotations

import gc
import io
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from _pytest.runner import runtestprotocol

if TYPE_CHECKING:
    from gloo import Crew
    from services import HandClock, Service

LONGEST = (
    *("ray", "hosts", "started_by_others", "docs", "slurm", "for_lightning", "service_serving"),
    *("loading", "examples", "service_browser", "cli", "for_accelerate", "for_transformers"),
    *("probe_workers", "exactness", "service_takeover", "library_data", "gpu_benchmark"),
    *("kept_folders", "recovery", "launch", "objectives", "compilation", "reporter"),
    *("dual_benchmarks", "locks", "service_artifacts", "exports", "sweep", "registries"),
    *("server_session", "session_workers", "service_disturbed", "loads"),
)
"""Files of tests that take half a minute or more in all, longest first."""

LONGEST_OF_QUICK = (
    *("probe_controller", "service_agent", "simulated_training", "reporting_plan", "cli"),
    *("sweep", "reporter", "service_bodies", "service_jobs", "reporting_workers"),
)
"""The same of the tests that are not slow, of which no file takes a quarter of a minute."""

QUICK = "not slow"

MEMORY = Path("/dev/shm")  # noqa: S108 - pytest makes a folder there that is its user's alone
ROOM = 6 << 30
"""Bytes that must be free there, far more than folders of tests take; as much again is left to
programs."""


SHOWN = 0.05
"""Seconds from which on set-up and end of a test are reported, for ``--durations``."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Three, as many tests wait for processes; one a core of those that compute, three at most."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 3
    return min(3, max(2, cores)) if config.option.markexpr == QUICK else 3


def pytest_configure(config: pytest.Config) -> None:
    """Set up Hypothesis, torch and the garbage collector in a process that runs tests."""
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # under nohup: commands would heed none
        signal.signal(signal.SIGHUP, lambda *_: None)
    if not config.option.basetemp and "TMPDIR" not in os.environ and _takes_folders():
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
    if config.getoption("numprocesses", None):  # others run them
        # Hundreds of processes start: each would compile the package and the tests anew.
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        if sys.platform == "linux":
            os.environ["FORKED_ROOT"] = f"forked-root-{os.getpid()}"
        return
    gc.disable()  # until all tests are imported
    from batchwright.distributed.processes import spinning_shortly

    os.environ.update(spinning_shortly(os.environ))  # before torch loads its threads
    import torch
    from hypothesis import HealthCheck, settings

    from batchwright.workload import host

    # On a busy machine anything takes long.
    settings.register_profile(
        "untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.register_profile("quick", settings.get_profile("untimed"), max_examples=25)
    settings.load_profile("quick" if config.option.markexpr == QUICK else "untimed")
    # Processes that each compute with all cores wait for one another most of the time.
    if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
        share = host.worker_threads(int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
        os.environ[host.THREADS] = str(share)
        torch.set_num_threads(share)


def _takes_folders() -> bool:
    """Whether folders of tests are kept in memory: some disks take milliseconds for each sync, and
    as many for each file that has been synced, or folder, and goes."""
    if sys.platform != "linux" or not os.access(MEMORY, os.W_OK):
        return False
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    runs_programs = not os.statvfs(MEMORY).f_flag & os.ST_NOEXEC
    return runs_programs and min(shutil.disk_usage(MEMORY).free, whole // 2) >= ROOM


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Processes that collect at the same time begin at different files: what one has compiled the
    others need not."""
    report = yield
    number = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if number.isdigit() and isinstance(collector, pytest.Dir) and report.result:
        first = len(report.result) * int(number) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        report.result = [*report.result[first:], *report.result[:first]]
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Have one process import, once a test asks for it, what all those that run tests fork from."""
    if session.config.getoption("numprocesses", None) and sys.platform == "linux":
        from forked import start_root

        session.config.add_cleanup(start_root().kill)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files that take long come first, so that no process is left with one at the end.

    Processes that were given different files first have them in the same order then.
    """
    longest = LONGEST_OF_QUICK if config.option.markexpr == QUICK else LONGEST
    order = {name: place for place, name in enumerate(longest)}
    by_name = "PYTEST_XDIST_WORKER" in os.environ

    def place(item: pytest.Item) -> tuple[int, str]:
        given = order.get(item.path.stem.removeprefix("test_"), len(order))
        return given, str(item.path) if by_name else ""

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """What was imported stays: the garbage collector need not go through it again and again."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(10_000, 10, 10)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """What a file of tests has imported stays, too: `gc.collect` takes a second with all of it."""
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()  # what the file leaves behind would stay as well
        gc.freeze()


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """The process that hands out tests is told once of a test that passes, and not three times.

    Of an empty test most of the time goes into what the processes tell each other.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, log=False, nextitem=nextitem)
    passed = all(report.passed for report in reports)
    for report in reports:  # of a failing one also what its end has printed
        if report.when == "call" or not passed or report.duration > SHOWN:
            item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.fixture
def many_files() -> Iterator[None]:
    """As many open files as `select` takes: the next ones get numbers above 1,023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < 1200:
        pytest.skip("so many files cannot be opened here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft if soft < 0 else max(soft, 1200), hard))
    with ExitStack() as files:
        files.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        while files.enter_context(open(os.devnull)).fileno() < 1023:  # noqa: PTH123 - a device
            pass
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny tensors on several threads mostly wait; and worker processes, with one, sum alike."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of figures stay empty: to draw them takes most of a report's time."""
    drawing = "batchwright.reporting.render.figures"
    monkeypatch.setattr(f"{drawing}.figure", lambda *_, **__: None)
    monkeypatch.setattr(f"{drawing}.file_bytes", lambda *_: b"")


@pytest.fixture
def clock() -> HandClock:
    """A clock that goes when a test says so."""
    from services import HandClock

    return HandClock()


@pytest.fixture
def service(tmp_path: Path, clock: HandClock) -> Iterator[Service]:
    """A service in this process, with a database of its own."""
    from services import serving_from

    yield from serving_from(tmp_path, clock)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Callable[[], str]]:
    """A PostgreSQL server for all tests; each call makes an empty database and gives its URL."""
    from postgres import databases

    yield from databases()


@pytest.fixture(scope="session")
def crew() -> Iterator[Crew]:
    """Worker processes for all modules: starting them takes longer than most of their work."""
    from gloo import crew_with

    with crew_with("pytest", "hypothesis") as crew:  # what files of tests import
        yield crew


@pytest.fixture(scope="module")
def forks() -> Iterator[None]:
    """What the tests of a file start is forked from a process that has imported all."""
    from forked import forking

    with forking():
        yield


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Decoded images, once for all tests of a process."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a cache for one test."""
    monkeypatch.setenv("BATCHWRIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs ``batchwright WORDS`` in this process: exit code, stdout, stderr."""
    import command_line  # noqa: F401 - made once
    from batchwright.cli import commands

    # Most are refused: a process that imports for their workers would take a core from others.
    monkeypatch.setattr("batchwright.workflows.verbs.imported_once", nullcontext)

    def call(*words: object, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["batchwright", *map(str, words)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = 0
        try:
            commands.main()
        except SystemExit as end:
            code = int(end.code or 0)
        done = capsys.readouterr()
        return code, done.out, done.err

    return call
