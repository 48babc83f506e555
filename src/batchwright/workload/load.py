"""How busy the machine is with other programs while ours runs (Linux; elsewhere unknown).

The kernel counts the processor time of each core and of each process. The load by other programs is
the time of the cores less the time of this process, of all processes below it and of the kernel's
own threads. So it includes programs that come and go, and those in other containers, which cannot
be seen from here. Workers, loader processes, their threads and the display of progress are all
below the process that measures.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from batchwright.records import MachineLoad
from batchwright.storage.control_groups import control_groups, read_text, usable_cores

MIN_SECONDS = 1.0
"""Least seconds between two readings: the kernel counts processes in hundredths of a second."""

_KERNEL_THREAD = 0x00200000  # PF_KTHREAD, from <linux/sched.h>
# Fields of /proc/PID/stat, counted after the name. Times: user and kernel mode, the process's own
# and those of children that have ended.
_PARENT, _FLAGS, _TIMES = 1, 6, slice(11, 15)
_FIELDS = 9  # words of a core's line in /proc/stat, up to the time stolen by the host
_MICROSECOND, _NANOSECOND = 1e-6, 1e-9


@dataclass(frozen=True)
class Reading:
    """The kernel's counters at one moment, in seconds since a fixed one.

    Attributes:
        at: Wall clock.
        cores: CPU cores that this process may use at once: the cores of these counters, or fewer by
            the limit of its control group.
        busy: Processor time spent in programs and in the kernel for them.
        idle: Processor time in which a core had nothing to do.
        stolen: Processor time that the host of a virtual machine gave to others.
        ours: Processor time of this process and of all processes below it, ended ones included.
        kernel: Processor time of the kernel's own threads, as far as they can be seen.
        groups: For each control group of this process: the time in which the group's limit kept its
            processes from running, and the processor time of all its processes.
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
    """Ticks of this process and all processes below it, and ticks of the kernel's threads.

    The time of an ended process is added to its parent's, so none is lost between two readings.
    """
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    kernel = 0
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        # The fields after the name, which may contain anything.
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
    """Seconds in which a control group was throttled, and processor seconds of its processes."""
    words = read_text(folder / "cpu.stat").split()
    counters = {name: int(value) for name, value in zip(words[::2], words[1::2], strict=False)}
    if "usage_usec" in counters:  # version 2
        throttled = counters.get("throttled_usec", 0)
        return _MICROSECOND * throttled, _MICROSECOND * counters["usage_usec"]
    used = read_text(folder / "cpuacct.usage").strip()  # version 1
    return _NANOSECOND * counters.get("throttled_time", 0), _NANOSECOND * int(used or 0)


def load_between(first: Reading, last: Reading) -> MachineLoad | None:
    """The machine's load between two readings; `None` if they are too close to each other."""
    seconds = last.at - first.at
    if seconds < MIN_SECONDS:
        return None
    # Throttling counts only as far as other processes of the group ran: without them a process is
    # throttled for its own work, in a training as in a probe.
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
    """Observes the machine's load, in consecutive stretches and as a whole.

    Args:
        read: Reads the counters, which takes a file for each process.
        clock: Returns seconds by the clock of the counters.
    """

    def __init__(
        self,
        read: Callable[[], Reading | None] = read_load,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read, self._clock = read, clock
        self._first = self._last = read()

    def stretch(self) -> MachineLoad | None:
        """The load since the last stretch; ends this one, and begins the next.

        `None` if too little time has passed; the stretch then goes on.
        """
        if self._last is None or self._clock() < self._last.at + MIN_SECONDS:
            return None
        now = self._read()
        load = load_between(self._last, now) if now is not None else None
        if load is not None:
            self._last = now
        return load

    def whole(self) -> MachineLoad | None:
        """The load since the watch began; `None` if that is too short."""
        now = self._read()
        return None if now is None or self._first is None else load_between(self._first, now)
