"""The workers of a run: rank, world size, and collectives whose errors name the lost worker.

It reads only variables that every launcher sets: RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE,
MASTER_ADDR and MASTER_PORT. Without them the process is the only worker and calls no collective.
"""

from __future__ import annotations

import copy
import os
import re
import socket
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from batchwright.distributed.heartbeat import BEAT_SECONDS, Presence, RollCall, presence
from batchwright.distributed.joining.environments import (
    Opened,
    launch_name,
    note_opened,
    process_name,
    read_opened,
)
from batchwright.distributed.joining.gathering import Gathering
from batchwright.distributed.processes import report_failure
from batchwright.distributed.rendezvous import choose_interface, meet, store_keeper
from batchwright.distributed.transports import fetched, nothing, transport_for
from batchwright.errors import (
    Interrupted,
    JobError,
    LostWorkerError,
    NewPlan,
    TrainingError,
    WorkerError,
    one_line,
)
from batchwright.records.run_folder import has_begun
from batchwright.workload.host import gpu_failure, identity, is_out_of_memory

_PORTS = (
    "open those between the hosts, too, at which workers exchange (the system's own choice, from "
    "/proc/sys/net/ipv4/ip_local_port_range), or name another network with GLOO_SOCKET_IFNAME or "
    "NCCL_SOCKET_IFNAME"
)
_NO_SHARED_MEMORY = "Error while creating shared memory segment.*"  # in the words of NCCL
_MORE_SHARED_MEMORY = (
    "NCCL connects this host's GPUs through shared memory, and found too little: give more of it "
    "(docker: --shm-size=1g), or set NCCL_SHM_DISABLE=1"
)
_LONGEST_WHY = 300  # characters of an error that other workers are told
_COMMON = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64)


