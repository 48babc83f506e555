"""What an agent does with a job that it has leased: probe, plan and train, by the ordinary verbs.

Each verb is a process of its own, so a job cannot take the agent down, and the job's folder keeps
what is done: an agent that was killed goes on from there.

    FOLDER/job.yaml, profile.json, plan.json    run/  the run folder    logs/VERB.log
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from batchwright.client.artifacts import RunFiles
from batchwright.client.http import TOKEN, Backoff, Service, ServiceError
from batchwright.client.lease_heartbeat import LeaseEnded, LeaseHeartbeat
from batchwright.client.offering import NO_LIMITS, Limits
from batchwright.client.outbox import (
    Report,
    epochs_trained,
    new_report,
    read_report,
    write_report,
)
from batchwright.client.reporter_process import REPORT_TO, RUN_JOB, RUN_NAME
from batchwright.client.sending import Sender
from batchwright.distributed import fork_server
from batchwright.distributed.exit_reports import error_of
from batchwright.distributed.processes import VERB_PARENT
from batchwright.errors import (
    NO_THREAD,
    BatchwrightError,
    FileError,
    JobError,
    both_ends,
    one_line,
    printable,
    shortage,
)
from batchwright.records import Job, Plan, Profile, RunSummary
from batchwright.records.agent_rules import (
    NO_OFFER,
    Offer,
    bounding_keys,
    misfit,
    not_allowed,
    other_choice,
)
from batchwright.records.documents import (
    change_job,
    job_yaml,
    read_record,
    write_record,
    write_text,
)
from batchwright.records.service import Lease
from batchwright.records.text.formatting import counted
from batchwright.storage.files import make_folder
from batchwright.storage.locks import take

VERBS = "batchwright.cli.verb_child"  # the command line, in a process that ends with this one
POLL_SECONDS = 0.1
LOOK_SECONDS = 5.0  # between two checks of the agent's limits
STOP_SECONDS = 8.0  # for a checkpoint after a job was cancelled; then the verb is killed
LAST_SECONDS = 70.0  # the same when the agent itself is to end: workers have 60 s for it
LEAST_FREE = 2**20  # bytes; a disk with less is full
_MAX_ERROR = 2000  # characters of an error
_FULL = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT))
# As our lines and libraries say it, not as Python does of an error in a user's own code.
_NO_PROCESS = re.compile(rf"(?<!\[Errno {errno.EAGAIN}\] ){os.strerror(errno.EAGAIN)}|{NO_THREAD}")


class VerbFailed(BatchwrightError):  # noqa: N818 - the job failed, and not the agent
    """A verb ended with an error, which is the message."""


class Unable(BatchwrightError):  # noqa: N818 - the job is given back, for another agent
    """This agent cannot carry the job out; the message says why."""


class JobWork:
    """Carries out one job.

    Args:
        folder: Folder of the job; it may hold what was done before.
        lease: The lease, with the job.
        allow: Rules which jobs this agent carries out.
        service: The service, to which runs report too.
        token: Token that the verbs report with.
        heartbeat: Heartbeat of the lease, which sends all reports on the job.
        offer: What this machine offers.
        limits: What the job may take of it.
        follow_advice: Whether runs take new plans from the service.
        tell: Called with each line for the person who watches.
    """

    def __init__(
        self,
        folder: Path,
        lease: Lease,
        allow: Sequence[str],
        service: Service,
        token: str,
        heartbeat: LeaseHeartbeat,
        *,
        offer: Offer = NO_OFFER,
        limits: Limits = NO_LIMITS,
        follow_advice: bool = False,
        tell: Callable[[str], None],
    ) -> None:
        self._folder, self._lease, self._allow = folder, lease, allow
        self._offer, self._limits, self._began = offer, limits, time.monotonic()
        self._service, self._token, self._heartbeat = service, token, heartbeat
        self._follow_advice, self._tell = follow_advice, tell
        self._run = folder / "run"
        self._files = RunFiles(folder, lease, service, heartbeat, tell)
        self._progress = CheckpointProgress(self._run)
        self._exceeded = ""  # the limit that the job has exceeded, in words

    @property
    def sent(self) -> bool:
        """Whether the service has the newest checkpoint, once the work has ended."""
        return self._files.sent

    def do(self) -> str:
        """Do what is left of the job, and report its end to the service.

        Returns:
            The end in words.

        Raises:
            LeaseEnded: The job is not this agent's any more; what is done stays in the folder.
            ServiceError: The service refuses a report on the job.
        """
        try:
            with self._heartbeat, self._files:
                return self._do()
        except LeaseEnded:
            if self._heartbeat.cancelled and not self._heartbeat.lost:
                self._heartbeat.say("cancelled")
                return "cancelled"
            raise
        except (BatchwrightError, OSError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not shortage(error):
                raise  # a mistake of ours
            if self._heartbeat.lost:
                raise LeaseEnded("the lease of the job was lost") from None
            problem = printable(" ".join(str(error).split()))
            if reason := self._why_unable(error, problem):
                reason = both_ends(reason, _MAX_ERROR)
                self._heartbeat.say("queued", reason=reason)
                end = f"given back: {reason}"
            else:
                problem = both_ends(problem, _MAX_ERROR)
                self._heartbeat.say("failed", error=problem)
                end = f"failed: {problem}"
            self._files.settle()  # the service may have been away until it took the report
            return end

    def _why_unable(self, error: Exception, problem: str) -> str:
        """Why this agent cannot carry the job out, in a line; empty where the job has failed."""
        if isinstance(error, Unable):
            return problem
        if isinstance(error, JobError):  # a job that is refused needs no disk
            return ""
        if short := shortage(error):
            return f"it is short of processes, files or memory: {short}"
        if _NO_PROCESS.search(problem):  # said by a verb or one of its workers
            return problem
        return self._full(problem)

    def _full(self, problem: str) -> str:
        """Why this agent cannot carry the job out, if a full disk is the cause of a problem; else
        empty. Its line says so, unless it was lost with the log of the verb.
        """
        if any(words in problem for words in _FULL):
            return problem
        with suppress(OSError):  # a disk that cannot be looked at may have room
            disk = shutil.disk_usage(self._folder.parent)
            if disk.free < LEAST_FREE <= disk.total:
                return f"its disk is full: {problem}"
        return ""

    def _do(self) -> str:
        job = self._checked_job()
        self._begin_folder(job)
        plan = self._lease.plan
        if self._lease.job.state == "training" and plan is not None:
            if not (self._run / "plan.json").exists():
                self._check_plan(plan)
        else:
            plan = self._make_plan(job)
            if not self._lease.job.auto:
                return "planned"  # somebody has to approve the plan, then the job is leased again
        problem = self._limits.refusal(plan) or self._short_of_gpus(plan)
        if problem:
            raise Unable(problem)
        self._heartbeat.say("training")
        self._train(plan)
        self._send_rest()
        self._files.settle()
        self._heartbeat.say("done")
        return "done"

    def _short_of_gpus(self, plan: Plan) -> str:
        """How this machine lacks the GPUs of a plan that another agent's measurements led to, in a
        line; else empty. The other one may have been busy or silent when the job was handed out.
        """
        own = self._lease.profile is None or (self._run / "plan.json").exists()
        gpus = self._offer.gpus
        if own or plan.job.device != "cuda" or plan.job.launcher.simulated or gpus >= plan.workers:
            return ""
        return (
            f"the plan is for {counted(plan.workers, 'GPU')}, and this machine has {gpus or 'none'}"
        )

    def _checked_job(self) -> Job:
        """The job, if this agent may carry it out.

        A profile or plan that comes with the lease was sent by another agent and names data and
        code of its own, so the rules are applied to its job too.

        Raises:
            JobError: The rules do not allow the job, or the profile is not of this job.
            Unable: The job cannot be read here, a package that it names is not installed, or the
                machine has too few GPUs.
        """
        try:
            job = change_job(Job(), self._lease.job.job)
        except JobError as error:  # the service could read it
            raise Unable(f"this agent cannot read it ({error})") from None
        for key in job.code_keys:
            text = getattr(job, key)
            with suppress(ImportError, ValueError):  # the verb says what is wrong with it
                if find_spec(text.partition(":")[0].partition(".")[0]) is None:
                    raise Unable(f"{key}={text}: its package is not installed here")
        workers = 0 if job.workers == "auto" or job.launcher.simulated else job.workers
        # With `device=cuda` the service has compared the two; a profile says which device it is.
        opened = job.device == "auto" and self._lease.profile is None
        gpus = self._offer.gpus if opened else 0
        if 0 < gpus < workers:
            raise Unable(f"workers={workers}, and this machine has {counted(gpus, 'GPU')}")
        documents = (self._lease.profile, self._lease.plan)
        for asked in (job, *(document.job for document in documents if document is not None)):
            problem = not_allowed(self._allow, asked)
            if problem:
                raise JobError(problem)
        if self._lease.profile is not None:
            problem = misfit(job, self._lease.profile.job)
            if problem:
                raise JobError(f"the profile that came with the job has {problem}")
        return job

    def _begin_folder(self, job: Job) -> None:
        """Write the job into its folder.

        Raises:
            Unable: The folder cannot be written, as on a full disk: no fault of the job's.
        """
        text, path = job_yaml(job), self._folder / "job.yaml"
        try:
            make_folder(self._folder / "logs")
            if not path.exists() or path.read_bytes() != text.encode():
                # Another job left the profile; there should be none.
                (self._folder / "profile.json").unlink(missing_ok=True)
            write_text(text, path)
        except (FileError, OSError) as error:
            raise Unable(one_line(error)) from None

    def _check_plan(self, plan: Plan) -> None:
        """Refuse a plan that trains otherwise than the one that its profile leads to here: another
        agent may have sent it, or another version made it before it was approved.

        Raises:
            JobError: The plan is another one, or came without a profile.
            VerbFailed: No plan can be made from the profile.
        """
        profile, made = self._lease.profile, self._folder / "made"
        if profile is None:
            raise JobError("the plan came without the profile that it was made from")
        make_folder(made)
        write_record(profile, made / "profile.json")
        own = self._plan(made / "profile.json", made / "plan.json")
        problem = other_choice(own, plan)
        if problem:
            raise JobError(
                f"the plan is not the one that its profile leads to: {problem}; if another version "
                "made it, submit the job again"
            )

    # ------------------------------------------------------------------------------- probe and plan

    def _make_plan(self, job: Job) -> Plan:
        """Probe unless there is a profile, plan, and send the service both documents."""
        profile_file, plan_file = self._folder / "profile.json", self._folder / "plan.json"
        if self._lease.profile is not None:
            write_record(self._lease.profile, profile_file)
        elif not profile_file.exists() or read_record(profile_file, Profile).trials_open:
            words = [str(self._folder / "job.yaml"), *code_words(job)]
            self._verb("probe", *words, "--out", str(profile_file))
            self._heartbeat.say(profile=read_record(profile_file, Profile))
        plan = self._plan(profile_file, plan_file)
        if plan.server is not None and not plan.job.launcher.simulated:
            # As `run` does: measure the two batch sizes side by side, and plan with that again.
            better = self._folder / "better.json"
            words = ["--profile", str(profile_file), "--points", "1", "--out", str(better)]
            try:
                self._verb("check", str(plan_file), *code_words(plan.job), *words)
            except VerbFailed as error:
                self._tell(f"the two batch sizes were not measured side by side: {error}")
            else:
                better.replace(profile_file)
                plan = self._plan(profile_file, plan_file)
        if not self._lease.job.auto:
            self._files.settle()  # the plan ends the lease, which a later heartbeat finds lost
        self._heartbeat.say("planned", profile=read_record(profile_file, Profile), plan=plan)
        return plan

    def _plan(self, profile: Path, out: Path) -> Plan:
        """Plan for this machine from a profile's file; the service makes the same plan of it."""
        keys = bounding_keys(read_record(profile, Profile)).items()
        words = [f"{key}={value}" for key, value in keys]
        self._verb("plan", str(profile), *words, "--out", str(out))
        return read_record(out, Plan)

    # ---------------------------------------------------------------------------------------- train

    def _train(self, plan: Plan) -> None:
        """Train, or go on with a training; nothing if the run has finished before."""
        self._files.restore(plan)
        if (self._run / "summary.json").exists():
            self._note_run()
            return
        words = ["--out", str(self._run), "--report-to", self._service.url]
        keeps = plan.server is not None or plan.job.launcher.simulated or bool(plan.growth)
        if self._follow_advice and not keeps:
            words.append("--follow-advice")
        if (self._run / "plan.json").exists():
            words = ["train", "--resume", *words]
        else:
            if self._run.exists():  # an agent was killed before there was anything to resume
                take(self._run, "another --folder").close()  # its verbs may still be ending
                shutil.rmtree(self._run)
            plan_file = self._folder / "plan.json"
            write_record(plan, plan_file)
            words = ["train", str(plan_file), *words]
        try:
            self._verb(*words, *code_words(plan.job))
        except VerbFailed as error:
            if not self._has_ended():
                raise
            self._tell(f"train failed after the end of the training: {error}")

    def _has_ended(self) -> bool:
        """Whether the run has trained to its end, so that nothing of it needs to be done again."""
        try:
            return read_record(self._run / "summary.json", RunSummary).ended
        except FileError:  # there is none yet, or a damaged one
            return False

    def _note_run(self) -> None:
        """Have the next heartbeat say which run carries out the job."""
        if self._heartbeat.run is not None:
            return
        try:
            report = read_report(self._run)
        except FileError:
            return
        self._heartbeat.run = report.run if report is not None else None

    def _note_progress(self) -> None:
        """Have the next heartbeat say how far the newest checkpoint is."""
        self._note_run()
        trained = self._progress.trained()
        if trained is not None:
            self._heartbeat.trained = trained

    def _send_rest(self) -> None:
        """Send what the service lacks of the run, and its end; waits for a service that is away."""
        self._note_run()
        backoff, report = Backoff(0.5, 10.0), self._report()
        while not (report.told and report.state == "finished"):
            sender = Sender(self._run, report, self._service, self._tell)
            try:
                sender.introduce()
                while sender.send_some():
                    self._heartbeat.check()
                sender.report_taken_advice()
                sender.end("finished", None)
            except ServiceError as error:
                if not error.passing:
                    raise BatchwrightError(f"the run is done and not reported: {error}") from None
                self._heartbeat.wait(backoff.seconds(error))
            finally:
                report = sender.report
                with suppress(FileError):  # the service knows what it has
                    write_report(self._run, report)
        self._heartbeat.run = report.run

    def _report(self) -> Report:
        """The run's report; a new one where a full disk took none, or a loss of power damaged it:
        nobody is here to remove it.
        """
        job, report = self._lease.job, None
        with suppress(FileError):
            report = read_report(self._run)
        return report or new_report(self._run, self._service.url, name=job.name, job=job.id)

    # ----------------------------------------------------------------------------------- processes

    def _verb(self, *words: str) -> None:
        """Run a verb to its end; raises `VerbFailed` or, after a limit was exceeded, `Unable`."""
        self._heartbeat.check()
        job = self._lease.job
        self._tell(f"{words[0]}: {job.name}")
        inherited = {key: value for key, value in os.environ.items() if key != REPORT_TO}
        own = {
            VERB_PARENT: str(os.getpid()),
            TOKEN: self._token,
            RUN_NAME: job.name,
            RUN_JOB: job.id,
        }
        environment = inherited | self._limits.environment(inherited) | own
        log = self._folder / "logs" / f"{words[0]}.log"
        with log.open("wb") as file:
            process = fork_server.start(VERBS, words, environment=environment, log=file)
            try:
                self._attend(process, training=words[0] == "train")
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        code = process.wait()
        if code:
            self._heartbeat.check()
            if self._exceeded:
                raise Unable(self._exceeded)
            raise VerbFailed(error_of(log, code, words[0]))

    def _attend(self, process: fork_server.Process, *, training: bool) -> None:
        """Wait for the end of a verb. Where the work is to end or the job has exceeded a limit, the
        verb is asked to stop, and killed if that takes too long.
        """
        kill_at: float | None = None
        look_at = 0.0
        while process.poll() is None:
            if training:
                self._note_progress()
            if time.monotonic() > look_at and not self._exceeded:
                self._exceeded = self._limits.exceeded(self._folder, self._began)
                look_at = time.monotonic() + LOOK_SECONDS
            if (self._heartbeat.ended or self._exceeded) and kill_at is None:
                process.send_signal(signal.SIGTERM)
                cancelled = self._heartbeat.cancelled or self._heartbeat.lost
                kill_at = time.monotonic() + (STOP_SECONDS if cancelled else LAST_SECONDS)
            if kill_at is not None and time.monotonic() > kill_at:
                process.kill()
            time.sleep(POLL_SECONDS)
        if training:
            self._note_progress()


class CheckpointProgress:
    """How many epochs the newest checkpoint of a run folder holds.

    Args:
        run: The run folder; it may not be there yet.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._seen: int | None = None  # when the newest checkpoint was written, in ns

    def trained(self) -> float | None:
        """Epochs in a checkpoint that was not seen before, in fractions too.

        Steps between the checkpoint and this call count as well, some at most.

        Returns:
            `None` where there is no newer checkpoint, or the newest lines do not name a step.
        """
        try:
            written = (self._run / "checkpoints" / "last.pt").stat().st_mtime_ns
        except OSError:
            return None
        if written == self._seen:
            return None
        self._seen = written
        return epochs_trained(self._run)


def code_words(job: Job) -> list[str]:
    """Words of the command line that name the code which the job runs; verbs want these repeated
    where the job came in a file.
    """
    named = {key: getattr(job, key) for key in ("data", "network", "loss")}
    return [f"{key}={value}" for key, value in named.items() if ":" in value]
