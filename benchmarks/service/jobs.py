"""Jobs under disturbances, and with a long history; part of `benchmarks.service.service`.

Jobs lost or doubled: four agents, each behind a proxy of its own, carry out 200 jobs. A stand-in
replaces their training: four epochs with a checkpoint after each. Meanwhile, disturbances are drawn
at random: an agent is cut off for longer than a lease; an agent, or the service, is killed and
started again; the service's wall clock jumps by hours; its database is locked for longer than a
lease. Counted are jobs that are not done at the end, jobs that were done twice, and jobs that
trained an epoch again that had its checkpoint.

A long history: 100,000 ended jobs, and 200 agents of which half have a job. The page of jobs, the
lists behind it over the API, and an agent's request for a job are timed 20 times each; of page and
lists, the one that is slowest by its median counts.
"""

from __future__ import annotations

import os
import random
import select
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import httpx
from sqlalchemy import insert
from sqlalchemy import select as query

from batchwright.client.http import TOKEN
from batchwright.client.http import Service as Client
from batchwright.client.submitting import submit
from batchwright.planning.planner import make_plan
from batchwright.records import Job, Profile
from batchwright.records.documents import write_record
from batchwright.records.service import AgentIntroduction, JobProgress
from batchwright.service.access import cookie_name
from batchwright.service.database.tables import audit
from batchwright.service.database.tables import jobs as stored
from batchwright.service.job_states import Standing
from batchwright.service.pages.demo import demo
from batchwright.service.settings import Settings
from batchwright.service.store import Store
from batchwright.service.store.job_rows import columns_of
from benchmarks.harness.benchmark import ROOT, say
from benchmarks.harness.figures import Figure
from benchmarks.harness.loads import until
from benchmarks.service.service_process import Service, end, make_tokens
from benchmarks.service.stand_in_verbs import EPOCHS

AGENTS, LOOKS = 4, 20
LEASE_SECONDS, KEEP_SECONDS = 5.0, 120.0
OVER_A_LEASE = (6.0, 9.0)
PAUSE_SECONDS = (0.0, 0.5)
PATIENCE_SECONDS = 60.0  # for the remaining jobs once the disturbances have ended

FIGURES = (
    Figure("jobs_lost_or_doubled", "jobs", "mean", "jobs that were not done, done twice, or partly "
           "trained twice: four agents, lost connections, kills, clock jumps, locked database",
           at_most=0),
    Figure("jobs_page_ms", "ms", "median", "time of the page of jobs or of the lists behind it, "
           "100,000 ended jobs and 200 agents", at_most=50),
    Figure("lease_ms", "ms", "median", "time of an agent's request for a job, 100,000 ended jobs "
           "and 200 agents", at_most=50),
)  # fmt: skip


class Extent(NamedTuple):
    """How much is measured."""

    jobs: int
    history: int
    agents: int


EXTENTS = {False: Extent(20, 10_000, 50), True: Extent(200, 100_000, 200)}
"""What --quick and --full measure."""


class Counts(NamedTuple):
    """Jobs by the way in which they went wrong, and how often each disturbance happened."""

    lost: list[str]
    done_twice: list[str]
    trained_twice: list[str]
    happened: dict[str, int]

    @property
    def wrong(self) -> int:
        """Jobs lost or doubled."""
        return len({*self.lost, *self.done_twice, *self.trained_twice})


