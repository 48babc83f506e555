"""The hardware of this process: device, cores, threads, number formats, memory, allocator.

Linux shows more than other systems do; where something cannot be known, Python's or PyTorch's own
answer is used.
"""

from __future__ import annotations

import gc
import os
import re
import socket
from pathlib import Path

import torch

from batchwright.errors import BatchwrightError, JobError
from batchwright.records import Precision
from batchwright.records.registries.launchers import LAUNCHERS, STARTED_BY
from batchwright.storage.control_groups import control_groups, read_text
from batchwright.storage.control_groups import usable_cores as usable_cores
from batchwright.workload import allocator

THREADS = "BATCHWRIGHT_THREADS"
"""Environment variable: compute threads of a worker; a sweep divides the cores by it."""

OPENMP_THREADS = "OMP_NUM_THREADS"  # by which launchers, too, set a worker's threads

_RAY = "RAY_RAYLET_PID"  # set in all processes that Ray starts, and in those below them

CPU_WORKERS = 2
"""Worker processes on a machine without GPU, unless the job says otherwise."""

_GIB = 2**30


def given_threads() -> int | None:
    """The value of `THREADS`; `None` if it is not set.

    Raises:
        BatchwrightError: The value is no number of threads.
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
    """The value of `OPENMP_THREADS`, of a list of levels the first; 0 if it is not set.

    Raises:
        BatchwrightError: The value is no number of threads.
    """
    given = os.environ.get(OPENMP_THREADS, "").strip()
    if not re.fullmatch(r"([0-9]{1,6}(\s*,\s*[0-9]{1,6})*)?", given):
        raise BatchwrightError(
            f"{OPENMP_THREADS}={given[:60]}: give compute threads, a whole number such as "
            f"{usable_cores()}, or unset it"
        )
    return int(given.partition(",")[0] or 0)


def worker_threads(local_workers: int) -> int:
    """Compute threads of each of ``local_workers`` on this machine.

    They are an equal share of the cores, with three exceptions. Inside a sweep they are the threads
    that the sweep gives its run. ``OMP_NUM_THREADS`` above 1 counts as the user's setting; torchrun
    sets 1 by itself. Under Ray, ``OMP_NUM_THREADS`` always counts: it is the number of cores that a
    task, a trial or an actor has reserved.

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
    """How many of ``workers`` may be on this machine: all, unless the launcher says fewer."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return min(workers, int(local)) if local.isdigit() else workers


def default_workers(device: str) -> int:
    """Worker processes unless the job says otherwise: one per visible GPU, or two on the CPU."""
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


def assigned_device(name: str, local_rank: int) -> torch.device:
    """`resolve_device` for a worker that another launcher has started.

    Slurm and other launchers show each worker either its own GPU alone, or all GPUs.
    """
    visible = torch.cuda.device_count() if name != "cpu" and torch.cuda.is_available() else 1
    return resolve_device(name, local_rank % max(1, visible))


def identity(device: torch.device) -> str:
    """The GPU's unique identifier; empty on the CPU, which workers may share."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def enter(device: torch.device) -> torch.device:
    """Make a worker's GPU the current one; every worker calls this before it uses a GPU.

    Calls that name no GPU go to the current one, by default ``cuda:0``: exchanges of objects,
    streams and events, pinned memory and the thread that pins batches. From another worker each of
    these would open a context on ``cuda:0``, of some hundred MiB.

    Returns:
        ``device``.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def computes_in_bfloat16(device: torch.device) -> bool:
    """Whether ``device`` multiplies bfloat16 in hardware; emulation elsewhere is slow."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))  # from Ampere on
    return bool({"avx512_bf16", "amx_bf16"} & _processor_flags())


def emulates(precision: Precision) -> bool:
    """Whether this computer's processor is known to lack the instructions for a number format.

    PyTorch computes in it all the same, in several times the time of float32.
    """
    needed = {"bfloat16": {"avx512_bf16", "amx_bf16"}, "float16": {"avx512_fp16", "amx_fp16"}}
    flags = _processor_flags()
    return precision in needed and bool(flags) and not needed[precision] & flags


