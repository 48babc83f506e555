"""Submits a job to a service, and follows its state."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from pydantic import ValidationError

from batchwright.client.http import Backoff, Service, ServiceError, object_in
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
        service: The service.
        job: The job; all of its keys are sent, so that defaults of this version hold.
        name: Name of the job, for people.
        auto: Whether to train without waiting for the plan to be approved.
        needs: What the agent's machine must offer, beside what the job's keys ask for.
        keep_seconds: Seconds for which the training is kept for an agent that is silent or away;
            `None`: as the service's settings say.

    Raises:
        ServiceError: The service cannot be reached, or refuses.
        JobError: The name is empty, too long or not on one line.
    """
    try:
        submission = JobSubmission(
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
            answer = service.post("/v1/jobs", submission.model_dump_json().encode())
            return understood(JobInfo, answer, service.url)
        except ServiceError as error:
            if error.sent or not left:  # a submission that may have arrived is not repeated
                raise
            time.sleep(backoff.seconds(error))
    raise AssertionError  # the last attempt returns or raises


def needed(labels: Sequence[str], gpus: int, memory: float) -> Needs:
    """What the agent's machine must offer, from options of the command line.

    Args:
        labels: Labels of the agent.
        gpus: Number of GPUs.
        memory: Minimum memory in GiB: of each GPU if GPUs are needed, else main memory.

    Raises:
        JobError: A label is invalid.
    """
    try:
        return Needs(labels=tuple(labels), gpus=gpus, memory=round(memory * GIB))
    except ValidationError as error:
        raise JobError(label_problem(error)) from None


def follow(service: Service, info: JobInfo, tell: Callable[[str], None]) -> JobInfo:
    """Wait until a job is done, also while the service is away.

    Args:
        service: The service that has the job.
        info: The job.
        tell: Called with a line whenever the job's state has changed.

    Returns:
        The job at its end.

    Raises:
        WorkerError: The job failed or was cancelled.
        ServiceError: The service refuses to answer.
    """
    backoff, former, problem = Backoff(ASK_SECONDS, 15.0), "", ""
    while True:
        words = state_words(info, service.url)
        if words != former:
            former = words
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
    """A job's name and state, in a line."""
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
        ServiceError: The answer is not such a record: the service is of another version, or it is a
            proxy's.
    """
    try:
        return model.model_validate(object_in(values, url))
    except ValidationError:
        raise not_understood(url) from None


def not_understood(url: str) -> ServiceError:
    """The error for an answer of the service at ``url`` that is of another version."""
    return ServiceError(
        f"{url} answers what this version does not understand: use the same one on both sides",
        status=400,
    )