def measure(full: bool, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measure all figures of jobs, and return them with the measurements behind them."""
    extent = EXTENTS[full]
    say(f"{extent.jobs} jobs and {AGENTS} agents under disturbances")
    counts = disturbed(extent.jobs, folder / "disturbed")
    say(f"{extent.history} ended jobs, {extent.agents} agents")
    looks = full_history(extent, folder / "history")
    slowest = max((name for name in looks if name != "lease"), key=lambda name: median(looks[name]))
    value = FIGURES[0].made(counts.wrong, counts.wrong, counts.wrong, extent.jobs)
    found = {"jobs_lost_or_doubled": value, "lease_ms": looks["lease"]}
    return found | {"jobs_page_ms": looks[slowest]}, {"jobs": counts._asdict(), "job_looks": looks}


# --------------------------------------------------------------------------------------- disturbed


class Wire:
    """A proxy between an agent and the service, which forwards unless it is cut."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.cut = False
        self._ended = False
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        self._ended = True
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while not self._ended:
                near, _ = self._listener.accept()
                threading.Thread(target=self._forward, args=(near,), daemon=True).start()

    def _forward(self, near: socket.socket) -> None:
        with near, suppress(OSError):
            if self.cut:
                return
            with socket.create_connection(("127.0.0.1", self._port), timeout=5) as far:
                other = {near: far, far: near}
                while not self._ended:
                    for ready in select.select([near, far], [], [], 0.2)[0]:
                        content = ready.recv(65536)
                        while self.cut and not self._ended:
                            time.sleep(0.05)  # sent bytes are held back, as by a lost route
                        if not content:
                            return
                        other[ready].sendall(content)


class Agent:
    """An agent's process, which can be started again in the same folder."""

    def __init__(self, port: int, folder: Path, environment: dict[str, str]) -> None:
        self.wire = Wire(port)
        self._folder, self._environment = folder, environment
        folder.mkdir(parents=True)
        self.start()

    def start(self) -> None:
        """Start the process."""
        words = ["-m", "benchmarks.service.job_agent", self.wire.url, str(self._folder)]
        with (self._folder / "agent.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *words],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
            )

    def kill(self) -> None:
        """Kill the process, and with it all processes that it started."""
        end(self.process, signal.SIGKILL)

    def close(self) -> None:
        """Kill the process and close its proxy."""
        self.kill()
        self.wire.close()


class Scene:
    """The service and its agents, with a method for each disturbance."""

    def __init__(
        self, service: Service, agents: list[Agent], database: Path, step: Path, draws: Any
    ) -> None:
        self.service, self.agents = service, agents
        self._database, self._step, self._draws = database, step, draws
        self._killed: Agent | None = None

    def cut_off(self) -> None:
        """Cut an agent off for longer than a lease."""
        wire = self._draws.choice(self.agents).wire
        wire.cut = True
        time.sleep(self._draws.uniform(*OVER_A_LEASE))
        wire.cut = False

    def kill_agent(self) -> None:
        """Kill an agent and start it again."""
        # Never the same agent twice in a row: its job would seem to kill its agents.
        agent = self._draws.choice([one for one in self.agents if one is not self._killed])
        self._killed = agent
        agent.kill()
        time.sleep(self._draws.uniform(0, 2))
        agent.start()

    def kill_service(self) -> None:
        """Kill the service and start it again."""
        self.service.kill()
        time.sleep(self._draws.uniform(0, 2))
        self.service.start()

    def step_clock(self) -> None:
        """Set the service's wall clock off by hours, either way."""
        self._step.write_text(str(self._draws.uniform(-9000, 9000)), encoding="utf-8")

    def lock_database(self) -> None:
        """Lock the database for longer than a lease."""
        with closing(sqlite3.connect(self._database, timeout=30, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            time.sleep(self._draws.uniform(*OVER_A_LEASE))
            other.execute("ROLLBACK")


DISTURBANCES = (
    Scene.cut_off,
    Scene.kill_agent,
    Scene.kill_service,
    Scene.step_clock,
    Scene.lock_database,
)


def disturbed(count: int, folder: Path, seed: int = 0) -> Counts:
    """Carry out ``count`` jobs under disturbances, until all have ended."""
    folder.mkdir()
    made, step = folder / "made", folder / "step"
    made.mkdir()
    (made / "ledger").touch()
    step.write_text("0", encoding="utf-8")
    profile = Profile.model_validate(demo()["introduction"]["profile"])
    write_record(profile, made / "profile.json")
    write_record(make_plan([profile]), made / "plan.json")
    (made / "summary.json").write_text("{}", encoding="utf-8")
    database = folder / "service.sqlite"
    (token,) = make_tokens(f"sqlite:///{database}", 1, ("read", "report", "submit"))
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, TOKEN: token, "STAND_IN": str(made), "PYTHONPATH": path}
    words = ("--lease-seconds", str(LEASE_SECONDS), "--keep-seconds", str(KEEP_SECONDS))
    draws, happened = random.Random(seed), Counter[str]()
    with ExitStack() as held:
        stepped = {"module": "benchmarks.service.stepped_service", "STEP_FILE": str(step)}
        service = held.enter_context(
            Service(f"sqlite:///{database}", folder, *words, "--rate", "10000", **stepped)
        )
        agents = [Agent(service.port, folder / f"agent-{n}", environment) for n in range(AGENTS)]
        for agent in agents:
            held.callback(agent.close)
        client = held.enter_context(Client(service.url, token))
        jobs = [submit(client, profile.job, name=f"job {n}", auto=True).id for n in range(count)]
        scene = Scene(service, agents, database, step, draws)
        while len(done_jobs(database)) < count:
            disturbance = draws.choice(DISTURBANCES)
            disturbance(scene)
            happened[disturbance.__name__] += 1
            time.sleep(draws.uniform(*PAUSE_SECONDS))
            if sum(happened.values()) > 10 * count:  # a job that never ends is lost
                break
        until(lambda: len(done_jobs(database)) == count, PATIENCE_SECONDS)
    return counts_of(jobs, database, made / "ledger", dict(happened))


def done_jobs(database: Path) -> set[str]:
    """Identifiers of the jobs that have ended."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=30)) as connection:
        rows = connection.execute("SELECT id FROM jobs WHERE ended IS NOT NULL").fetchall()
    return {row[0] for row in rows}


def counts_of(jobs: list[str], database: Path, ledger: Path, happened: dict[str, int]) -> Counts:
    """Count wrong jobs by the database, its audit log and the ledger of trained epochs."""
    store = Store.open(Settings(database=f"sqlite:///{database}"))
    try:
        with store.database.reading() as connection:
            of_jobs = connection.execute(query(stored.c.id, stored.c.state))
            states = {row.id: row.state for row in of_jobs}
            said = query(audit.c.subject, audit.c.detail).where(audit.c.action == "job.done")
            ends = {(row.subject, row.detail) for row in connection.execute(said)}
    finally:
        store.close()
    by_job = Counter(job for job, _ in ends)  # by distinct agents: one may repeat its last word
    lines = (line.split() for line in ledger.read_text(encoding="utf-8").splitlines())
    epochs = Counter((job, epoch) for job, epoch, _ in lines)
    trained = Counter(job for job, _ in epochs)
    return Counts(
        lost=[job for job in jobs if states.get(job) != "done" or trained[job] != EPOCHS],
        done_twice=[job for job, times in by_job.items() if times > 1],
        trained_twice=sorted({job for (job, _), times in epochs.items() if times > 1}),
        happened=happened,
    )


# ----------------------------------------------------------------------------------- a full history


def full_history(extent: Extent, folder: Path) -> dict[str, list[float]]:
    """Milliseconds of each request, by its name."""
    folder.mkdir()
    database = f"sqlite:///{folder}/service.sqlite"
    store = Store.open(Settings(database=database))
    try:
        fill(store, extent)
        token = store.tokens.create("benchmark", ["read", "report"])
        session = store.sign_in.enter(store.sign_in.link(["read"]))
    finally:
        store.close()
    cookie = cookie_name(Settings(database=database))
    api, browser = {"authorization": f"Bearer {token}"}, {"cookie": f"{cookie}={session}"}
    asked = {
        "page": ("GET", "/jobs", browser),
        "jobs": ("GET", "/v1/jobs", api),
        "those done": ("GET", "/v1/jobs?state=done", api),
        "agents": ("GET", "/v1/agents", api),
        "lease": ("POST", "/v1/agents/agent-1/lease", api),
    }
    looks: dict[str, list[float]] = {name: [] for name in asked}
    with (
        Service(database, folder) as service,
        httpx.Client(base_url=service.url, timeout=60, trust_env=False) as client,
    ):
        for _ in range(LOOKS):
            for name, (method, path, headers) in asked.items():
                before = time.perf_counter()
                answer = client.request(method, path, headers=headers)
                looks[name].append(1000 * (time.perf_counter() - before))
                answer.raise_for_status()
    return looks


def fill(store: Store, extent: Extent) -> None:
    """Store ended jobs, agents of which every other has a job, and jobs that no agent accepts."""
    job = Job.model_validate(demo()["introduction"]["profile"]["job"])
    now = store.clock()
    ended = columns_of(Standing(state="done", auto=True, attempts=1))
    common = {"name": "a job", "owner": "benchmark", "job": job.model_dump_json()}
    for first in range(0, extent.history, 1000):
        rows = [
            {
                **common,
                **ended,
                "id": str(uuid.uuid4()),
                "agent": f"agent-{number % extent.agents}",
                "created": now - 2e6 + number,
                "changed": now - 1e6 + number,
                "ended": now - 1e6 + number,
            }
            for number in range(first, first + 1000)
        ]
        with store.database.writing() as connection:
            connection.execute(insert(stored), rows)
    for number in range(extent.agents):
        introduction = AgentIntroduction(name=f"agent-{number}", allow=())
        store.agents.introduce(introduction, "benchmark")
        if number % 2 == 0:
            store.jobs.submit("a job", job, auto=True, owner="benchmark")
            lease = store.jobs.lease(f"agent-{number}")
            assert lease is not None
            store.jobs.progress(lease.job.id, JobProgress(key=lease.key))
    for _ in range(extent.agents):
        other = job.model_copy(update={"network": "torchvision.models:resnet50"})
        store.jobs.submit("waits", other, auto=True, owner="benchmark")
