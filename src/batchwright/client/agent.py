"""An agent: leases jobs of a service, one after the other, and carries them out on this machine.

The service chooses the job; the agent's own rules decide what may run here (`records.agent_rules`).
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from urllib.parse import quote

from pydantic import ValidationError

from batchwright.client.http import Backoff, Service, ServiceError
from batchwright.client.job_work import JobWork
from batchwright.client.lease_heartbeat import LeaseEnded, LeaseHeartbeat
from batchwright.client.offering import NO_LIMITS, Limits
from batchwright.client.old_folders import OldFolders
from batchwright.client.submitting import not_understood, understood
from batchwright.distributed.processes import stop_signals
from batchwright.errors import BatchwrightError, Interrupted, stopped_by
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
from batchwright.storage.files import make_folder, write_whole
from batchwright.storage.locks import take

ASK_SECONDS = 2.0  # between two requests for a job
MAX_REASON = 2000  # characters
_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
_IDENTITY = "agent.json"  # in the agent's folder


class Agent:
    """Asks for jobs until it is stopped.

    Args:
        service: The service that hands out the jobs.
        token: Token that runs report with.
        folder: Folder of the jobs' folders; one agent at a time uses it.
        introduction: Name, rules and machine of the agent; `folder` and `session` are filled in.
        limits: What a job may take of this machine.
        follow_advice: Whether runs take new plans from the service.
        retention_days: Days without work on a job after which its folder is removed; `None`: never.
        tell: Called with each line for the person who watches.
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
        retention_days: float | None = None,
        tell: Callable[[str], None],
    ) -> None:
        self._service, self._token, self._folder = service, token, folder
        self._old_folders = OldFolders(folder / "jobs", retention_days, tell)
        self._introduction, self._follow_advice, self._tell = introduction, follow_advice, tell
        self._limits = limits
        self._session = str(uuid.uuid4())
        self._stopping = threading.Event()
        self._number = 0

    def work(self) -> None:
        """Carry out jobs until a stop signal; the job in progress is then given back, with a
        checkpoint.

        Raises:
            FileError: Another agent uses the folder, or the folder cannot be written.
            ServiceError: The service refuses this agent, as where another one has its name.
            Interrupted: A signal stopped the agent.
        """
        make_folder(self._folder / "jobs")
        with take(self._folder, "another --folder"), self._noting_signals():
            known = introduced = False  # `known`: the service has taken an introduction before
            problem, backoff = "", Backoff()
            while not self._stopping.is_set():
                try:
                    if not introduced:
                        self._introduce()
                        known = introduced = True
                    self._old_folders.remove()
                    lease = self._lease()
                except ServiceError as error:
                    # At first another program's answer means a wrong address.
                    if not (known if error.by_another else error.passing):
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
            if known:
                self._leave()
        raise Interrupted(self._number, stopped_by(self._number))

    def _introduce(self) -> None:
        own = {"folder": folder_id(self._folder), "session": self._session}
        introduction = self._introduction.model_copy(update=own)
        answer = self._service.put(
            _address(introduction.name), introduction.model_dump_json().encode()
        )
        info = understood(AgentInfo, answer, self._service.url)
        self._introduction = self._introduction.model_copy(update={"name": info.name})
        self._tell(f"{info.name} waits for jobs of {self._service.url}")

    def _leave(self) -> None:
        """Tell the service that this agent ends, in one attempt; without it others wait for it."""
        request = LeaseRequest(session=self._session).model_dump_json().encode()
        with suppress(ServiceError):
            self._service.post(f"{_address(self._introduction.name)}/leave", request)

    def _lease(self) -> Lease | None:
        """A lease of a job, if there is a job for this agent. One that it cannot read is given
        back: another agent may have the package that the job names.
        """
        request = LeaseRequest(session=self._session).model_dump_json().encode()
        values = self._service.post(f"{_address(self._introduction.name)}/lease", request)
        if values is None:
            return None
        try:
            return Lease.model_validate(values)
        except ValidationError as error:
            problem = first_problem(error, "")
            reason = (
                f"this agent cannot read it ({problem}): it may lack a package that the job names"
            )
            try:
                progress = JobProgress(
                    key=values["key"], state="queued", reason=reason[:MAX_REASON]
                )
                job, name = values["job"]["id"], values["job"]["name"]
            except (TypeError, LookupError, ValidationError):
                raise not_understood(self._service.url) from None
            try:
                body = progress.model_dump_json().encode()
                self._service.post(f"/v1/jobs/{job}/progress", body)
            except ServiceError as refusal:
                if refusal.status != 409:
                    raise
                self._tell(f"{name}: {refusal}")  # the lease is lost, which ends no agent
            else:
                self._tell(f"{name}: given back: {reason}")
            return None

    def _carry_out(self, lease: Lease) -> None:
        """Carry out one job; however the job ends, the agent goes on."""

        def report(progress: JobProgress) -> JobOrders:
            body = progress.model_dump_json().encode()
            answer = self._service.post(f"/v1/jobs/{lease.job.id}/progress", body)
            return understood(JobOrders, answer, self._service.url)

        name = lease.job.name
        heartbeat = LeaseHeartbeat(report, lease.key, lease.seconds, self._stopping)
        work = JobWork(
            self._folder / "jobs" / lease.job.id,
            lease,
            self._introduction.allow,
            self._service,
            self._token,
            heartbeat,
            offer=self._introduction.offer,
            limits=self._limits,
            follow_advice=self._follow_advice,
            tell=self._tell,
        )
        try:
            self._tell(f"{name}: {work.do()}")
        except LeaseEnded:
            if heartbeat.lost:
                self._tell(f"{name}: the lease was lost: another agent has it, or it has ended")
            else:  # another agent need not wait for the lease to run out
                heartbeat.give_back(sent=work.sent)
                self._tell(f"{name}: given back")
        except (ServiceError, OSError) as error:
            self._tell(f"{name}: {error}")
        finally:
            self._old_folders.note(lease.job.id)

    @contextmanager
    def _noting_signals(self) -> Iterator[None]:
        """Inside, the first stop signal is noted; a second one ends this process at once."""

        def note(number: int, frame: FrameType | None) -> None:
            del frame
            if self._stopping.is_set():
                if number == signal.SIGHUP:  # a closed terminal sends several
                    return
                os._exit(128 + number)  # the processes that it has started die with it
            self._number = number
            self._stopping.set()

        heeded = _SIGNALS.intersection(stop_signals())
        former = {number: signal.signal(number, note) for number in heeded}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)


