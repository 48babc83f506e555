"""Measures with the processes that another launcher started: worker 0 asks, all carry out.

worker 0: `Together.ask` --order--> the others: `Helper`; all carry the command out at once
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from batchwright.distributed.group import Group
from batchwright.distributed.joining.gathering import Gathering
from batchwright.distributed.transports import gpus_may_be_shared
from batchwright.errors import Interrupted, JobError, PlanError
from batchwright.probing.commands import Command, LinkTimed, TimeLink, ignored, read_command
from batchwright.probing.executor import Executor, device_name
from batchwright.probing.kinds import Place
from batchwright.probing.workers import Answer, pause, share_done
from batchwright.records import Job, LinkTime, Profile
from batchwright.workload.data.sources import open_data
from batchwright.workload.host import (
    enter,
    free_memory,
    identity,
    prepare_process,
    shared_out,
    worker_threads,
)

KIND = "BATCHWRIGHT_KIND"
"""Environment variable: which kind of worker this host has, as in ``goal.kinds``."""

_MAX_HOSTS = 8  # to which the network is measured; beyond, they are taken to be like these


def own_device(job: Job) -> torch.device:
    """The device of this process among those of its host, made the current one."""
    return enter(shared_out(job.device, int(os.environ["LOCAL_RANK"])))


def ask_for_places(gathering: Gathering, job: Job, digest: str) -> tuple[Place, ...]:
    """Have all others look for the job's data and a device of their own.

    Returns:
        Where each worker is, in rank order.

    Raises:
        BatchwrightError: A host has other data or none, or two workers have one GPU.
    """
    found = gathering.ask("look", job=job.model_dump_json(), digest=digest)
    places = (_own_place(gathering, own_device(job)), *(Place(**told) for told in found))
    seen: dict[tuple[str, str], int] = {}
    for rank, one in enumerate(() if gpus_may_be_shared() else places):
        if one.gpu and (other := seen.setdefault((one.host, one.gpu), rank)) != rank:
            raise JobError(
                f"workers {other} and {rank} ({one.host}) have one GPU between them: start one "
                "worker for each GPU there, or say device=cpu"
            )
    return places


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
    """What another than worker 0 answers to `ask_for_places`: where it is."""
    job, first = Job.model_validate_json(order["job"]), gathering.started.local_rank == 0
    device = own_device(job)
    facts = open_data(job, verify=first).facts  # one of a host does it for all
    if facts.digest != order["digest"]:
        raise PlanError(
            f"data={job.data} is not what worker 0 ({gathering.members[0].host}) has: "
            f"{facts.train_samples} training images with digest {facts.digest[:12]} here, "
            f"{order['digest'][:12]} there: give all hosts the same"
        )
    return asdict(_own_place(gathering, device))


class Together:
    """Carries commands out with all processes of a start; worker 0's side.

    Args:
        gathering: The processes.
        job: What is measured.
        counts: Numbers of workers that commands may ask for.
        stops: The stop signals that came so far.

    Attributes:
        places: Of the workers, in rank order.

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
        self, command: Command, answer: type[Answer], heard: Callable[[float], None] = ignored
    ) -> Answer:
        """As `workers.Measuring` says."""
        if stops := self._stops():
            raise Interrupted(stops[0], f"stopped by signal {stops[0]}")
        self._gathering.order("command", text=command.model_dump_json(), workers=command.workers)
        with self._gathering.explaining():
            done = self._part.executor.carry_out(command, lambda told: heard(share_done(told)))
        assert isinstance(done, answer)  # noqa: S101 - tells the type checker
        return done

    def links(self, seconds: float) -> tuple[LinkTime, ...]:
        """The network inside worker 0's host and to the slowest of some other hosts.

        Args:
            seconds: To spend on each two.
        """
        members = self._gathering.members
        first: dict[str, int] = {}  # the first worker of each host that is not worker 0 itself
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
            link = self.ask(command, LinkTimed).link
            found.setdefault(link.between, []).append(link)
        return tuple(_slowest(links) for links in found.values())

    def restart(self) -> None:
        """Nothing to do: what kills a process is for whoever has started it."""

    def pause(self, seconds: float) -> None:
        """As `workers.Measuring` says."""
        pause(seconds, self._stops)

    def close(self) -> None:
        """Leave the group; the others do the same when they are told."""
        self._gathering.order("measured")
        self._part.close()


def with_links(profile: Profile, links: Sequence[LinkTime]) -> Profile:
    """The profile with the network that was measured, which a plan for more workers goes by."""
    link = profile.job.link
    for one in links:
        if one.between == "hosts":
            told = {"latency": one.latency, "bandwidth": one.bandwidth}
            open_ = {key: value for key, value in told.items() if getattr(link, key) is None}
            link = link.model_copy(update=open_)
    job = profile.job.model_copy(update={"link": link})
    return profile.model_copy(update={"links": tuple(links), "job": job})


def _slowest(links: Sequence[LinkTime]) -> LinkTime:
    """As a ring goes at the pace of its slowest link, the worst figures of all."""
    late, narrow = (
        max(links, key=lambda one: one.latency),
        min(links, key=lambda one: one.bandwidth),
    )
    names = ("latency", "latency_low", "latency_high")
    return narrow.model_copy(update={name: getattr(late, name) for name in names})


class Helper:
    """Another than worker 0 while something is measured."""

    def __init__(self) -> None:
        self._part: _Part | None = None

    def measure(self, gathering: Gathering, order: Mapping[str, Any]) -> None:
        """Join the others."""
        del gathering
        self._part = _Part(Job.model_validate_json(order["job"]), order["counts"])

    def command(self, gathering: Gathering, order: Mapping[str, Any]) -> None:
        """Carry a command out, if it is for this one too."""
        assert self._part is not None  # noqa: S101 - `measure` comes first
        if gathering.started.rank < order["workers"]:
            self._part.executor.carry_out(read_command(order["text"]))

    def measured(self, gathering: Gathering, order: Mapping[str, Any]) -> None:
        """Leave the others."""
        del gathering, order
        self.close()

    def close(self, *, failed: bool = False) -> None:
        """Leave the group, also after an error."""
        if self._part is not None:
            self._part.close(failed=failed)
            self._part = None


class _Part:
    """One worker's part in what is measured."""

    def __init__(self, job: Job, counts: Sequence[int]) -> None:
        allocator = prepare_process(worker_threads(int(os.environ["LOCAL_WORLD_SIZE"])))
        self._group = Group(own_device(job), job.timeout)
        self.executor = Executor(job, self._group, counts, allocator)

    def close(self, *, failed: bool = False) -> None:
        if failed:
            self._group.give_up()
        self.executor.close()
        self._group.close()
