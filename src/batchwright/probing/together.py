"""Measures with processes that another launcher has started.

worker 0: `LaunchedWorkers.ask` --order--> the others: `Helper`; all carry the command out at once
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from batchwright.distributed.group import Group
from batchwright.distributed.joining.gathering import Gathering
from batchwright.distributed.transports import gpus_may_be_shared
from batchwright.errors import JobError, PlanError
from batchwright.probing.commands import Command, TimeLink, ignored, read_command
from batchwright.probing.executor import Executor, device_name
from batchwright.probing.kinds import Place
from batchwright.probing.workers import Answer, end_if_stopped, pause
from batchwright.records import Job, LinkTime, Profile
from batchwright.workload.data.sources import open_data
from batchwright.workload.host import (
    assigned_device,
    enter,
    free_memory,
    identity,
    prepare_process,
    worker_threads,
)

KIND = "BATCHWRIGHT_KIND"
"""Environment variable: the kind of the workers on this host, as in ``goal.kinds``."""

_MAX_HOSTS = 8  # to which the network is measured; further hosts are assumed to be like these


def own_device(job: Job) -> torch.device:
    """This process's device among those of its host; a GPU becomes the current one."""
    return enter(assigned_device(job.device, int(os.environ["LOCAL_RANK"])))


def ask_for_places(gathering: Gathering, job: Job, digest: str) -> tuple[Place, ...]:
    """Have all workers find the job's data and their own device.

    Returns:
        The place of each worker, in rank order.

    Raises:
        BatchwrightError: A host has other data or none, or two workers share a GPU.
    """
    found = gathering.ask("look", job=job.model_dump_json(), digest=digest)
    places = (_own_place(gathering, own_device(job)), *(Place(**fields) for fields in found))
    seen: dict[tuple[str, str], int] = {}
    for rank, one in enumerate(() if gpus_may_be_shared() else places):
        if one.gpu and (other := seen.setdefault((one.host, one.gpu), rank)) != rank:
            raise JobError(
                f"workers {other} and {rank} ({one.host}) have one GPU between them: start one "
                "worker for each GPU there, or say device=cpu"
            )
    sharing = Counter((one.host, one.gpu) for one in places if one.gpu)
    return tuple(
        replace(one, memory_bytes=one.memory_bytes // max(1, sharing[one.host, one.gpu]))
        for one in places
    )


def _own_place(gathering: Gathering, device: torch.device) -> Place:
    name = device_name(device)
    return Place(
        host=gathering.members[gathering.started.rank].host,
        gpu=identity(device),
        kind=os.environ.get(KIND) or name,
        device_name=name,
        memory_bytes=free_memory(device, gathering.started.local_size),
    )


def look(gathering: Gathering, order: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of a worker other than worker 0 to `ask_for_places`: the fields of its place."""
    job, first = Job.model_validate_json(order["job"]), gathering.started.local_rank == 0
    device = own_device(job)
    facts = open_data(job, verify=first).facts  # one worker verifies for all of its host
    if facts.digest != order["digest"]:
        raise PlanError(
            f"data={job.data} is not what worker 0 ({gathering.members[0].host}) has: "
            f"{facts.train_samples} training images with digest {facts.digest[:12]} here, "
            f"{order['digest'][:12]} there: give all hosts the same"
        )
    return asdict(_own_place(gathering, device))


class LaunchedWorkers:
    """A `CommandRunner` with all processes that a launcher has started; used by worker 0.

    Args:
        gathering: The processes.
        job: What is measured.
        counts: Numbers of workers that commands may name.
        stops: Returns the stop signals that came so far.

    Attributes:
        places: The place of each worker, in rank order.

    Raises:
        BatchwrightError: Another worker cannot take part.
    """

    def __init__(
        self,
        gathering: Gathering,
        job: Job,
        counts: Sequence[int],
        stops: Callable[[], Sequence[int]],
    ) -> None:
        self._gathering, self._stops = gathering, stops
        if max(counts) > gathering.started.size:
            raise JobError(
                f"workers={max(counts)} is to be measured, and {gathering.started.by} has started "
                f"{gathering.started.size}: start {max(counts)} ({gathering.started.how})"
            )
        self.places = ask_for_places(gathering, job, open_data(job, verify=False).facts.digest)
        gathering.order("measure", job=job.model_dump_json(), counts=list(counts))
        with gathering.explaining():
            self._part = _Part(job, counts)

    def ask(
        self, command: Command, answer: type[Answer], on_progress: Callable[[float], None] = ignored
    ) -> Answer:
        """See `workers.CommandRunner.ask`."""
        end_if_stopped(self._stops)
        self._gathering.order("command", text=command.model_dump_json(), workers=command.workers)
        with self._gathering.explaining():
            done = self._part.executor.carry_out(command, on_progress)
        assert isinstance(done, answer)  # noqa: S101 - narrows the type
        return done

    def links(self, seconds: float) -> tuple[LinkTime, ...]:
        """Links inside worker 0's host and to other hosts; of several, the worst figures.

        Args:
            seconds: Time to spend on each pair of workers.
        """
        members = self._gathering.members
        first: dict[str, int] = {}  # by host, its first worker, worker 0 left out
        for one in members[1:]:
            first.setdefault(one.host, one.rank)
        found: dict[str, list[LinkTime]] = {}
        for host, rank in list(first.items())[:_MAX_HOSTS]:
            here = host == members[0].host
            command = TimeLink(
                workers=len(members),
                partner=rank,
                between="workers of a host" if here else "hosts",
                seconds=seconds,
            )
            link = self.ask(command, LinkTime)
            found.setdefault(link.between, []).append(link)
        return tuple(_slowest(links) for links in found.values())

    def restart(self) -> None:
        """Do nothing: the launcher that started the processes deals with killed ones."""

    def pause(self, seconds: float) -> None:
        """See `workers.CommandRunner.pause`."""
        pause(seconds, self._stops)

    def close(self) -> None:
        """Leave the group, and order the other workers to leave it."""
        self._gathering.order("measured")
        self._part.close()


def with_links(profile: Profile, links: Sequence[LinkTime]) -> Profile:
    """The profile with the measured links, by which plans for more workers are made.

    The link between hosts fills the keys of ``job.link`` that the job leaves open.
    """
    link = profile.job.link
    for one in links:
        if one.between == "hosts":
            measured = {"latency": one.latency, "bandwidth": one.bandwidth}
            unset = {key: value for key, value in measured.items() if getattr(link, key) is None}
            link = link.model_copy(update=unset)
    job = profile.job.model_copy(update={"link": link})
    return profile.model_copy(update={"links": tuple(links), "job": job})


def _slowest(links: Sequence[LinkTime]) -> LinkTime:
    """The largest latency and the least bandwidth: a ring runs at the pace of its slowest link."""
    late = max(links, key=lambda one: one.latency)
    narrow = min(links, key=lambda one: one.bandwidth)
    names = ("latency", "latency_low", "latency_high")
    return narrow.model_copy(update={name: getattr(late, name) for name in names})


class Helper:
    """Carries out worker 0's orders in every other worker; its methods are named by the orders."""

    def __init__(self) -> None:
        self._part: _Part | None = None

    def measure(self, gathering: Gathering, order: Mapping[str, Any]) -> None:
        """Join the group of all workers."""
        del gathering
        self._part = _Part(Job.model_validate_json(order["job"]), order["counts"])

    def command(self, gathering: Gathering, order: Mapping[str, Any]) -> None:
        """Carry a command out, if it is for this worker too."""
        assert self._part is not None  # noqa: S101 - `measure` comes first
        if gathering.started.rank < order["workers"]:
            self._part.executor.carry_out(read_command(order["text"]))

    def measured(self, gathering: Gathering, order: Mapping[str, Any]) -> None:
        """Leave the group."""
        del gathering, order
        self.close()

    def close(self, error: BaseException | None = None) -> None:
        """Leave the group, if it was joined; ``error`` as for `Group.close`."""
        if self._part is not None:
            self._part.close(error)
            self._part = None


class _Part:
    """One worker's group and executor."""

    def __init__(self, job: Job, counts: Sequence[int]) -> None:
        allocator = prepare_process(worker_threads(int(os.environ["LOCAL_WORLD_SIZE"])))
        self._group = Group(own_device(job), job.timeout)
        self.executor = Executor(job, self._group, counts, allocator)

    def close(self, error: BaseException | None = None) -> None:
        if error is not None:
            self._group.give_up(error)
        self.executor.close()
        self._group.close(error)
