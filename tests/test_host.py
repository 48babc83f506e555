"""What the process runs on."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from batchwright.client.offering import offer
from batchwright.distributed import processes
from batchwright.errors import BatchwrightError, JobError
from batchwright.records.profile import JOINED
from batchwright.records.registries.launchers import STARTED_BY
from batchwright.storage import control_groups
from batchwright.workload import allocator, host
from batchwright.workload.tensor_bytes import counting_tensors

CPU = torch.device("cpu")
linux = pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")


@pytest.fixture
def kernel(monkeypatch, tmp_path):
    """A kernel whose files a test writes: a function from path to text."""
    files: dict[str, str] = {}
    for module in (host, control_groups):
        monkeypatch.setattr(module, "read_text", lambda path: files.get(str(path), ""))
    monkeypatch.setattr(Path, "is_dir", lambda _: True)
    return files


def test_cores_are_at_least_one_and_never_more_than_the_machine_has():
    assert 1 <= host.usable_cores() <= (os.cpu_count() or 1)


@linux
@pytest.mark.parametrize(
    ("limit", "expected"), [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1)]
)
def test_cores_stay_below_the_limit_of_the_control_group(kernel, monkeypatch, limit, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    kernel["/proc/self/cgroup"] = "0::/user/job\n"
    kernel["/sys/fs/cgroup/user/cpu.max"] = limit
    assert host.usable_cores() == expected


@linux
@pytest.mark.parametrize(("quota", "expected"), [("-1", 8), ("300000", 3)])
def test_cores_stay_below_the_limit_of_a_version_1_group(kernel, monkeypatch, quota, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    kernel["/proc/self/cgroup"] = "4:cpuacct,cpu:/job\n5:memory:/other\n"
    kernel["/sys/fs/cgroup/cpu/job/cpu.cfs_quota_us"] = f"{quota}\n"
    kernel["/sys/fs/cgroup/cpu/job/cpu.cfs_period_us"] = "100000\n"
    assert host.usable_cores() == expected


@linux
@pytest.mark.parametrize("name", ["job/memory.max", "memory/job/memory.limit_in_bytes"])
def test_memory_stays_below_the_limit_of_the_control_group(kernel, name):
    """Else an agent in a container would be given jobs that its container has no room for."""
    kernel["/proc/self/cgroup"] = "5:memory:/job\n" if "limit" in name else "0::/job\n"
    machine = control_groups.usable_memory()
    assert machine == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    kernel[f"/sys/fs/cgroup/{name}"] = "max\n"
    assert control_groups.usable_memory() == machine
    kernel[f"/sys/fs/cgroup/{name}"] = f"{2**24}\n"
    assert control_groups.usable_memory() == offer().memory == 2**24


@pytest.mark.parametrize(
    ("given", "threads"),
    [
        ({}, 4),
        ({"OMP_NUM_THREADS": "1"}, 4),  # as torchrun sets it
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "3, 2"}, 3),  # of nested levels
        ({"OMP_NUM_THREADS": ""}, 4),
        ({"OMP_NUM_THREADS": "1", "RAY_RAYLET_PID": "7"}, 1),  # as Ray does for a task of a core
        ({"OMP_NUM_THREADS": "1", "RAY_RAYLET_PID": "7", host.THREADS: "2"}, 2),
    ],
)
def test_threads_are_a_share_of_the_cores_unless_they_are_given(monkeypatch, given, threads):
    monkeypatch.setattr(host, "usable_cores", lambda: 8)
    for name in (host.THREADS, "OMP_NUM_THREADS", "RAY_RAYLET_PID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert host.worker_threads(2) == threads


def test_free_memory_is_what_the_control_group_leaves_divided_by_the_workers(kernel):
    kernel["/proc/meminfo"] = "MemTotal: 9000000 kB\nMemAvailable:    8000000 kB\n"
    assert host.free_memory(CPU, 2) == 8_000_000 * 1024 // 2
    kernel["/proc/self/cgroup"] = "0::/job\n"
    kernel["/sys/fs/cgroup/job/memory.max"] = "1000000\n"
    kernel["/sys/fs/cgroup/job/memory.current"] = "700000\n"
    kernel["/sys/fs/cgroup/job/memory.stat"] = "anon 500000\ninactive_file 100000\n"
    assert host.free_memory(CPU, 2) == 200_000


@pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="the older way alone"
)
def test_tf32_is_told_also_where_it_is_set_in_the_way_in_which_the_old_one_cannot_be_asked():
    gpu, products = torch.device("cuda", 0), torch.backends.cuda.matmul
    convolutions = torch.backends.cudnn.conv
    before = products.fp32_precision, convolutions.fp32_precision
    assert "TF32 off in products, on in convolutions" in host.arithmetic(gpu)
    products.fp32_precision, convolutions.fp32_precision = "tf32", "ieee"
    try:
        assert "TF32 on in products, off in convolutions" in host.arithmetic(gpu)
    finally:
        products.fp32_precision, convolutions.fp32_precision = before
    assert not host.arithmetic(CPU)


def test_a_gpu_offers_what_is_free_and_what_this_process_holds_of_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 9000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 300)
    assert host.free_memory(torch.device("cuda", 0), 4) == 1300


def test_free_memory_of_this_machine_is_believable():
    assert 2**20 < host.free_memory(CPU, 1) < 2**46


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_of_the_lines_while_tensors_are_counted_the_profilers_own_are_left_out(capfd):
    """A GPU build of PyTorch 2.15 writes the second one where there is no GPU."""
    said = b"ours\nERROR: DeviceProperties.cpp:46] gpuGetDeviceCount failed with code 35\n"
    with counting_tensors() as highest:
        torch.ones(16)
        os.write(2, said)
    assert highest() >= 64
    assert capfd.readouterr().err == "ours\n"


def test_asking_for_a_missing_gpu_says_what_to_try():
    assert host.resolve_device("auto") == host.resolve_device("cpu") == CPU
    assert host.default_workers("auto") == 2
    with pytest.raises(JobError, match=r"^device=cuda: .* no GPU; try device=cpu$"):
        host.resolve_device("cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
@pytest.mark.parametrize(
    ("engine", "key"),
    [("slurm", "slurm.gpus_per_node=1, or "), ("ray", "ray.gpus_per_worker=1, or "), ("mine", "")],
)
def test_a_missing_gpu_that_an_engine_was_not_asked_for_names_the_key(monkeypatch, engine, key):
    monkeypatch.setenv(STARTED_BY, engine)
    with pytest.raises(JobError, match=f"sees no GPU; try {key}device=cpu$"):
        host.resolve_device("cuda")


def test_more_workers_than_gpus_says_what_to_try(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert host.resolve_device("auto", 1) == torch.device("cuda", 1)
    assert host.default_workers("auto") == host.default_workers("cuda") == 2
    with pytest.raises(JobError, match="try workers=2"):
        host.resolve_device("cuda", 2)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("fpu avx512_bf16", True), ("fpu amx_bf16", True), ("fpu avx512f", False)],
)
def test_bfloat16_is_computed_in_where_the_processor_says_so(kernel, flags, expected):
    kernel["/proc/cpuinfo"] = f"processor\t: 0\nflags\t\t: {flags}\n\nprocessor\t: 1\n"
    assert host.computes_in_bfloat16(CPU) is expected


@pytest.mark.parametrize(
    ("told", "emulated"),
    [
        ("flags\t\t: fpu avx2", {"bfloat16", "float16"}),
        ("flags\t\t: fpu avx512_bf16", {"float16"}),
        ("flags\t\t: fpu avx512_bf16 avx512_fp16 amx_bf16", set()),
        ("Features\t: fp asimd", set()),  # what another kind of processor can do is not known
    ],
)
def test_a_format_is_emulated_where_the_processor_is_known_to_lack_it(kernel, told, emulated):
    kernel["/proc/cpuinfo"] = f"processor\t: 0\n{told}\n\nprocessor\t: 1\nflags: avx512_fp16\n"
    formats = {"float32", "bfloat16", "float16"}
    assert {one for one in formats if host.emulates(one)} == emulated


def test_autocast_changes_the_format_only_for_bfloat16():
    matrix = torch.ones(2, 2)
    with host.autocast("bfloat16", CPU):
        assert (matrix @ matrix).dtype == torch.bfloat16
    with host.autocast("float32", CPU):
        assert (matrix @ matrix).dtype == torch.float32


def prepared(**environment: str) -> str:
    """What `prepare_process` says in a fresh process with these variables."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    code = (
        "import torch\nfrom batchwright.workload.host import prepare_process\n"
        "print(prepare_process(1), torch.get_num_threads(), sep='|')"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=clean | environment, capture_output=True, text=True)
    words, threads = done.stdout.strip().split("|")
    assert threads == "1", done.stderr
    return words


