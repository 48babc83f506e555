"""What an agent does with a job that it has: probe, plan and train, by the ordinary commands.

Each is a process of its own, so a job cannot take the agent down, and its folder keeps what is
done: an agent that was killed goes on from there.

    FOLDER/job.yaml, profile.json, plan.json    run/  the run folder    logs/VERB.log
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from batchwright.client.artifacts import RunFiles
from batchwright.client.checkpoint_progress import CheckpointProgress
from batchwright.client.http import TOKEN, Backoff, Service, ServiceError
from batchwright.client.lease_heartbeat import LeaseEnded, LeaseHeartbeat
from batchwright.client.offering import NO_LIMITS, Limits
from batchwright.client.outbox import read_report, write_report
from batchwright.client.reporter_process import REPORT_TO, RUN_JOB, RUN_NAME
from batchwright.client.sending import Sender
from batchwright.distributed import fork_server
from batchwright.distributed.exit_reports import error_of
from batchwright.distributed.processes import VERB_PARENT
from batchwright.errors import BatchwrightError, FileError, JobError
from batchwright.records import Job, Plan, Profile
from batchwright.records.agent_rules import difference, misfit, not_allowed
from batchwright.records.documents import (
    change_job,
    job_yaml,
    read_record,
    write_record,
    write_text,
)
from batchwright.records.service import Lease
from batchwright.storage.files import make_folder
from batchwright.storage.locks import take

VERBS = "batchwright.cli.verb_child"  # the command line, in a process that ends with this one
POLL_SECONDS = 0.1
LOOK_SECONDS = 5.0  # between two looks at what a job takes of the machine
STOP_SECONDS = 8.0  # for a checkpoint, after a job was cancelled; then it is killed
LAST_SECONDS = 70.0  # the same when the agent itself is to end: workers have 60 s for it
_MAX_ERROR = 2000  # characters of an error


class VerbFailed(BatchwrightError):  # noqa: N818 - the job failed, and not the agent
    """A command ended with an error, which is the message."""


class Unable(BatchwrightError):  # noqa: N818 - the job is given back, for another agent
    """This agent cannot carry the job out; the message says why."""


class JobWork:
    """Carries out one job.

    Args:
        folder: Of the job; it may hold what was done before.
        lease: The job.
        allow: Rules of what this agent carries out.
        service: Where runs report to.
        token: For that.
        pulse: Through which all is told.
        limits: What it may take of this machine.
        follow_advice: Whether runs take new plans from the service.
        tell: Takes a line for whoever watches.
    """

    def __init__(
        self,
        folder: Path,
        lease: Lease,
        allow: Sequence[str],
        service: Service,
        token: str,
        pulse: LeaseHeartbeat,
        *,
        limits: Limits = NO_LIMITS,
        follow_advice: bool = False,
        tell: Callable[[str], None],
    ) -> None:
        self._folder, self._lease, self._allow = folder, lease, allow
        self._limits, self._began = limits, time.monotonic()
        self._service, self._token, self._pulse = service, token, pulse
        self._follow_advice, self._tell = follow_advice, tell
        self._run = folder / "run"
        self._files = RunFiles(folder, lease, service, pulse, tell)
        self._progress = CheckpointProgress(self._run)
        self._passed = ""  # which limit

    @property
    def sent(self) -> bool:
        """Whether the service has the newest checkpoint, once the work has ended."""
        return self._files.sent

    def do(self) -> str:
        """Do what is left of the job, and tell how it ended.

        Returns:
            The same in words.

        Raises:
            LeaseEnded: It is not this agent's any more; what is done is kept.
            ServiceError: The service refuses what it is told.
        """
        try:
            with self._files:
                return self._do()
        except LeaseEnded:
            if self._pulse.cancelled and not self._pulse.lost:
                self._pulse.say("cancelled")
                return "cancelled"
            raise
        except Unable as error:
            reason = " ".join(str(error).split())[:_MAX_ERROR]
            self._pulse.say("queued", reason=reason)
            return f"given back: {reason}"
        except (BatchwrightError, OSError) as error:  # a full disk, for example
            if self._pulse.lost:
                raise LeaseEnded("the lease of the job was lost") from None
            problem = " ".join(str(error).split())[:_MAX_ERROR]
            self._pulse.say("failed", error=problem)
            return f"failed: {problem}"

    def _do(self) -> str:
        job = self._checked_job()
        make_folder(self._folder / "logs")
        plan = self._lease.plan
        if self._lease.job.state == "training" and plan is not None:
            if not (self._run / "plan.json").exists():
                self._check_plan(plan)
        else:
            plan = self._planned(job)
            if not self._lease.job.auto:
                return "planned"  # somebody has to approve it, and then the job is leased again
        problem = self._limits.refusal(plan)
        if problem:
            raise Unable(problem)
        self._pulse.say("training")
        self._train(plan)
        self._send_rest()
        self._files.settle()
        self._pulse.say("done")
        return "done"

    def _checked_job(self) -> Job:
        """The job, if this agent may carry it out.

        A profile or plan that comes with it names data and code of its own, as another agent said.

        Raises:
            JobError: The rules do not allow it, or what comes with it is not of this job.
            Unable: It cannot be read here: it names what a package adds that is not here.
        """
        try:
            job = change_job(Job(), self._lease.job.job)
        except JobError as error:  # the service could read it
            raise Unable(f"this agent cannot read it ({error})") from None
        for key in job.code_keys:
            text = getattr(job, key)
            if not _is_installed(text):
                raise Unable(f"{key}={text}: its package is not installed here")
        given = (self._lease.profile, self._lease.plan)
        for one in (job, *(document.job for document in given if document is not None)):
            problem = not_allowed(self._allow, one)
            if problem:
                raise JobError(problem)
        if self._lease.profile is not None:
            problem = misfit(job, self._lease.profile.job)
            if problem:
                raise JobError(f"the profile that came with the job has {problem}")
        return job

    def _check_plan(self, plan: Plan) -> None:
        """Refuse to follow a plan of another agent that its profile does not lead to.

        Raises:
            JobError: It does not, or there is no profile.
            VerbFailed: There is no plan for it.
        """
        profile, made = self._lease.profile, self._folder / "made"
        if profile is None:
            raise JobError("the plan came without the profile that it was made from")
        make_folder(made)
        write_record(profile, made / "profile.json")
        self._verb("plan", str(made / "profile.json"), "--out", str(made / "plan.json"))
        problem = difference(read_record(made / "plan.json", Plan), plan, without=("reasons",))
        if problem:
            raise JobError(f"the plan is not the one that its profile leads to: {problem}")

    # ------------------------------------------------------------------------------- probe and plan

    def _planned(self, job: Job) -> Plan:
        """A plan for the job, which the service has then."""
        place = self._folder / "profile.json"
        text, file = job_yaml(job), self._folder / "job.yaml"
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            place.unlink(missing_ok=True)  # another job left it; there should be none
            write_text(text, file)
        if self._lease.profile is not None:
            write_record(self._lease.profile, place)
        elif not place.exists() or read_record(place, Profile).trials_open:
            self._verb("probe", str(file), *code_words(job), "--out", str(place))
            self._pulse.say(profile=read_record(place, Profile))
        plan = self._plan_once(place)
        if plan.server is not None and not plan.job.launcher.simulated:
            plan = self._settled(plan, place)
        profile = read_record(place, Profile)
        self._pulse.say("planned", profile=profile, plan=plan)
        return plan

    def _plan_once(self, profile: Path) -> Plan:
        place = self._folder / "plan.json"
        self._verb("plan", str(profile), "--out", str(place))
        return read_record(place, Plan)

    def _settled(self, plan: Plan, profile: Path) -> Plan:
        """The plan, made again with its two batch sizes measured side by side, as `run` does."""
        place, better = self._folder / "plan.json", self._folder / "better.json"
        words = ["--profile", str(profile), "--points", "1", "--out", str(better)]
        try:
            self._verb("check", str(place), *code_words(plan.job), *words)
        except VerbFailed as error:
            self._tell(f"the two batch sizes were not measured side by side: {error}")
            return plan
        better.replace(profile)
        return self._plan_once(profile)

    # ---------------------------------------------------------------------------------------- train

    def _train(self, plan: Plan) -> None:
        """Train, or go on with it; nothing if it was done before."""
        self._files.restore(plan)
        if (self._run / "summary.json").exists():
            self._note_run()
            return
        words = ["--out", str(self._run), "--report-to", self._service.url]
        if self._follow_advice and plan.server is None and not plan.job.launcher.simulated:
            words.append("--follow-advice")
        if (self._run / "plan.json").exists():
            words = ["train", "--resume", *words]
        else:
            if self._run.exists():  # an agent was killed before it was of any use
                take(self._run, "another --folder").close()  # its commands may still be ending
                shutil.rmtree(self._run)
            place = self._folder / "plan.json"
            write_record(plan, place)
            words = ["train", str(place), *words]
        self._verb(*words, *code_words(plan.job))

    def _note_run(self) -> None:
        """The next sign of life tells which run carries out the job."""
        if self._pulse.run is not None:
            return
        try:
            report = read_report(self._run)
        except FileError:
            return
        self._pulse.run = report.run if report is not None else None

    def _note_progress(self) -> None:
        """The next sign of life tells how far the newest checkpoint is."""
        self._note_run()
        trained = self._progress.trained()
        self._pulse.trained = self._pulse.trained if trained is None else trained

    def _send_rest(self) -> None:
        """Until the service has the whole run; it may be away just now."""
        self._note_run()
        backoff = Backoff(0.5, 10.0)
        while (report := read_report(self._run)) is not None and not report.told:
            sender = Sender(self._run, report, self._service, self._tell)
            try:
                sender.introduce()
                while sender.send_some():
                    self._stop_if_ended()
                sender.tell_taken()
                sender.end("finished", None)
            except ServiceError as error:
                if not error.passing:
                    raise BatchwrightError(f"the run is done and not reported: {error}") from None
                end = time.monotonic() + backoff.seconds(error)
                while time.monotonic() < end:
                    self._stop_if_ended()
                    time.sleep(POLL_SECONDS)
            finally:
                write_report(self._run, sender.report)
        if report is not None:
            self._pulse.run = report.run

    # ----------------------------------------------------------------------------------- processes

    def _verb(self, *words: str) -> None:
        """Run a command to its end; an error of it is `VerbFailed`."""
        self._stop_if_ended()
        self._tell(f"{words[0]}: {self._lease.job.name}")
        log = self._folder / "logs" / f"{words[0]}.log"
        with log.open("wb") as file:
            process = fork_server.start(VERBS, words, environment=self._environment(), log=file)
            try:
                self._attend(process, noting=words[0] == "train")
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        code = process.wait()
        if code:
            self._stop_if_ended()
            if self._passed:
                raise Unable(self._passed)
            raise VerbFailed(error_of(log, code, words[0]))

    def _attend(self, process: fork_server.Process, *, noting: bool) -> None:
        """Until it has ended; it is asked to, and then made to, when the work is to end."""
        kill_at: float | None = None
        look_at = 0.0
        while process.poll() is None:
            if noting:
                self._note_progress()
            if time.monotonic() > look_at and not self._passed:
                self._passed = self._limits.passed(self._folder, self._began)
                look_at = time.monotonic() + LOOK_SECONDS
            if (self._pulse.ended or self._passed) and kill_at is None:
                process.send_signal(signal.SIGTERM)
                cancelled = self._pulse.cancelled or self._pulse.lost
                kill_at = time.monotonic() + (STOP_SECONDS if cancelled else LAST_SECONDS)
            if kill_at is not None and time.monotonic() > kill_at:
                process.kill()
            time.sleep(POLL_SECONDS)
        if noting:
            self._note_progress()

    def _environment(self) -> dict[str, str]:
        job = self._lease.job
        own = {
            VERB_PARENT: str(os.getpid()),
            TOKEN: self._token,
            RUN_NAME: job.name,
            RUN_JOB: job.id,
        }
        given = {key: value for key, value in os.environ.items() if key != REPORT_TO}
        return given | self._limits.environment(given) | own

    def _stop_if_ended(self) -> None:
        if self._pulse.ended:
            raise LeaseEnded("the work on the job is to end")


def _is_installed(text: str) -> bool:
    """Whether the package of an import string is here; nothing of it is imported."""
    package = text.partition(":")[0].partition(".")[0]
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):  # the command says what is wrong with it
        return True


def code_words(job: Job) -> list[str]:
    """Words that repeat which code the job runs, as verbs want it of what came in a file."""
    named = {key: getattr(job, key) for key in ("data", "network", "loss")}
    return [f"{key}={value}" for key, value in named.items() if ":" in value]
