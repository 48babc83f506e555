"""How busy the machine is with others' work, while ours goes on (Linux; elsewhere nobody tells).

The kernel counts the processor time of each core, and that of each process. What the cores did,
less what this process, all below it and the kernel's own threads did, is others' work: their
processes may come and go, or live in another container, where nobody here can see them. Workers,
loader processes, their threads and the display of progress are all below the process that asks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from batchwright.records import MachineLoad
from batchwright.workload.host import control_groups, read_text, usable_cores

MIN_SECONDS = 1.0
"""A shorter look tells little: the kernel counts in hundredths of a second, for each process."""

_KERNEL_THREAD = 0x00200000  # PF_KTHREAD, from <linux/sched.h>
# Of /proc/PID/stat, counted after the name. Times: user and kernel mode, its own and those of
# children that have ended.
_PARENT, _FLAGS, _TIMES = 1, 6, slice(11, 15)
_FIELDS = 9  # of a core in /proc/stat, up to what the host took
_MICROSECOND, _NANOSECOND = 1e-6, 1e-9


@dataclass(frozen=True)
class Reading:
    """Counters of the kernel at one moment, in seconds since any moment.

    Attributes:
        at: Wall clock.
        cores: CPU cores that this process may use at once: those whose counters these are, or fewer
            by its control group's limit.
        busy: Processor time spent in programs and in the kernel for them.
        idle: Processor time in which a core had nothing to do.
        stolen: Processor time that the host of a virtual machine gave to others.
        ours: Processor time of this process and all below it, those that have ended included.
        kernel: Processor time of the kernel's own threads, as far as they are seen.
        groups: Of each control group that this process is in, time in which its limit kept its
            processes from running, and processor time of all of them.
    """

    at: float
    cores: int
    busy: float
    idle: float
    stolen: float
    ours: float
    kernel: float
    groups: tuple[tuple[float, float], ...] = ()


def read_load(proc: Path = Path("/proc")) -> Reading | None:
    """The counters now; `None` where the kernel shows none."""
    tick = 1 / os.sysconf("SC_CLK_TCK")
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    cores = [
        [int(number) for number in line.split()[1:_FIELDS]]
        for line in read_text(proc / "stat").splitlines()
        if line.startswith("cpu") and line[3:4].isdigit() and int(line.split()[0][3:]) in allowed
    ]
    if not cores or any(len(core) < _FIELDS - 1 for core in cores):
        return None
    user, nice, system, idle, waiting, _, _, stolen = (
        tick * sum(times) for times in zip(*cores, strict=True)
    )
    ours, kernel = _processes(proc)
    return Reading(
        at=time.monotonic(),
        cores=min(len(cores), usable_cores()),
        busy=user + nice + system,
        idle=idle + waiting,
        stolen=stolen,
        ours=tick * ours,
        kernel=tick * kernel,
        groups=tuple(_group(folder) for folder in control_groups("cpu")),
    )


def _processes(proc: Path) -> tuple[int, int]:
    """Ticks of this process and all below it, and those of the kernel's threads.

    What has ended counts with who waited for it, so nothing is lost between two readings.
    """
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    kernel = 0
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        # What stands behind the name, which may hold anything.
        fields = read_text(folder / "stat").rpartition(")")[2].split()
        if len(fields) < _TIMES.stop:  # it has ended meanwhile
            continue
        process, times = int(folder.name), [int(number) for number in fields[_TIMES]]
        parents[process] = int(fields[_PARENT])
        ticks[process] = sum(times)
        if int(fields[_FLAGS]) & _KERNEL_THREAD:
            kernel += sum(times)
    family, found = set[int](), {os.getpid()}
    while found:
        family |= found
        found = {child for child, parent in parents.items() if parent in family} - family
    return sum(ticks.get(process, 0) for process in family), kernel


def _group(folder: Path) -> tuple[float, float]:
    """Seconds in which a control group was kept from running, and those that it ran."""
    words = read_text(folder / "cpu.stat").split()
    told = {name: int(value) for name, value in zip(words[::2], words[1::2], strict=False)}
    if "usage_usec" in told:  # version 2
        return _MICROSECOND * told.get("throttled_usec", 0), _MICROSECOND * told["usage_usec"]
    used = read_text(folder / "cpuacct.usage").strip()  # version 1
    return _NANOSECOND * told.get("throttled_time", 0), _NANOSECOND * int(used or 0)


def load_between(first: Reading, last: Reading) -> MachineLoad | None:
    """What ran between two readings; `None` where that is too short to tell."""
    seconds = last.at - first.at
    if seconds < MIN_SECONDS:
        return None
    # Without others in its group a process is throttled for its own work, in a training as in a
    # probe; others take no more of the limit than they run.
    kept_back = [
        min(throttled - before, (used - used_before) - (last.ours - first.ours))
        for (before, used_before), (throttled, used) in zip(first.groups, last.groups, strict=False)
    ]
    ours = (last.ours - first.ours) / seconds
    kernel = (last.kernel - first.kernel) / seconds
    busy = (last.busy - first.busy) / seconds
    return MachineLoad(
        cores=last.cores,
        seconds=seconds,
        ours=max(0.0, ours),
        others=max(0.0, busy - ours - kernel),
        stolen=max(0.0, (last.stolen - first.stolen) / seconds),
        idle=max(0.0, (last.idle - first.idle) / seconds),
        throttled=max([0.0, *kept_back]) / seconds,
    )


class LoadWatch:
    """Looks at the load, stretch by stretch and over all.

    Args:
        read: Gives the counters.
        clock: Seconds, by the clock of the counters; reading them takes a file for each process.
    """

    def __init__(
        self,
        read: Callable[[], Reading | None] = read_load,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read, self._clock = read, clock
        self._first = self._last = read()

    def stretch(self) -> MachineLoad | None:
        """The load since the last stretch ended, which this one then does.

        `None` if that is too short to tell.
        """
        if self._last is None or self._clock() < self._last.at + MIN_SECONDS:
            return None
        now = self._read()
        load = load_between(self._last, now) if now is not None else None
        if load is not None:
            self._last = now
        return load

    def whole(self) -> MachineLoad | None:
        """The load since the watch began."""
        now = self._read()
        return None if now is None or self._first is None else load_between(self._first, now)
