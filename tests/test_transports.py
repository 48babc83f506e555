"""A lost worker where exchanges are queued and tell nothing, as NCCL's are."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from contextlib import contextmanager
from functools import partial
from threading import get_ident as thread
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import silent
from batchwright.distributed import group, heartbeat, transports
from batchwright.distributed.buckets import Bucket
from batchwright.distributed.group import Group, _refuse_one_gpu, naming_the_lost
from batchwright.distributed.heartbeat import RollCall, presence
from batchwright.errors import JobError, LostWorkerError, NewPlan, TrainingError, WorkerError
from batchwright.probing.commands import TimeLink
from batchwright.probing.measure import collective, link
from batchwright.training import loop, session
from batchwright.workload import host
from gloo import SECONDS, Worker, free_port
from test_session import functional, make_session, make_tiny_plan

CPU = torch.device("cpu")


@pytest.fixture
def soon(monkeypatch):
    """Nobody is waited for for long."""
    monkeypatch.setattr(transports, "BEAT_SECONDS", 0.01)


def test_waiting_ends_when_the_device_is_done(soon):
    looks = iter([False, False, True])
    transports._await(lambda: next(looks), timeout=60)
    assert next(looks, None) is None


def test_waiting_ends_after_its_time(soon):
    with pytest.raises(TimeoutError, match=r"0\.05 s"):
        transports._await(lambda: False, timeout=0.05)


def test_waiting_ends_where_a_worker_is_missed(soon, monkeypatch):
    class Missing:
        def misses_one(self):
            return True

    monkeypatch.setattr(RollCall, "current", Missing())
    with pytest.raises(TimeoutError, match="will not end"):
        transports._await(lambda: False, timeout=600)


def test_what_takes_too_long_is_left_to_itself():
    begun, allowed, ended = (threading.Event() for _ in range(3))

    def hangs():
        begun.set()
        allowed.wait(SECONDS)
        ended.set()

    transports._within(0.05, hangs, CPU)
    assert not ended.is_set()
    allowed.set()
    assert begun.wait(SECONDS)
    assert ended.wait(SECONDS)


def test_a_pytorch_that_cannot_abort_is_told_of(capsys):
    transports._within(60, lambda: object().abort(), CPU)
    assert "cannot give up exchanges: 'object' object has no attribute" in capsys.readouterr().err


def test_groups_are_left_and_aborted_on_the_workers_own_gpu(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda one: chosen.append((one, thread())))
    device = torch.device("cuda", 3)
    transports._within(60, lambda: chosen.append(thread()), device)
    assert chosen == [(device, chosen[1]), chosen[1]]
    assert chosen[1] != thread()


class Standing(transports.Queued):
    """A device that does nothing; what is queued there before `ended` is set is never done."""

    def __init__(self, timeout=SECONDS):
        super().__init__(CPU, timeout)
        self.ended, self.aborted = threading.Event(), threading.Event()

    def mark(self):
        return self.ended.is_set

    def abort(self):
        self.aborted.set()


def test_what_the_host_waits_for_by_itself_is_given_up_after_its_time(soon):
    """As in the layers of `SyncBatchNorm`."""
    one = Standing(timeout=0.05)
    one.watch()
    assert one.aborted.wait(SECONDS)
    one.unwatch()
    assert not one._watch.is_alive()
    with pytest.raises(RuntimeError, match=r"Timed out waiting 0\.05 s for an exchange"):
        one.settle()


def test_it_is_given_up_where_a_worker_is_missed(soon, monkeypatch):
    one, missed, looked = Standing(), threading.Event(), threading.Semaphore(0)

    def misses_one():
        looked.release()
        return missed.is_set()

    monkeypatch.setattr(RollCall, "current", SimpleNamespace(misses_one=misses_one))
    one.watch()
    for _ in range(2):
        assert looked.acquire(timeout=SECONDS)
    assert not one.aborted.is_set()
    missed.set()
    assert one.aborted.wait(SECONDS)
    one.unwatch()


def test_nobody_is_missed_while_the_device_goes_on(soon, monkeypatch):
    """As at the end of a run, which some leave before others."""
    one, marks = Standing(timeout=0.0), threading.Semaphore(0)
    one.ended.set()
    monkeypatch.setattr(RollCall, "current", SimpleNamespace(misses_one=lambda: True))
    monkeypatch.setattr(one, "mark", lambda: marks.release() or one.ended.is_set)
    one.watch()
    for _ in range(3):
        assert marks.acquire(timeout=SECONDS)
    one.unwatch()
    assert not one.aborted.is_set()
    one.settle()


def test_a_device_that_has_failed_is_watched_no_longer(soon, monkeypatch):
    one = Standing()
    monkeypatch.setattr(one, "mark", refuse_as_failed)
    one.watch()
    one._watch.join(SECONDS)
    assert not one._watch.is_alive()
    assert not one.aborted.is_set()


def test_it_is_watched_further_after_another_threads_capture_of_a_graph(soon, monkeypatch):
    """Meanwhile CUDA refuses to tell whether an event is passed, and to record one."""
    one, refused = Standing(timeout=0.05), []

    def refuse():
        refused.append("once more")
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    marks = iter([refuse, lambda: refuse])
    monkeypatch.setattr(one, "mark", lambda: next(marks, lambda: one.ended.is_set)())
    one.watch()
    assert one.aborted.wait(SECONDS)
    one.unwatch()
    assert len(refused) == 2


def test_what_a_loop_makes_of_an_exchange_that_was_given_up_is_no_error_of_its_own():
    """A layer of `SyncBatchNorm` goes on with anything, such as no number at all."""

    def end(error, given_up):
        with make_session() as one:
            one._group._transport = Standing()
            one._group._transport.given_up = given_up
            raise error

    own = ValueError("a loss that is no number")
    with pytest.raises(LostWorkerError, match="Timed out waiting 5 s for an exchange") as told:
        end(own, "Timed out waiting 5 s for an exchange")
    assert told.value.__cause__ is own
    for error, given_up in (
        (own, ""),
        (LostWorkerError("of worker 1"), "the exchange will not end"),
        (NewPlan("all leave"), "the exchange will not end"),
    ):
        with pytest.raises(type(error)) as same:
            end(error, given_up)
        assert same.value is error


def refuse_as_failed():
    raise RuntimeError("CUDA error: device-side assert triggered")


@pytest.mark.parametrize(
    ("told", "by_torchrun", "then"),
    [
        (None, False, "0"),
        ("1", True, "0"),  # torchrun says so to every worker
        ("1", False, "1"),
        ("3", True, "3"),
        ("2", False, "0"),  # sums that were never finished would be taken for such
    ],
)
def test_pytorchs_watchdog_leaves_the_process_alone(told, by_torchrun, then, monkeypatch):
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "7")
    monkeypatch.setenv("TORCH_NCCL_RETHROW_CUDA_ERRORS", "put back after the test")
    del os.environ["TORCH_NCCL_RETHROW_CUDA_ERRORS"]
    if told is not None:
        monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", told)
    if by_torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    transports.Nccl(torch.device("cuda", 0), 60).prepare()
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == then
    assert os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] == "7"
    # Of a GPU that has failed, too; but what a user has set would do nothing with 0 here.
    assert os.environ.get("TORCH_NCCL_RETHROW_CUDA_ERRORS") == ("0" if then == "0" else None)


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: device-side assert triggered",
        "HIP error: device-side assert triggered",
        "CUDA driver error: invalid argument",
        "NCCL error in: ...\nLast error:\nCuda failure 719 'unspecified launch failure'",
    ],
)
def test_an_error_of_the_workers_own_device_is_not_laid_on_others(message):
    with pytest.raises(RuntimeError) as told, naming_the_lost():
        raise RuntimeError(message)
    assert str(told.value) == message
    with pytest.raises(torch.OutOfMemoryError), naming_the_lost():
        raise torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(LostWorkerError), naming_the_lost():
        raise RuntimeError("[../gloo.cc:1] Connection closed by peer")


NO_SHARED_MEMORY = """NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, \
unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
Error while creating shared memory segment /dev/shm/nccl-1YsMbG (size 7340384){}"""


@pytest.mark.parametrize("why", ["", ", error: No space left on device (28)"])
def test_too_little_shared_memory_is_no_lost_worker(why):
    """Newer versions of NCCL say why."""
    with pytest.raises(WorkerError, match="--shm-size=1g") as told, naming_the_lost():
        raise dist.DistBackendError(NO_SHARED_MEMORY.format(why))
    assert not isinstance(told.value, LostWorkerError)
    assert str(told.value).endswith(f"(size 7340384){why})")


NCCL_ERROR = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, unhandled cuda error "
    "(run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
)


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("Cuda failure 'invalid device ordinal'", ": invalid device ordinal"),
        ("Cuda failure 217 'peer access is not supported'", ": peer access is not supported"),
        ("", ""),
    ],
)
def test_a_cuda_error_inside_nccl_is_this_workers_own(end, said, monkeypatch):
    error, lost, now = RuntimeError(NCCL_ERROR + end), [False], itertools.count(step=0.1)
    time = SimpleNamespace(monotonic=lambda: next(now), sleep=lambda _: None)
    monkeypatch.setattr(group, "time", time)

    def told():
        with pytest.raises(WorkerError) as caught, naming_the_lost():
            raise error
        return caught.value

    line = f" had a CUDA error in an exchange by NCCL{said}; start again with NCCL_DEBUG=INFO in "
    monkeypatch.setattr(RollCall, "current", None)
    assert str(told()).startswith("this worker" + line)
    present = SimpleNamespace(
        here="worker 1 (here/cuda:1)",
        misses_one=lambda: lost[0],
        inquire=lambda: "worker 0 left the run",
    )
    monkeypatch.setattr(RollCall, "current", present)
    for lost[0], kind in ((False, TrainingError), (True, LostWorkerError)):  # it shares memory
        caught, behind = told(), group.failure_behind(error)
        assert str(behind) == str(caught)
        assert {type(behind), type(caught)} == {kind}
        assert str(caught).startswith(present.here + line) != lost[0]
    looks = iter([False, False, True])  # others may notice it first, and say that they have failed
    present.misses_one = lambda: next(looks)
    assert isinstance(told(), LostWorkerError)


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: out of memory",
        "CUDA driver error: out of memory",  # of segments that grow
        "HIP out of memory. Tried to allocate 2.00 GiB",
        "NCCL error in: NCCLUtils.cpp:1, ...\nLast error:\nCuda failure 2 'out of memory'",
        "NCCL error in: NCCLUtils.cpp:1, ...\nLast error:\nFailed to CUDA calloc 4194304 bytes",
        "NCCL error in: NCCLUtils.cpp:1, ...\nLast error:\nFailed to CUDA malloc 4194304 bytes",
        'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/CUDACachingAllocator.cpp"',
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in ...",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
        "Unable to find a valid cuDNN algorithm to run convolution",
        "Caught OutOfMemoryError in pin memory thread for device 0. CUDA out of memory. Tried ...",
    ],
)
def test_what_libraries_say_of_memory_counts_as_such(message):
    assert host.is_out_of_memory(RuntimeError(message))
    assert not host.is_out_of_memory(ValueError(message))


def test_where_a_gpu_has_failed_or_has_room_libraries_may_mean_something_else(monkeypatch):
    free, failure = [2**20], "device-side assert triggered"

    def memory():
        if free[0] is None:
            raise RuntimeError(f"CUDA error: {failure}\nCUDA kernel errors might be ...")
        return free[0], 2**36

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", memory)
    names = ("ALLOC", "EXECUTION")
    errors = [RuntimeError(f"cuDNN error: CUDNN_STATUS_{name}_FAILED") for name in names]
    for free[0], counts in ((2**20, [True, True]), (2**33, [True, False]), (None, [False, False])):
        assert [host.is_out_of_memory(error) for error in errors] == counts
        assert {host.gpu_failure(error) for error in errors} == {failure if free[0] is None else ""}


def test_a_gpu_that_has_failed_is_told_by_its_words():
    found = "an illegal memory access was encountered"
    assert host.gpu_failure(RuntimeError(f"CUDA error: {found}\nCUDA kernel errors ...")) == found
    assert not host.gpu_failure(RuntimeError("CUDA error: out of memory"))
    assert not host.gpu_failure(ValueError(found))


def test_other_errors_of_a_gpu_do_not():
    for message in ("CUDA error: an illegal memory access was encountered", "CUBLAS_STATUS_X"):
        assert not host.is_out_of_memory(RuntimeError(message))


def test_two_workers_on_one_gpu_are_named_before_nccl_refuses_them():
    _refuse_one_gpu([("one", "a"), ("one", "b"), ("two", "a")])
    ranks = r"LOCAL_RANK \(torchrun\), SLURM_LOCALID \(srun\) or OMPI_COMM_WORLD_LOCAL_RANK"
    with pytest.raises(JobError, match=rf"workers 1 and 2 \(one\) have one GPU .*{ranks}"):
        _refuse_one_gpu([("one", "a"), ("one", "b"), ("one", "b")])


def on_one_gpu(rank):
    with (
        mock.patch.object(transports.Gloo, "shares", new=False),
        mock.patch.object(group, "identity", return_value="GPU-1"),
        pytest.raises(JobError) as told,
    ):
        Group(CPU, timeout=SECONDS)
    return str(told.value), dist.is_initialized()


@pytest.mark.slow
def test_they_leave_the_group_at_once(crew):
    for told, joined in crew.together(on_one_gpu, workers=2):
        assert "workers 0 and 1" in told
        assert not joined


def test_a_worker_makes_its_gpu_the_current_one(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert host.enter(torch.device("cuda", 3)) == torch.device("cuda", 3)
    assert host.enter(CPU) == CPU
    assert chosen == [torch.device("cuda", 3)]


class Seen(Exception):  # noqa: N818 - ends what is looked at
    """That came first."""


def refuse(*_, **__):
    raise Seen


@pytest.mark.parametrize("method", ["plain", "dual-batch"])
def test_a_worker_does_so_before_it_builds_or_joins_anything(method, monkeypatch, tmp_path):
    for module in (loop, session):
        monkeypatch.setattr(module, "enter", refuse)
    monkeypatch.setattr(loop, "open_task", lambda *_: pytest.fail("built before"))
    monkeypatch.setattr(session, "Group", lambda *_: pytest.fail("joined before"))
    with pytest.raises(Seen):
        loop.train(make_tiny_plan(method=method), run_folder=tmp_path, resume=False)
    with pytest.raises(Seen):
        make_session()


@pytest.mark.parametrize(
    "weights",
    [
        torch.zeros(4, 3).T,
        torch.zeros(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.zeros(2, 3, 1, 1).to(memory_format=torch.channels_last),
        torch.zeros(()),
    ],
    ids=lambda one: f"{tuple(one.shape)} {one.stride()}",
)
def test_gradients_lie_in_memory_as_their_weights_do(weights):
    # Fused optimizers on GPUs refuse others.
    first, second = torch.nn.Parameter(torch.zeros(5)), torch.nn.Parameter(weights)
    bucket = Bucket(0, [first, second], 2, Group(CPU), per_tensor=False)
    view = bucket.views[1]
    assert view.stride() == weights.stride()
    view.fill_(1)
    assert bucket.flat.tolist() == [0.0] * 5 + [1.0] * weights.numel() + [0.0] * 2


def test_weights_whose_numbers_share_memory_get_a_gradient_that_does_not():
    weights = torch.nn.Parameter(torch.zeros(3, 1).expand(3, 2))
    bucket = Bucket(0, [weights], 2, Group(CPU), per_tensor=False)
    assert bucket.views[0].shape == (3, 2)
    assert bucket.views[0].is_contiguous()


# ---------------------------------------------------------------------------------- real processes


def together(work, workers, *, killed=(), port=None):
    """What ``work(rank)`` returns, or the error it ends with, of workers that are not killed."""
    port, crew = port or free_port(), [Worker(rank) for rank in range(workers)]
    try:
        for one in crew:
            one.send(_work, work, workers=workers, port=port)
        left = [one for rank, one in enumerate(crew) if rank not in killed]
        told = [one.answer("what each worker does") for one in left]
        for rank, one in enumerate(crew):
            assert one.end() == (-signal.SIGKILL if rank in killed else 0)
        return told
    finally:
        for one in crew:
            one.kill()


def _work(rank, work):
    silent.use()
    try:
        return work(rank)
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return f"{type(error).__name__}: {error}"


def others_name(victim, work, *, kept=True):
    """Three workers, of which this one is killed at ``work(rank)``: the others name it and leave.

    ``kept``: whether the store is an agent's and outlives the workers.
    """
    server = kept and dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    port = server.port if server else None
    for one in together(partial(_kept, work) if kept else work, 3, killed=[victim], port=port):
        assert one.startswith("LostWorkerError: lost contact"), one
        assert f"worker {victim} " in one
        assert "ended without a word" in one


def _kept(work, rank):
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    return work(rank)


@contextmanager
def joined():
    """A group that is left as a session leaves it."""
    group = Group(CPU, timeout=SECONDS)
    try:
        yield group
    except LostWorkerError as error:
        group.give_up(error)
        raise
    finally:
        group.close()


def sums_until_one_is_killed(rank):
    with joined() as group:
        for step in range(5):
            total = group.sum(torch.ones(1))
            assert float(total) == 3, "a sum over fewer was taken for that of all"
            if rank == 1 and step == 2:
                os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_the_others_name_a_worker_that_is_killed_and_leave():
    others_name(1, sums_until_one_is_killed, kept=False)


def waits_as_layers_do_until_one_is_killed(rank):
    """As those of `SyncBatchNorm`: the host waits for the device, and looks after nobody."""
    with joined() as group:
        group.watch()
        group.sum(torch.ones(1))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))
        silent.wait()
        group.barrier()


@pytest.mark.slow
def test_a_worker_killed_while_the_host_waits_in_a_layer_is_named():
    others_name(1, waits_as_layers_do_until_one_is_killed, kept=False)


def connects_until_one_is_killed(rank, victim):
    if rank == victim:
        silent.Silent.connect = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    Group(CPU, timeout=SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_killed_before_the_first_exchange_is_named(victim):
    """Of NCCL's, the host itself waits there; for worker 0 it does so at the store."""
    if victim == 0 and not hasattr(dist.TCPStore, "clone"):
        pytest.skip("PyTorch is too old to open a second connection")
    others_name(victim, partial(connects_until_one_is_killed, victim=victim))