@linux
@pytest.mark.slow
def test_thresholds_are_raised_unless_the_user_has_set_them():
    if not prepared().startswith("glibc"):
        pytest.skip("another C library")
    assert prepared().endswith("thresholds raised")
    assert prepared(MALLOC_TRIM_THRESHOLD_="1000000").endswith("as set by MALLOC_TRIM_THRESHOLD_")
    tunables = "glibc.malloc.mmap_threshold=1000000"
    assert prepared(GLIBC_TUNABLES=tunables).endswith("as set by GLIBC_TUNABLES")


def test_a_preloaded_allocator_is_left_alone(monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libfoo.so:/usr/lib/libjemalloc.so.2")
    assert allocator.set_up() == "libjemalloc.so.2 preloaded, left as it is"
    assert allocator.joining_pieces(os.environ) == dict(os.environ)


@linux
@pytest.mark.slow
def test_a_started_process_joins_small_pieces_unless_the_user_has_set_up_the_allocator():
    if not prepared().startswith("glibc"):
        pytest.skip("another C library")
    assert prepared(**allocator.joining_pieces({})).endswith(f"raised{JOINED}")
    other = {"GLIBC_TUNABLES": "glibc.rtld.nns=4"}
    both = allocator.joining_pieces(other)
    assert both["GLIBC_TUNABLES"].startswith("glibc.rtld.nns=4:glibc.malloc.tcache_count=0")
    assert allocator.joining_pieces(both) == both
    for own in ({"MALLOC_MMAP_MAX_": "0"}, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"}):
        assert allocator.joining_pieces(own) == own


@linux
def test_beside_a_gpu_pieces_are_not_joined(monkeypatch):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    for places, joins in (((os.devnull,), False), ((), True)):
        monkeypatch.setattr(processes, "_GPU_DRIVERS", places)
        assert ("GLIBC_TUNABLES" in processes.child_environment(threads=1)) == joins


def test_collectives_use_the_loopback_interface(monkeypatch):
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "en0"), (2, "lo0")])
    assert host.collective_interface() == "lo0"
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "eth0")])
    with pytest.raises(BatchwrightError, match="among eth0"):
        host.collective_interface()
