"""An agent: leases jobs of a service, one after the other, and carries them out on this machine.

A service only says which job; what may run here the agent's own rules say (`records.agent_rules`).
"""

from __future__ import annotations

import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from urllib.parse import quote

from pydantic import ValidationError

from batchwright.client.http import Backoff, Service, ServiceError
from batchwright.client.identity import folder_id
from batchwright.client.job_work import JobWork
from batchwright.client.lease_heartbeat import LeaseEnded, LeaseHeartbeat
from batchwright.client.offering import NO_LIMITS, Limits
from batchwright.client.submitting import understood
from batchwright.errors import BatchwrightError, Interrupted
from batchwright.records.agent_rules import rules_of
from batchwright.records.service import (
    AgentInfo,
    AgentIntroduction,
    JobOrders,
    JobProgress,
    Lease,
    LeaseRequest,
)
from batchwright.records.text.problems import first_problem
from batchwright.storage.files import make_folder
from batchwright.storage.locks import take

ASK_SECONDS = 2.0  # between two questions for a job
MAX_REASON = 2000  # characters
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Agent:
    """Asks for jobs until it is stopped.

    Args:
        service: Whose jobs.
        token: For runs to report with.
        folder: Takes the jobs' folders; one agent at a time.
        introduction: Its name, rules and machine; which folder and process, it adds itself.
        limits: What jobs may take of this machine.
        follow_advice: Whether runs take new plans from the service.
        tell: Takes a line for whoever watches.
    """

    def __init__(
        self,
        service: Service,
        token: str,
        folder: Path,
        introduction: AgentIntroduction,
        *,
        limits: Limits = NO_LIMITS,
        follow_advice: bool = False,
        tell: Callable[[str], None],
    ) -> None:
        self._service, self._token, self._folder = service, token, folder
        self._introduction, self._follow_advice, self._tell = introduction, follow_advice, tell
        self._limits = limits
        self._session = str(uuid.uuid4())
        self._stopping = threading.Event()
        self._number = 0

    def work(self) -> None:
        """Until a stop signal; the job in progress is given back then, with a checkpoint.

        Raises:
            FileError: The folder is another agent's, or cannot be written.
            ServiceError: The service refuses this agent, as where another one has its name.
            Interrupted: It was stopped.
        """
        make_folder(self._folder / "jobs")
        with take(self._folder, "another --folder"), self._noting_signals():
            introduced, problem, backoff = False, "", Backoff()
            while not self._stopping.is_set():
                try:
                    if not introduced:
                        self._introduce()
                        introduced = True
                    lease = self._lease()
                except ServiceError as error:
                    if not error.passing and not (introduced and error.status == 404):
                        raise
                    introduced = introduced and error.passing
                    if str(error) != problem:
                        problem = str(error)
                        self._tell(f"{problem}; trying again")
                    self._stopping.wait(backoff.seconds(error))
                    continue
                backoff.reset()
                problem = ""
                if lease is None:
                    self._stopping.wait(ASK_SECONDS)
                else:
                    self._carry_out(lease)
        raise Interrupted(self._number, f"stopped by signal {self._number}")

    def _introduce(self) -> None:
        given = self._introduction.model_copy(
            update={"folder": folder_id(self._folder), "session": self._session}
        )
        answer = self._service.put(_place(given.name), given.model_dump_json().encode())
        info = understood(AgentInfo, answer, self._service.url)
        self._introduction = self._introduction.model_copy(update={"name": info.name})
        self._tell(f"{info.name} waits for jobs of {self._service.url}")

    def _lease(self) -> Lease | None:
        """A job, if there is one that this agent can read; one that it cannot, it gives back."""
        asked = LeaseRequest(session=self._session).model_dump_json().encode()
        found = self._service.post(f"{_place(self._introduction.name)}/lease", asked)
        if found is None:
            return None
        try:
            return Lease.model_validate(found)
        except ValidationError as error:
            # Another agent may have what came with it, whatever of it cannot be read.
            problem = first_problem(error, "")
            reason = (
                f"this agent cannot read it ({problem}): it may lack a package that the job names"
            )
            try:
                told = JobProgress(key=found["key"], state="queued", reason=reason[:MAX_REASON])
                job, name = found["job"]["id"], found["job"]["name"]
            except (TypeError, LookupError, ValidationError):
                understood(Lease, found, self._service.url)
                raise
            self._service.post(f"/v1/jobs/{job}/progress", told.model_dump_json().encode())
            self._tell(f"{name}: given back: {reason}")
            return None

    def _carry_out(self, lease: Lease) -> None:
        """One job; whatever becomes of it, the agent goes on."""

        def report(progress: JobProgress) -> JobOrders:
            body = progress.model_dump_json().encode()
            answer = self._service.post(f"/v1/jobs/{lease.job.id}/progress", body)
            return understood(JobOrders, answer, self._service.url)

        name = lease.job.name
        with LeaseHeartbeat(report, lease.key, lease.seconds, self._stopping) as pulse:
            work = JobWork(
                self._folder / "jobs" / lease.job.id,
                lease,
                self._introduction.allow,
                self._service,
                self._token,
                pulse,
                limits=self._limits,
                follow_advice=self._follow_advice,
                tell=self._tell,
            )
            try:
                self._tell(f"{name}: {work.do()}")
            except LeaseEnded:
                if pulse.lost:
                    self._tell(f"{name}: the lease was lost, so another agent goes on with it")
                else:  # another agent need not wait for the lease to run out
                    pulse.give_back(sent=work.sent)
                    self._tell(f"{name}: given back")
            except (ServiceError, OSError) as error:
                self._tell(f"{name}: {error}")

    @contextmanager
    def _noting_signals(self) -> Iterator[None]:
        """Inside, the first stop signal is noted; a second one ends this process at once."""

        def note(number: int, frame: FrameType | None) -> None:
            del frame
            if self._stopping.is_set():
                os._exit(128 + number)  # what it has started dies with it
            self._number = number
            self._stopping.set()

        former = {number: signal.signal(number, note) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)


def _place(name: str) -> str:
    return f"/v1/agents/{quote(name, safe='')}"


def allowed(rules: Sequence[str]) -> tuple[str, ...]:
    """The rules of ``--allow``, if they are such.

    Raises:
        BatchwrightError: One is none.
    """
    try:
        rules_of(rules)
    except ValueError as error:
        raise BatchwrightError(f"--{error}") from None
    return tuple(rules)