def exchanges_once_one_is_killed(rank, what):
    group = Group(CPU, timeout=SECONDS)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "weights":
        group.broadcast([torch.ones(1)])
    else:
        group.sum(torch.ones(2**20))
    group.barrier()  # who has only sent the weights misses nobody


@pytest.mark.slow
@pytest.mark.parametrize("what", ["weights", "gradients"])
def test_a_worker_killed_before_the_first_large_exchange_is_named(what):
    """NCCL's host waits in the first of each algorithm, which goes by the size."""
    others_name(1, partial(exchanges_once_one_is_killed, what=what))


def measures_until_one_is_killed(rank, what, call):
    calls = itertools.count()

    def until_then(do):
        def done(*given, **named):
            if next(calls) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return do(*given, **named)

        return done

    link.now = collective.now = silent.now
    with joined() as group:
        if rank == 1:
            dist.send, dist.recv = until_then(dist.send), until_then(dist.recv)
        if what == "link":
            link.time_link(group, TimeLink(workers=3, partner=1, between="hosts", seconds=0.01))
        else:
            collective.time_exchange(group, what, 400, seconds=0.01)
        group.barrier()  # where those wait that have looked on


@pytest.mark.slow
@pytest.mark.parametrize("call", [0, 5])
@pytest.mark.parametrize("what", ["link", "push-pull"])
def test_a_worker_killed_while_messages_are_timed_is_named(what, call):
    """Of NCCL's, the host itself waits in the first message between two; after later ones the
    clock waits for the device."""
    others_name(1, partial(measures_until_one_is_killed, what=what, call=call))