class Group:
    """The process group of one run; a single process has none and every call is local.

    Joins the group of the environment if nobody has, and then leaves it on `close`.

    Args:
        device: Device of this worker, which decides how tensors travel; see `transports`.
        timeout: Seconds after which a collective gives up.
        meeting: File, not there yet, through which the workers of one machine find each other;
            unset: MASTER_ADDR and MASTER_PORT.

    Attributes:
        rank: This worker, 0 to ``size - 1``.
        size: Number of workers.
        places: Where each worker computes, in rank order: host name, device type and local rank,
            as in ``node1/cuda:0``. A worker that is started again may find itself under another
            rank, but not at another place. No two are the same: several launchers on one host all
            count from 0, and then the second worker there, by its rank, is ``node1/cuda:0#2``.
        handle: The ``group`` argument of `torch.distributed`; ``None`` stands for all workers.

    Raises:
        JobError: Two workers are on one GPU, which cannot exchange anything.
        LostWorkerError: The others did not come in time.
    """

    def __init__(
        self, device: torch.device, timeout: float = 120.0, *, meeting: Path | None = None
    ) -> None:
        self.device = device
        self.handle: dist.ProcessGroup | None = None
        self._owned = False
        self._timeout = timeout
        self._transport = transport_for(device, timeout)
        if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            join_process_group(device, timeout, meeting)
            self._owned = True
        joined = dist.is_initialized()
        self.rank = dist.get_rank() if joined else 0
        self.size = dist.get_world_size() if joined else 1
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        own = presence(f"{socket.gethostname()}/{device.type}:{local_rank}")
        present: list[Presence] = self.gather(own)
        places = [one.place for one in present]
        self.places = tuple(
            f"{place}#{before + 1}" if (before := places[:rank].count(place)) else place
            for rank, place in enumerate(places)
        )
        self._roll_call: RollCall | None = None
        if self.size > 1 and meeting is None:  # a file would grow with every beat
            self._roll_call = RollCall(
                distributed_c10d._get_default_store(),
                self.rank,
                [replace(one, place=at) for one, at in zip(present, self.places, strict=True)],
                store_keeper(),
                apart=self._transport.waits_at_store,
            )
        if self.size > 1:
            try:
                if not self._transport.shares:
                    _refuse_one_gpu(self.gather((socket.gethostname(), identity(device))))
                self._connect()
            except BaseException as error:
                self.close(error)
                raise

    @property
    def here(self) -> Sequence[int]:
        """Ranks of the workers in this process: this worker's."""
        return (self.rank,)

    def started_again(self, folder: Path) -> bool:
        """Whether workers of this very launch have opened a run folder before these did.

        Then a run that is in the folder is this launch's own: the command, or torchrun's agent, has
        started all workers again, because one was lost or because a host came or went. All workers
        call this together and get the same answer.
        """
        launches, processes, noted = self._starts(folder)
        return noted.by_an_earlier_start(launches, processes)

    def note_start(self, folder: Path, *, again: bool) -> None:
        """Note in a run folder which launch has opened it, for `started_again`; all together.

        Worker 0 writes the note; a folder with the run of another launch stays as it is.

        Args:
            folder: The run folder.
            again: What `started_again` returned.
        """
        launches, processes, noted = self._starts(folder)
        if self.rank or not launches or (has_begun(folder) and not again):
            return
        note_opened(folder, noted.launches | launches, processes)

    def _starts(self, folder: Path) -> tuple[set[str], set[str], Opened]:
        """Launches and processes of these workers, and those noted in a run folder."""
        starts = self.gather((launch_name(), process_name(), read_opened(folder)))
        noted = Opened(  # without a shared disk not all see the same
            frozenset().union(*(seen.launches for _, _, seen in starts)),
            frozenset().union(*(seen.processes for _, _, seen in starts)),
        )
        launches = {launch for launch, _, _ in starts} - {""}
        return launches, {process for _, process, _ in starts}, noted

    def part(self, size: int) -> Self | None:
        """The first ``size`` workers as a group of their own; all workers call this together.

        Returns:
            The part, to be left with the whole; ``None`` on workers that are not in it.
        """
        if size == self.size:
            return self
        with naming_the_lost():
            handle = dist.new_group(list(range(size)), timeout=timedelta(seconds=self._timeout))
        if self.rank >= size:
            return None
        part = copy.copy(self)
        part.handle, part.size, part._owned = handle, size, False
        part.places, part._roll_call = self.places[:size], None
        part._connect()
        return part

    def alone(self) -> Self:
        """This worker as a group of its own, to be left with the whole."""
        part = copy.copy(self)
        part.handle, part.rank, part.size, part._owned = None, 0, 1, False
        part.places, part._roll_call = (self.places[self.rank],), None
        return part

    def _connect(self) -> None:
        if self.size > 1:
            with naming_the_lost():
                self._transport.connect(self.handle)

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give all workers the values of worker 0, in place."""
        if self.size > 1:
            with torch.no_grad(), naming_the_lost():
                for tensor in tensors:
                    whole = tensor.contiguous()  # NCCL takes no other
                    # As bytes where not every backend knows the format.
                    flat = whole if tensor.dtype in _COMMON else whole.view(-1).view(torch.uint8)
                    dist.broadcast(flat, src=0, group=self.handle)
                    if whole is not tensor:
                        tensor.copy_(whole)
                self._transport.settle()

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of a tensor over the workers, in place; the same on all of them."""
        if self.size > 1:
            with naming_the_lost():
                dist.all_reduce(values, group=self.handle)
                self._transport.settle()
        return values

    def exchange(self, messages: Callable[[], None], *, first: bool) -> None:
        """Make this worker's sends and receives, and wait until they are over.

        Args:
            messages: Calls `torch.distributed` with `handle`; the others make matching calls.
            first: Whether two of them may exchange their first message.
        """
        with naming_the_lost():
            if first:
                self._transport.begin(messages)
            else:
                messages()
            self._transport.settle()

    def read(self, values: torch.Tensor, meanwhile: Callable[[], None] = nothing) -> torch.Tensor:
        """Copy a tensor to the CPU, once all that was sent before has arrived.

        In a step this call alone makes the host wait for the device, which meanwhile works on what
        ``meanwhile`` queues.
        """
        if self.size == 1:
            return fetched(values, meanwhile)
        failed: list[Exception] = []

        def kept_apart() -> None:
            try:
                meanwhile()
            except Exception as error:  # noqa: BLE001 - it is no word of another worker
                failed.append(error)

        with naming_the_lost():
            read = self._transport.read(values, kept_apart)
        if failed:
            raise failed[0]
        return read

    def gather(self, value: Any) -> list[Any]:
        """Every worker's value (picklable), in rank order, on all of them."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with naming_the_lost():
            dist.all_gather_object(values, value, group=self.handle)
        return values

    def hand_out(self, value: Any, source: int) -> Any:
        """The value (picklable) of worker ``source``, on all workers; the others' is ignored."""
        if self.size == 1:
            return value
        values = [value if self.rank == source else None]
        with naming_the_lost():
            dist.broadcast_object_list(values, src=source, group=self.handle)
        return values[0]

    def barrier(self) -> None:
        """Wait for all workers."""
        if self.size > 1:
            self.sum(torch.zeros(1, device=self.device))

    def watch(self) -> None:
        """From now on, until `close`, give up exchanges that never end, wherever the host waits.

        `SyncBatchNorm` makes the host wait for the device in each layer, where nobody looks after
        the other workers. Whatever it goes on with, the next exchange or `read` raises.
        """
        if self.size > 1:
            self._transport.watch()

    def announce(self, what: str) -> None:
        """Note what this worker begins, for `monitored_barrier`.

        All workers begin the same, in the same order.

        Args:
            what: What it does, as in the sentence "worker 1 takes a step".
        """
        if self._roll_call is not None:
            self._roll_call.announce(what)

    def monitored_barrier(self) -> None:
        """Wait until all workers have begun what this one has begun last.

        See `RollCall.monitored_barrier`.

        Raises:
            TrainingError: Another worker has begun something else instead.
            LostWorkerError: Another worker is gone or silent, or has not come in time.
        """
        if self._roll_call is None:
            return
        timeout = self._timeout
        if not self._owned:  # the user's script has made the group, with a timeout of its own
            backend = distributed_c10d._get_default_group()._get_backend(self.device)
            options = getattr(backend, "options", None)  # older PyTorch has none of gloo's
            if options is not None:
                timeout = max(timeout, options._timeout.total_seconds())
        self._roll_call.monitored_barrier(timeout)

    def give_up(self, error: BaseException) -> None:
        """Note an error, and abort exchanges that may never end; to be called first after it.

        The abort may take seconds, in which others may miss this worker.
        """
        self._note(error)
        if self.size > 1:
            self._transport.give_up()

    def refuse_given_up(self, error: BaseException) -> None:
        """Raise if exchanges were given up before an error, which may come of what they left.

        Raises:
            LostWorkerError: They were, and the error does not say so itself.
        """
        said = isinstance(error, LostWorkerError | Interrupted | NewPlan)
        if self._transport.given_up and isinstance(error, Exception) and not said:
            raise _loss(self._transport.given_up) from error

    def close(self, error: BaseException | None = None) -> None:
        """Leave the process group, if this object joined it.

        Args:
            error: What ends this worker. It is noted first, wherever others look for it: by the
                time that they miss this worker, they can know why.
        """
        self._note(error)
        self._transport.unwatch()
        if self._owned and dist.is_initialized():
            self._transport.leave()
            self._owned = False

    def _note(self, error: BaseException | None) -> None:
        """Note what ends this worker, wherever others look for it, and beat no longer."""
        if isinstance(error, Exception):  # another ends the process as it likes
            report_failure(error)
            # After a loss worker 0, which holds the store, may be the one that is gone.
            if Gathering.current is not None and not isinstance(error, LostWorkerError):
                Gathering.current.note_failure(error)
        if self._roll_call is not None:
            self._roll_call.close("" if error is None else one_line(error)[:_LONGEST_WHY])
            self._roll_call = None