def _address(name: str) -> str:
    return f"/v1/agents/{quote(name, safe='')}"


def folder_id(folder: Path) -> str:
    """Identifier of an agent's folder, by which the service recognizes the agent. It stays with the
    folder; a copy of the folder gets another one.

    Raises:
        FileError: The file of the identifier cannot be written.
    """
    path, inode = folder / _IDENTITY, folder.stat().st_ino
    try:
        values = json.loads(path.read_bytes())
        if values["inode"] == inode:
            return str(uuid.UUID(values["id"]))
    except (OSError, ValueError, KeyError, TypeError):
        pass  # the folder is new, or the file is no such file
    identifier = str(uuid.uuid4())
    write_whole(path, json.dumps({"id": identifier, "inode": inode}).encode())
    return identifier


def usual_name(folder: Path) -> str:
    """Name of an agent where nobody chose one: its machine's and its folder's."""
    words = re.sub(r"[^\w.-]+", "-", f"{socket.gethostname()}-{folder.resolve().name}")
    return words.strip("-")[:100] or "agent"


def allowed(rules: Sequence[str]) -> tuple[str, ...]:
    """The rules of ``--allow``, checked.

    Raises:
        BatchwrightError: A rule cannot be read.
    """
    try:
        rules_of(rules)
    except ValueError as error:
        raise BatchwrightError(f"--{error}") from None
    return tuple(rules)