def test_a_roll_call_gets_a_word_while_something_else_waits_at_the_store():
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("localhost", server.port, is_master=False)
    if not hasattr(store, "clone"):
        pytest.skip("PyTorch is too old to open a second connection")
    call = RollCall(store, 0, [presence("here")] * 2, "agent:1", apart=True)
    waiting = threading.Thread(target=store.wait, args=(["late"],))
    waiting.start()
    try:
        assert heartbeat._asked(lambda: call._read("beat/0"), seconds=SECONDS)
        assert waiting.is_alive()
    finally:
        server.set("late", "here")
        waiting.join()
        call.close()


def trains_until(happens):
    """A worker's training, in which something happens after its second step."""
    model = torch.nn.Linear(4, 3)
    plan = make_tiny_plan((6, 6), epochs=50)
    with make_session(model, plan=plan) as session:
        for _ in session.epochs():
            for step, (features, labels) in enumerate(session.batches()):
                session.step(functional.cross_entropy(model(features), labels))
                if step == 1:
                    happens()


def trains_until_one_is_killed(rank):
    trains_until(lambda: rank == 1 and os.kill(os.getpid(), signal.SIGKILL))


@pytest.mark.slow
def test_a_session_ends_with_the_name_of_the_worker_that_is_lost():
    (told,) = together(trains_until_one_is_killed, 2, killed=[1])
    assert told.startswith("LostWorkerError"), told
    assert "worker 1 " in told