def _processor_flags() -> set[str]:
    """Names of what an x86 processor can do; empty where the system does not tell them."""
    # The first paragraph of the file is about the first core, whose flags stand for all.
    lines = read_text("/proc/cpuinfo").partition("\n\n")[0].splitlines()
    return {word for line in lines if line.startswith("flags") for word in line.split()}


def half_of(device: torch.device) -> Precision | None:
    """The 16-bit number format that ``device`` multiplies in hardware, if any.

    float16 only where there is no bfloat16, as on GPUs before Ampere with tensor cores: float16
    needs loss scaling, which leaves some steps out.
    """
    if computes_in_bfloat16(device):
        return "bfloat16"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (7, 0):
        return "float16"
    return None


def arithmetic(device: torch.device) -> str:
    """Where a GPU uses TF32 and how cuDNN chooses its kernels, in words; empty on the CPU.

    The user may set both, and both change times and rounding: TF32 keeps 10 bits of a factor's
    mantissa, and with ``benchmark`` cuDNN tries its kernels at each new shape.
    """
    if device.type != "cuda":
        return ""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    # From PyTorch 2.9 on; the older getters refuse settings made in the new way.
    if hasattr(matmul, "fp32_precision"):
        conv = cudnn.conv  # type: ignore[attr-defined] # not annotated by PyTorch
        in_tf32 = matmul.fp32_precision == "tf32", conv.fp32_precision == "tf32"
    else:
        in_tf32 = torch.get_float32_matmul_precision() != "highest", cudnn.allow_tf32
    products, convolutions = ("on" if one else "off" for one in in_tf32)
    tries = "tries all" if torch.backends.cudnn.benchmark else "chooses untried"
    return f"TF32 {products} in products, {convolutions} in convolutions; cuDNN {tries}"


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

NARROW = ("float16",)
"""Number formats whose range is so narrow that they need loss scaling."""


def dtype_of(precision: Precision) -> torch.dtype:
    """Tensor format of a network's input images in a number format."""
    return _DTYPES[precision]


def autocast(precision: Precision, device: torch.device) -> torch.autocast:
    """Context of the forward pass and the loss; without effect for float32."""
    half = dtype_of(precision) if precision != "float32" else torch.bfloat16
    return torch.autocast(device.type, dtype=half, enabled=precision != "float32")


_OUT_OF_MEMORY = (
    "can't allocate memory",  # the CPU's allocator
    "CUDA out of memory",  # a thread that pins batches passes the error on by its message alone
    "HIP out of memory",  # of AMD's GPUs
    " error: out of memory",  # CUDA, HIP or the driver, outside of PyTorch's allocator
    "Triton Error [CUDA]: out of memory",
    "Cuda failure 'out of memory'",  # NCCL, whose connections take memory
    "Cuda failure 2 'out of memory'",  # NCCL from 2.19 on
    "Failed to CUDA ",  # calloc, malloc, host alloc: NCCL, too
    "NVML_SUCCESS == ",  # PyTorch's allocator, where it may not look who has the memory (MIG)
)
_OF_LIBRARIES = (  # which may also be said where the GPU has failed
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate",  # no room for a handle
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_INITIALIZED",  # no room for a handle, of which each thread has its own
    "CUDNN_STATUS_INTERNAL_ERROR",  # no room for kernels, which are loaded at their first use
    "CUDNN_STATUS_NOT_SUPPORTED",  # no convolution kernel fits into the free memory
    "Unable to find a valid cuDNN algorithm",  # the same in older versions
    "unable to find an engine to execute this computation",
    "CUDNN_STATUS_EXECUTION_FAILED",  # of many causes, of which memory is one where little is free
    "CUBLAS_STATUS_EXECUTION_FAILED",
    "CUBLAS_STATUS_INTERNAL_ERROR",
)
_EXECUTION = re.compile("CU(DNN|BLAS)_STATUS_EXECUTION_FAILED|CUBLAS_STATUS_INTERNAL_ERROR")
_LITTLE = 2**28  # bytes, assumed: kernels and the stacks of their threads take 10 to 100 MiB