def _refuse_one_gpu(gpus: Sequence[tuple[str, str]]) -> None:
    """Refuse two workers on one GPU, on all workers together, with a clearer error than NCCL's.

    ``gpus`` has host and identity of each worker's GPU, in rank order.

    Raises:
        JobError: Two workers are on one GPU.
    """
    for rank, gpu in enumerate(gpus):
        if (other := gpus.index(gpu)) != rank:
            raise JobError(
                f"workers {other} and {rank} ({gpu[0]}) have one GPU between them: give each its "
                "own, in a loop of yours by model.to(f'cuda:{n}') with n from LOCAL_RANK "
                "(torchrun), SLURM_LOCALID (srun) or OMPI_COMM_WORLD_LOCAL_RANK (mpirun; "
                "MPI_LOCALRANKID with MPICH), or start fewer workers"
            )


def join_process_group(device: torch.device, timeout: float, meeting: Path | None = None) -> None:
    """Join the process group that the environment describes; ``meeting`` as for `Group`.

    Raises:
        JobError: A variable is missing.
        LostWorkerError: The others did not come within ``timeout`` seconds, or cannot be connected
            to, as where a firewall is between them.
    """
    needed = ("RANK",) if meeting is not None else ("RANK", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in needed if name not in os.environ]:
        raise JobError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} is set and {missing[0]} is not: start the "
            "script by torchrun, srun or mpirun, or set RANK, WORLD_SIZE, MASTER_ADDR and "
            "MASTER_PORT for each worker"
        )
    choose_interface()
    transport = transport_for(device, timeout)
    transport.prepare()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    where: dict[str, Any] = {}
    with naming_the_lost():
        if meeting is None:
            where["store"] = meet(rank, size, timeout)
        else:
            where["init_method"] = f"file://{meeting.absolute()}"
    try:
        with naming_the_lost():
            dist.init_process_group(
                transport.backend,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout),
                **where,
            )
    except LostWorkerError as error:
        if meeting is not None:
            raise
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise LostWorkerError(
            f"{error}; worker {rank} ({socket.gethostname()}) has met the others at {place}, so "
            f"that port is open: {_PORTS}"
        ) from None