def fails_alone(rank):
    def fail():
        if rank == 1:
            silent._hanging.set()  # what it has queued will never be done
            raise ValueError("of my own")

    trains_until(fail)


@pytest.mark.slow
def test_a_worker_that_fails_leaves_without_waiting_for_what_is_queued():
    told = together(fails_alone, 2)
    assert told[1] == "ValueError: of my own"
    assert told[0].startswith("LostWorkerError"), told[0]


def test_a_worker_that_gives_up_notes_why_before_it_aborts(monkeypatch):
    happened, error = [], ValueError("of my own")
    monkeypatch.setattr(group, "report_failure", happened.append)
    one = Group(CPU)
    one.size, one._roll_call = 2, SimpleNamespace(close=happened.append)
    one._transport = SimpleNamespace(give_up=lambda: happened.append("aborts"))
    one.give_up(error)
    assert happened == [error, "ValueError: of my own", "aborts"]


@pytest.mark.parametrize(("size", "then"), [(1, ["no longer"]), (2, ["watched", "no longer"])])
def test_several_workers_are_watched_until_they_leave(size, then):
    happened, one = [], Group(CPU)
    one.size = size
    one._transport = SimpleNamespace(
        watch=lambda: happened.append("watched"), unwatch=lambda: happened.append("no longer")
    )
    one.watch()
    one.close()
    assert happened == then


def leaves_as_all_do(rank):
    group = Group(CPU, timeout=SECONDS)
    total = float(group.sum(torch.tensor([float(rank)])))
    group.close()
    return total


@pytest.mark.slow
def test_nothing_is_aborted_where_all_goes_well():
    assert together(leaves_as_all_do, 2) == [1.0, 1.0]
