"""What this process runs on: device, cores, threads, precision, memory, allocator.

Linux tells more than other systems do; where something cannot be known, the plain answer of
Python or PyTorch stands.
"""

from __future__ import annotations

import gc
import os
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch

from batchwright.errors import BatchwrightError, JobError
from batchwright.records import Precision
from batchwright.records.registries.launchers import LAUNCHERS, STARTED_BY
from batchwright.workload import allocator

THREADS = "BATCHWRIGHT_THREADS"
"""Environment variable: compute threads of a worker, as a sweep divides the cores."""

OPENMP_THREADS = "OMP_NUM_THREADS"  # which also is what launchers tell a worker's threads by

_RAY = "RAY_RAYLET_PID"  # in all processes that Ray starts, and those below them

CPU_WORKERS = 2
"""Worker processes on a machine without GPU, where the job does not say."""

_GIB = 2**30


def usable_cores() -> int:
    """CPU cores that this process may use: its affinity, and its control group's limit."""
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


def given_threads() -> int | None:
    """What `THREADS` says, if anything.

    Raises:
        BatchwrightError: It is no number of threads.
    """
    given = os.environ.get(THREADS, "").strip()
    if not given:
        return None
    if not re.fullmatch("0*[1-9][0-9]{0,5}", given):
        raise BatchwrightError(
            f"{THREADS}={given[:60]}: give the compute threads of a worker, a whole number such as "
            f"{usable_cores()}, or unset it"
        )
    return int(given)


def openmp_threads() -> int:
    """What `OPENMP_THREADS` says, the first of a list of levels; 0: nothing.

    Raises:
        BatchwrightError: It is no number of threads.
    """
    given = os.environ.get(OPENMP_THREADS, "").strip()
    if not re.fullmatch(r"([0-9]{1,6}(\s*,\s*[0-9]{1,6})*)?", given):
        raise BatchwrightError(
            f"{OPENMP_THREADS}={given[:60]}: give compute threads, a whole number such as "
            f"{usable_cores()}, or unset it"
        )
    return int(given.partition(",")[0] or 0)


