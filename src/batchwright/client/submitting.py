"""Hands a job to a service, and follows what becomes of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from pydantic import ValidationError

from batchwright.client.http import Backoff, Service, ServiceError
from batchwright.errors import JobError, WorkerError
from batchwright.records import Job, Record
from batchwright.records.agent_rules import GIB, Needs, label_problem
from batchwright.records.service import JobInfo, JobSubmission

ASK_SECONDS = 1.0  # between two looks at a job
ENDED = ("done", "failed", "cancelled")

Answer = TypeVar("Answer", bound=Record)


def submit(
    service: Service,
    job: Job,
    *,
    name: str,
    auto: bool,
    needs: Needs | None = None,
    keep_seconds: float | None = None,
) -> JobInfo:
    """Queue a job; it is never queued twice.

    Args:
        service: Where.
        job: What to do; all of its keys are sent, so that defaults of this version hold.
        name: For people.
        auto: Train without waiting for the plan to be approved.
        needs: Of the agent's machine, beside what the job's keys say.
        keep_seconds: How long its training is kept for an agent that is silent or away; `None`: as
            the service has it.

    Raises:
        ServiceError: The service cannot be reached, or refuses.
        JobError: The name is none.
    """
    try:
        asked = JobSubmission(
            name=name,
            job=job.model_dump(mode="json"),
            auto=auto,
            needs=needs or Needs(),
            keep_seconds=keep_seconds,
        )
    except ValidationError:
        raise JobError(f"name {name[:60]!r}: give 1 to 120 characters, on one line") from None
    backoff = Backoff(0.5, 2.0)
    for left in range(3, -1, -1):
        try:
            info = service.post("/v1/jobs", asked.model_dump_json().encode())
            return understood(JobInfo, info, service.url)
        except ServiceError as error:
            if error.sent or not left:  # what may have arrived is not sent again
                raise
            time.sleep(backoff.seconds(error))
    raise AssertionError  # the last attempt returns or raises


def needed(labels: Sequence[str], gpus: int, memory: float) -> Needs:
    """What a job needs of a machine, as the command line says; ``memory`` in GiB.

    Raises:
        JobError: A label is none.
    """
    try:
        return Needs(labels=tuple(labels), gpus=gpus, memory=round(memory * GIB))
    except ValidationError as error:
        raise JobError(label_problem(error)) from None


def follow(service: Service, info: JobInfo, tell: Callable[[str], None]) -> JobInfo:
    """Until a job has ended well; a service that is away for a while is waited for.

    Args:
        service: That has the job.
        info: The job.
        tell: Takes a line whenever it stands elsewhere.

    Raises:
        WorkerError: It failed or was cancelled.
        ServiceError: The service refuses to tell.
    """
    backoff, told, problem = Backoff(ASK_SECONDS, 15.0), "", ""
    while True:
        words = state_words(info, service.url)
        if words != told:
            told = words
            tell(words)
        if info.state in ENDED:
            break
        try:
            time.sleep(ASK_SECONDS)
            info = understood(JobInfo, service.get(f"/v1/jobs/{info.id}"), service.url)
            backoff.reset()
            problem = ""
        except ServiceError as error:
            if not error.passing:
                raise
            if str(error) != problem:
                problem = str(error)
                tell(f"{problem}; still waiting")
            time.sleep(backoff.seconds(error))
    if info.state != "done":
        raise WorkerError(f"job {info.name}: {info.error or info.state}")
    return info


def state_words(info: JobInfo, url: str) -> str:
    """Where a job stands, in a line."""
    words: str = info.state
    if info.state == "planned" and not (info.auto or info.approved):
        words += f", waits to be approved at {url}/jobs/{info.id}"
    elif info.cancelling:
        words += ", being cancelled"
    elif info.agent and info.state in ("probing", "training"):
        words += f" by {info.agent}" + (", which is silent" if info.silent else "")
    elif info.waiting is not None:
        words += f", {info.waiting}"
    if info.run is not None and info.state in ("training", "done"):
        words += f": {url}/runs/{info.run}"
    return f"job {info.name}: {words}"


def understood(model: type[Answer], values: object, url: str) -> Answer:
    """An answer of the service at ``url`` as a record.

    Raises:
        ServiceError: It is none; the service is of another version.
    """
    try:
        return model.model_validate(values)
    except ValidationError:
        raise ServiceError(
            f"{url} answers what this version does not understand: use the same one on both sides",
            status=400,
        ) from None
