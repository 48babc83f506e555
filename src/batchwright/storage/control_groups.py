"""What this process may use of the machine, by its control group, as in a container or a batch job.

Linux shows more than other systems do. The files are the kernel's, and nothing here needs torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal


def usable_cores() -> int:
    """CPU cores that this process may use, by its affinity and its control group's limit."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    for folder in control_groups("cpu"):
        words = read_text(folder / "cpu.max").split()  # version 2: "200000 100000" or "max 100000"
        words = words or [
            read_text(folder / "cpu.cfs_quota_us").strip(),
            read_text(folder / "cpu.cfs_period_us").strip(),
        ]
        quota, period = (int(word) if word.isdigit() else -1 for word in words)  # microseconds
        if quota > 0:
            cores = min(cores, quota // max(1, period))
    return max(1, cores)


def usable_memory() -> int:
    """Bytes of main memory that this process may use: the machine's, or a control group's limit."""
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for folder in control_groups("memory"):
        limit = read_text(folder / "memory.max") or read_text(folder / "memory.limit_in_bytes")
        if limit.strip().isdigit():  # version 2 has "max" where there is none
            most = min(most, int(limit))
    return most


def control_groups(controller: Literal["cpu", "memory"]) -> Iterator[Path]:
    """Folders of this process's control group and of those above it, versions 1 and 2."""
    for line in read_text("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = Path("/sys/fs/cgroup") / (controller if controllers else "")
        inner = Path(path.lstrip("/"))
        for folder in (inner, *inner.parents):
            # Inside a container the path may be that of the host: folders that are missing are left
            # out.
            if (root / folder).is_dir():
                yield root / folder


def read_text(path: str | Path) -> str:
    """Text of a file of the kernel; empty if it cannot be read."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""