def worker_threads(local_workers: int) -> int:
    """Compute threads of each of ``local_workers`` on this machine: an equal share of its cores.

    Inside a sweep, the share of the cores that the sweep gives its run. ``OMP_NUM_THREADS`` above 1
    is taken as the user's word; torchrun sets 1 by itself. Below Ray it is what a task, a trial or
    an actor has reserved, where others have the rest.

    Raises:
        BatchwrightError: As `given_threads` and `openmp_threads` raise.
    """
    if (given := given_threads()) is not None:
        return given
    asked = openmp_threads()
    if asked > (0 if _RAY in os.environ else 1):
        return asked
    return max(1, usable_cores() // local_workers)


def local_workers(workers: int) -> int:
    """How many of ``workers`` may be on this machine: all, unless their launcher has told fewer."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return min(workers, int(told)) if told.isdigit() else workers


def default_workers(device: str) -> int:
    """Worker processes where the job does not say: all visible GPUs, or two on CPU."""
    on_gpu = device != "cpu" and torch.cuda.is_available()
    return torch.cuda.device_count() if on_gpu else CPU_WORKERS


def resolve_device(name: str, local_rank: int = 0) -> torch.device:
    """The device of the worker with ``local_rank``.

    Args:
        name: ``auto`` (a GPU if there is any), ``cpu`` or ``cuda``.
        local_rank: Number of the worker on this machine, from 0.

    Raises:
        JobError: A GPU is asked for and this worker has none.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        engine = LAUNCHERS.get(os.environ.get(STARTED_BY, ""))
        asked = f"{engine.asks_gpus}, or " if engine is not None and engine.asks_gpus else ""
        raise JobError(
            f"device={name}: PyTorch {torch.__version__} sees no GPU; try {asked}device=cpu"
        )
    visible = torch.cuda.device_count()
    if local_rank >= visible:
        raise JobError(
            f"device={name}: worker {local_rank} has no GPU of its own, {visible} visible; "
            f"try workers={visible}"
        )
    return torch.device("cuda", local_rank)


def shared_out(name: str, local_rank: int) -> torch.device:
    """As `resolve_device`, for a worker that another launcher has started.

    Slurm and others show each worker its own GPU alone, or show all of them to each.
    """
    visible = torch.cuda.device_count() if name != "cpu" and torch.cuda.is_available() else 1
    return resolve_device(name, local_rank % max(1, visible))


def identity(device: torch.device) -> str:
    """What no other GPU of this machine is called; empty on the CPU, which workers may share."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def enter(device: torch.device) -> torch.device:
    """Make a worker's GPU the current one; first thing in every worker, before it touches a GPU.

    What names no GPU goes to the current one, ``cuda:0`` unless this is called: exchanges of
    objects, streams and events, pinned memory and the thread that pins batches. From another
    worker each of them would open a context there, of some hundred MiB.

    Returns:
        The same device.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def computes_in_bfloat16(device: torch.device) -> bool:
    """Whether ``device`` multiplies bfloat16 in hardware; elsewhere it is emulated, and slow."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))  # from Ampere on
    # The processor's flags are those of its first core, which stand at the head of the file.
    flags = read_text("/proc/cpuinfo").partition("\n\n")[0].split()
    return "avx512_bf16" in flags or "amx_bf16" in flags


def half_of(device: torch.device) -> Precision | None:
    """The 16-bit number format that ``device`` multiplies in hardware, if any.

    float16 only where there is no bfloat16, as on GPUs before Ampere that have tensor cores: it
    takes loss scaling, and steps that are left out.
    """
    if computes_in_bfloat16(device):
        return "bfloat16"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (7, 0):
        return "float16"
    return None


def arithmetic(device: torch.device) -> str:
    """What float32 is on a GPU and how its convolutions are chosen, in words; empty on the CPU.

    Both are the user's to set, and change times and rounding: TF32 keeps 10 bits of a factor's
    mantissa, and with ``benchmark`` cuDNN tries its ways at each new shape.
    """
    if device.type != "cuda":
        return ""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    if hasattr(matmul, "fp32_precision"):  # from PyTorch 2.9 on; what was set so, the old refuse
        conv = cudnn.conv  # type: ignore[attr-defined] # PyTorch annotates others alone
        in_tf32 = matmul.fp32_precision == "tf32", conv.fp32_precision == "tf32"
    else:
        in_tf32 = torch.get_float32_matmul_precision() != "highest", cudnn.allow_tf32
    products, convolutions = ("on" if one else "off" for one in in_tf32)
    tries = "tries all" if torch.backends.cudnn.benchmark else "chooses untried"
    return f"TF32 {products} in products, {convolutions} in convolutions; cuDNN {tries}"


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

NARROW = ("float16",)
"""Number formats of a range so narrow that losses are scaled for them."""


def dtype_of(precision: Precision) -> torch.dtype:
    """What images are in that a network takes in this number format."""
    return _DTYPES[precision]


def autocast(precision: Precision, device: torch.device) -> torch.autocast:
    """Context in which the forward pass and the loss run; without effect for float32."""
    half = dtype_of(precision) if precision != "float32" else torch.bfloat16
    return torch.autocast(device.type, dtype=half, enabled=precision != "float32")


_OUT_OF_MEMORY = (
    "can't allocate memory",  # the CPU's allocator
    "CUDA out of memory",  # in words only, as a thread that pins batches passes it on
    "HIP out of memory",  # the same on AMD's GPUs
    " error: out of memory",  # CUDA's, HIP's, or the driver's: outside of PyTorch's allocator
    "Triton Error [CUDA]: out of memory",
    "Cuda failure 'out of memory'",  # NCCL's, whose connections take some
    "Cuda failure 2 'out of memory'",  # as before, from NCCL 2.19 on
    "Failed to CUDA calloc",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate",  # no room for its handle
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",  # from cuDNN 9 on
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "CUDNN_STATUS_NOT_SUPPORTED",  # no way to convolve fits into what is free
    "Unable to find a valid cuDNN algorithm",  # as before, in other words
    "unable to find an engine to execute this computation",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that memory ran out; only PyTorch's GPU allocator has a class for it.

    cuBLAS and cuDNN ask for memory of their own. An error of theirs that does not come from that
    comes again with the smallest micro-batch, and ends the run with its own words.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(one in str(error) for one in _OUT_OF_MEMORY)


def release_memory(device: torch.device) -> None:
    """After memory ran out: give back what nothing holds, so that smaller batches find room.

    A graph that is part of a circle of objects lives until Python looks for such; call this once
    the error itself is gone, whose traceback holds what failed.
    """
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def prepare_process(threads: int) -> str:
    """Set the number of compute threads, and up the memory allocator (`workload.allocator`).

    Returns:
        The state of the allocator, in words.
    """
    torch.set_num_threads(threads)
    return allocator.set_up()


def free_memory(device: torch.device, workers: int) -> int:
    """Bytes that one of ``workers`` on this machine may use at present, at least 1.

    On a GPU, which one worker has to itself, the device's own free bytes and all that this process
    holds already, as peaks there count weights and images, too; contexts and what others hold are
    neither. Else the machine's available memory, or what the control group leaves of its limit,
    divided by the workers.
    """
    if device.type == "cuda":
        return max(1, torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device))
    free = min([_available_bytes(), *map(_memory_left, control_groups("memory"))])
    return max(1, int(free) // workers)


def collective_interface() -> str:
    """Name of the loopback network interface, which collectives on one machine use.

    Raises:
        BatchwrightError: There is none.
    """
    names = [name for _, name in socket.if_nameindex()]
    for name in ("lo", "lo0"):  # Linux, macOS
        if name in names:
            return name
    raise BatchwrightError(
        f"no loopback network interface among {', '.join(names) or 'none'}: workers on one machine "
        "talk over it; bring it up, for example with `ip link set lo up`"
    )


# --------------------------------------------------------------------------------- control groups


def control_groups(controller: Literal["cpu", "memory"]) -> Iterator[Path]:
    """Folders of this process's control group and of those above it, versions 1 and 2."""
    for line in read_text("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = Path("/sys/fs/cgroup") / (controller if controllers else "")
        inner = Path(path.lstrip("/"))
        for folder in (inner, *inner.parents):
            # Inside a container the path may be the one outside; folders not there are passed over.
            if (root / folder).is_dir():
                yield root / folder


def _memory_left(folder: Path) -> float:
    """Bytes left below the limit; file pages that the kernel can drop count as left."""
    limit = read_text(folder / "memory.max") or read_text(folder / "memory.limit_in_bytes")
    used = read_text(folder / "memory.current") or read_text(folder / "memory.usage_in_bytes")
    if not (limit.strip().isdigit() and used.strip().isdigit()):
        return float("inf")
    fields = dict(line.split() for line in read_text(folder / "memory.stat").splitlines())
    droppable = int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))
    return int(limit) - int(used) + droppable


def _available_bytes() -> int:
    """Memory of the machine that could be had without swapping; all of it where unknown."""
    for line in read_text("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def read_text(path: str | Path) -> str:
    """Text of a file of the kernel, empty where there is none."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""