def failure_behind(error: BaseException) -> WorkerError | None:
    """The error that names a lost worker, or this one's own GPU, behind that of a collective.

    A user's loop may exchange something by itself, and then be the first to notice that a worker is
    gone.
    """
    roll_call = RollCall.current
    if roll_call is None or not isinstance(error, RuntimeError):
        return None
    if (own := _own_cuda_error(error)) is not None:
        return own
    frames = traceback.extract_tb(error.__traceback__)
    named = isinstance(error, dist.DistError) or re.search(r"gloo|NCCL|ProcessGroup", str(error))
    if not named and not any("torch/distributed" in frame.filename for frame in frames):
        return None
    lost = roll_call.inquire()
    if not lost:
        return None
    return LostWorkerError(
        f"lost contact with another worker during an exchange: {lost} ({_cause(error)})"
    )


def _own_cuda_error(error: RuntimeError) -> TrainingError | None:
    """The error to raise where a call of CUDA has failed inside NCCL, on this worker itself.

    A call may also fail because another worker is gone whose memory it shares. Then, and where
    NCCL says something else, ``None``.
    """
    if not re.search("ncclUnhandledCudaError|unhandled cuda error", str(error)):
        return None
    roll_call, who = RollCall.current, "this worker"
    if roll_call is not None:
        end = time.monotonic() + 2 * BEAT_SECONDS  # others notice a loss, too, and not all at once
        while not (missed := roll_call.misses_one()) and time.monotonic() < end:
            time.sleep(BEAT_SECONDS / 10)
        if missed:
            return None
        who = roll_call.here
    said = re.search(r"(?:Cuda|HIP) failure (?:\d+ )?'([^']*)'", str(error))
    what = f": {said[1]}" if said else ""
    return TrainingError(
        f"{who} had a CUDA error in an exchange by NCCL{what}; start again with NCCL_DEBUG=INFO "
        "in the environment, which shows the call that fails"
    )


def _cause(error: RuntimeError) -> str:
    """The first sentence of a collective's error, without the source line it comes from."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[-1]
    return re.sub(r"^\[\S+\] ", "", line).partition(". ")[0]


def _loss(cause: str) -> LostWorkerError:
    """The error of an exchange that ``cause`` has ended; it names who is lost, if anybody is."""
    lost = "" if RollCall.current is None else RollCall.current.inquire()
    return LostWorkerError(
        "lost contact with another worker during an exchange: "
        + (f"{lost} ({cause})" if lost else cause)
    )


@contextmanager
def naming_the_lost() -> Iterator[None]:
    """Turn a collective's low-level error into one line that says which worker is gone.

    Raises:
        LostWorkerError: The block raised `RuntimeError`, as collectives do, and not because of
            this worker's own device.
        WorkerError: NCCL found too little shared memory on this host.
        TrainingError: A call of CUDA has failed inside NCCL, on this worker.
    """
    roll_call = RollCall.current
    if roll_call is not None:
        roll_call.exchanging = True
    try:
        yield
    except RuntimeError as error:
        of_device = re.match(r"(CUDA|HIP)( driver)? error", str(error)) or gpu_failure(error)
        if of_device or is_out_of_memory(error):
            raise  # of this worker's own device, which says so where it is waited for
        if no_room := re.search(_NO_SHARED_MEMORY, str(error)):
            raise WorkerError(f"{_MORE_SHARED_MEMORY} ({no_room[0]})") from error
        if (own := _own_cuda_error(error)) is not None:
            raise own from error
        raise _loss(_cause(error)) from error
    finally:
        if roll_call is not None:
            roll_call.exchanging = False
