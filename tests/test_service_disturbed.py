"""Whatever happens in which order: no job is lost, and no training is thrown away."""

from __future__ import annotations

import random
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.service.jobs import disturbed  # noqa: E402

from batchwright.records import Job  # noqa: E402
from batchwright.records.service import AgentIntroduction, JobProgress  # noqa: E402
from batchwright.service.problems import Conflict  # noqa: E402
from batchwright.service.settings import Settings  # noqa: E402
from batchwright.service.store import Store  # noqa: E402
from samples import make_plan  # noqa: E402
from services import HandClock, leave_unsynced  # noqa: E402

PLAN = make_plan()
AGENTS, JOBS, EPOCHS = 4, 12, 5
OUTAGES = (20.0, 40.0, 200.0)  # seconds, below and above those of a lease, below those of keeping


class World:
    """A service, its clocks, agents with their folders, and what was trained."""

    def __init__(self, folder, seed):
        self.draw = random.Random(seed)
        self.database = f"sqlite:///{folder}/service.sqlite"
        self.wall, self.steady = HandClock(), HandClock(0.0)
        self.store = self.opened()
        self.ledger = Counter()
        self.ends = Counter()
        self.agents = [Agent(self, f"agent {number}") for number in range(AGENTS)]
        self.jobs = [
            self.store.jobs.submit("a", Job(), auto=True, owner="me").id for _ in range(JOBS)
        ]

    def opened(self):
        settings = Settings(database=self.database)
        store = leave_unsynced(Store.open(settings, self.wall, self.steady))
        store.jobs.tick()
        return store

    def go(self, seconds):
        self.wall.go(seconds)
        self.steady.go(seconds)

    def round(self):
        """A second in which everybody who can does something, in any order."""
        self.go(1.0)
        self.store.jobs.tick()
        for agent in self.draw.sample(self.agents, AGENTS):
            agent.act()

    def disturb(self):
        match self.draw.choice(("cut", "cut", "kill", "restart", "jump", "lock", "lost")):
            case "cut":
                self.draw.choice(self.agents).cut_until = self.steady() + self.draw.choice(OUTAGES)
            case "kill":
                self.draw.choice(self.agents).kill()
            case "restart":
                self.store.close()
                self.go(self.draw.choice(OUTAGES))
                self.store = self.opened()
            case "jump":
                self.wall.go(self.draw.uniform(-1e5, 1e5))
            case "lock":  # nobody's words are taken in, and trainings go on
                for _ in range(34):
                    self.go(1.0)
                    for agent in self.agents:
                        agent.train()
            case "lost":
                self.draw.choice(self.agents).deaf = 3

    def done(self):
        return all(self.store.jobs.get(job).state == "done" for job in self.jobs)


class Agent:
    """Asks, trains and tells, as `client.agent` does; its folder survives it."""

    def __init__(self, world, name):
        self.world, self.name = world, name
        self.folder = Counter()  # epochs by job
        self.cut_until, self.deaf = 0.0, 0
        self.further = False  # since it was killed last
        self.begin()

    def begin(self):
        self.lease, self.trains = None, False
        introduction = AgentIntroduction(name=self.name, allow=())
        self.world.store.agents.introduce(introduction, "me")

    def kill(self):
        """Not three times at one place: then it would be the job that kills."""
        if self.further:
            self.further = False
            self.begin()

    def act(self):
        self.train()
        if self.world.steady() < self.cut_until:
            return
        heard, self.deaf = self.deaf == 0, max(0, self.deaf - 1)
        store = self.world.store
        if self.lease is None:
            lease = store.jobs.lease(self.name)
            if heard and lease is not None:
                self.lease = lease
                self.say(True)
            return
        job = self.lease.job.id
        if self.trains and self.folder[job] < EPOCHS:
            self.say(heard, trained=float(self.folder[job]))
        elif self.trains:
            if self.say(heard, "done", trained=float(EPOCHS)):
                self.world.ends[job] += 1
                self.lease, self.trains = None, False
        elif self.lease.job.state == "training" or self.say(heard, "planned", plan=PLAN):
            self.trains = self.say(heard, "training")

    def say(self, heard, state=None, **told):
        """Whether the answer came, and was no refusal: after one it stops."""
        progress = JobProgress(key=self.lease.key, state=state, **told)
        try:
            self.world.store.jobs.progress(self.lease.job.id, progress)
        except Conflict:
            if heard:
                self.lease, self.trains = None, False
            return False
        return heard

    def train(self):
        """An epoch now and then, cut off or not."""
        if self.trains and self.world.draw.random() < 0.1:
            job = self.lease.job.id
            if self.folder[job] < EPOCHS:
                self.world.ledger[job, self.folder[job]] += 1
                self.folder[job] += 1
                self.further = True


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_in_any_order_of_misfortunes_every_job_is_done_once_and_every_epoch_trained_once(
    tmp_path, seed
):
    world = World(tmp_path, seed)
    for number in range(1500):
        world.round()
        if number < 600 and world.draw.random() < 0.06:
            world.disturb()
        if number % 50 == 0 and world.done():
            break
    told = [world.store.jobs.get(job) for job in world.jobs]
    assert {one.state for one in told} == {"done"}, [(one.state, one.error) for one in told]
    assert set(world.ledger.values()) == {1}, "an epoch was trained again"
    assert len(world.ledger) == JOBS * EPOCHS
    assert all(count == 1 for count in world.ends.values())
    world.store.close()


@pytest.mark.slow
def test_the_same_with_real_processes(tmp_path):
    """Cut off, killed, restarted, under a clock that jumps and a database that is locked."""
    counts = disturbed(8, tmp_path / "disturbed", seed=1)
    assert counts.wrong == 0, counts
