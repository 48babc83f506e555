"""The doctor: what a machine offers for training, and what is wrong with it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import socket
import sys
import time
from typing import NamedTuple

from batchwright.errors import BatchwrightError, not_installed
from batchwright.records.text.formatting import counted

MIN_SHARED_MEMORY = 64 * 2**20  # bytes; loader processes pass batches through it
_PACKAGES = ("numpy", "scipy", "pydantic", "pillow", "scikit-learn", "matplotlib")


class Finding(NamedTuple):
    """One line of the doctor's report."""

    name: str  # what was examined
    value: str  # what was found
    problem: str = ""  # what is wrong and what to try; empty: nothing


def examine(version: str) -> list[Finding]:
    """Examine versions, devices, cores, load, allocator, network and memory of this machine.

    ``version`` is that of this package.
    """
    import torch

    from batchwright.workload.host import (
        default_workers,
        free_memory,
        half_of,
        prepare_process,
        resolve_device,
        usable_cores,
    )

    device = resolve_device("auto")
    workers = default_workers(device.type)
    cores = usable_cores()
    few = ""
    if device.type == "cpu" and cores < workers:
        few = f"{workers} workers on {counted(cores, 'core')} take turns: set workers={cores}"
    half = half_of(device)
    faster = f"{half} where it is faster, else " if half else ""
    return [
        Finding("batchwright", version),
        Finding(
            "python",
            f"{platform.python_version()} on {platform.system()}",
            "" if sys.platform == "linux" else "only Linux is tested; on Windows use WSL 2",
        ),
        Finding("torch", str(torch.__version__)),
        *map(_package, _PACKAGES),
        Finding("device", _device(device)),
        Finding("cores", f"{cores} usable", few),
        _threads(workers),
        Finding("workers", f"{workers} by default"),
        _load(),
        Finding("precision", f"{faster}float32"),
        Finding("memory", f"{free_memory(device, workers) / 2**30:.1f} GiB for each worker"),
        Finding("allocator", prepare_process(torch.get_num_threads())),
        _collectives(),
        _shared_memory(),
    ]


def _package(name: str) -> Finding:
    try:
        return Finding(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "missing", not_installed(name))


def _threads(workers: int) -> Finding:
    from batchwright.workload.host import worker_threads

    try:
        return Finding("threads", f"{worker_threads(workers)} for each worker")
    except BatchwrightError as error:
        return Finding("threads", "not known", str(error))


def _device(device: object) -> str:
    import torch

    if str(device).startswith("cuda"):
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return f"{len(names)} GPU: {', '.join(sorted(set(names)))}"
    return f"CPU, {torch.backends.cpu.get_cpu_capability()}"


def _load() -> Finding:
    """What other programs use of the machine during a short observation."""
    from batchwright.records.text.load_text import disturbances
    from batchwright.workload.load import MIN_SECONDS, LoadWatch

    watch = LoadWatch()
    time.sleep(1.1 * MIN_SECONDS)
    load = watch.whole()
    if load is None:
        return Finding("load", "not known")
    seen = " and ".join(disturbances(load))
    # Not reported as a problem, which would end the command with an error: load passes.
    return Finding("load", f"busy: {seen}; a probe would measure that, too" if seen else "quiet")


def _collectives() -> Finding:
    """Which interface gloo will use on this host, and whether it can be reached."""
    from batchwright.workload.host import collective_interface

    asked = os.environ.get("GLOO_SOCKET_IFNAME")
    interface = asked or collective_interface()
    known = [name for _, name in socket.if_nameindex()]
    problem = ""
    if not {*interface.split(",")} <= {*known}:
        problem = f"there is no such interface (known: {', '.join(known)}): GLOO_SOCKET_IFNAME"
    else:
        try:
            with socket.create_server(("127.0.0.1", 0)) as server:
                socket.create_connection(server.getsockname(), timeout=5).close()
        except OSError:
            problem = "127.0.0.1 does not answer: check the loopback interface"
    why = "GLOO_SOCKET_IFNAME" if asked else "loopback, on one host"
    return Finding("collectives", f"{interface} ({why})", problem)


def _shared_memory() -> Finding:
    if not os.path.isdir("/dev/shm"):  # noqa: PTH112, S108 - asked about, not written to
        return Finding("shared memory", "no /dev/shm")
    free = shutil.disk_usage("/dev/shm").free  # noqa: S108
    problem = ""
    if free < MIN_SHARED_MEMORY:
        problem = "loader processes may die with a bus error: enlarge it (docker: --shm-size=1g)"
    return Finding("shared memory", f"{free / 2**20:.0f} MiB free", problem)