_GPU_FAILURES = re.compile(  # texts of CUDA (and HIP) after which a process cannot use its GPU
    "device-side assert triggered|an illegal memory access was encountered|misaligned address"
    "|an illegal instruction was encountered|unspecified launch failure|hardware stack error"
    "|invalid program counter|operation not supported on global/shared address space"
    "|the launch timed out and was terminated|uncorrectable (ECC|NVLink) error"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that memory ran out; only PyTorch's GPU allocator has a class for it.

    cuBLAS and cuDNN allocate memory of their own. An error of theirs with another cause is raised
    again with the smallest micro-batch; the line that then ends a training, an evaluation or a
    probe quotes it. Behind a `gpu_failure` they cannot allocate anything either: then it is none.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error) if isinstance(error, RuntimeError) else ""
    if not any(one in text for one in _OF_LIBRARIES):
        return any(one in text for one in _OUT_OF_MEMORY)
    free, failed = _free_on_gpu()
    return not failed and (free < _LITTLE or not _EXECUTION.search(text))


def gpu_failure(error: BaseException) -> str:
    """What has made the GPU useless for this process, if ``error`` says so; else empty.

    Each later call on the GPU fails, too, so nothing can be repeated, and memory is not the cause.
    """
    text = str(error) if isinstance(error, RuntimeError) else ""
    if any(one in text for one in _OF_LIBRARIES):
        text += _free_on_gpu()[1]
    found = _GPU_FAILURES.search(text)
    return found[0] if found else ""


def _free_on_gpu() -> tuple[int, str]:
    """Free bytes of the GPU in use, 0 if none is; and, if it has failed, what it says instead."""
    if not torch.cuda.is_initialized():
        return 0, ""
    try:
        return torch.cuda.mem_get_info()[0], ""
    except RuntimeError as error:
        return 0, str(error)


def release_memory(device: torch.device) -> None:
    """Give unused memory of a GPU back, so that smaller batches or other processes find room.

    An autograd graph in a reference cycle lives until Python collects cycles. After an error call
    this once the error itself is gone, as its traceback holds the tensors of what failed.
    """
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def prepare_process(threads: int) -> str:
    """Set the number of compute threads, and set up the memory allocator (`workload.allocator`).

    Returns:
        The state of the allocator, in words.
    """
    torch.set_num_threads(threads)
    return allocator.set_up()


def free_memory(device: torch.device, workers: int) -> int:
    """Bytes that one of ``workers`` on this machine may use at present, at least 1.

    On a GPU, which belongs to one worker, they are the free bytes of the device and all bytes that
    this process holds already, as peaks on a GPU include weights and images. Contexts and the bytes
    of other processes do not count. On the CPU they are the machine's available memory, or the rest
    of the control group's limit if that is less, divided by the workers.
    """
    if device.type == "cuda":
        return max(1, torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device))
    free = min([_available_bytes(), *map(_memory_left, control_groups("memory"))])
    return max(1, int(free) // workers)


def collective_interface() -> str:
    """Name of the loopback network interface, which collectives on one machine use.

    Raises:
        BatchwrightError: There is no loopback interface.
    """
    names = [name for _, name in socket.if_nameindex()]
    for name in ("lo", "lo0"):  # Linux, macOS
        if name in names:
            return name
    raise BatchwrightError(
        f"no loopback network interface among {', '.join(names) or 'none'}: workers on one machine "
        "talk over it; bring it up, for example with `ip link set lo up`"
    )


def _memory_left(folder: Path) -> float:
    """Bytes left below a control group's limit; file pages that the kernel can drop count as left.

    Infinite without a limit.
    """
    limit = read_text(folder / "memory.max") or read_text(folder / "memory.limit_in_bytes")
    used = read_text(folder / "memory.current") or read_text(folder / "memory.usage_in_bytes")
    if not (limit.strip().isdigit() and used.strip().isdigit()):
        return float("inf")
    fields = dict(line.split() for line in read_text(folder / "memory.stat").splitlines())
    droppable = int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))
    return int(limit) - int(used) + droppable


def _available_bytes() -> int:
    """Bytes of the machine that are available without swapping; all bytes where that is unknown."""
    for line in read_text("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
