"""Two hosts, made of network namespaces, under torchrun: one goes away and comes back."""

from __future__ import annotations

import os
import queue
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import batchwright as bw
from batchwright.records import Profile, RunSummary
from batchwright.records.documents import read_record, write_record
from forked import Forked
from held_network import hold, release
from samples import with_keys
from test_session import make_tiny_plan

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # benchmarks are not installed
from benchmarks.cluster.hosts import epochs_in, lost_or_repeated  # noqa: E402
from benchmarks.harness import wire  # noqa: E402
from benchmarks.harness.loads import children  # noqa: E402
from benchmarks.harness.namespaces import (  # noqa: E402
    Host,
    NoHosts,
    command,
    hosts_apart,
    refuse_without_namespaces,
)

EPOCHS, SAMPLES, BATCH = 25, 60, 12

# Sample i is the i-th unit vector and the loss is the mean output: with plain SGD, weight i then
# counts how often sample i was trained, as far as the weights are kept.
SCRIPT = f"""
import sys, time
from pathlib import Path
import torch
from torch.utils.data import Dataset
import batchwright as bw
from batchwright.workload.optimizers import without_compiler

class OneHot(Dataset):
    def __len__(self):
        return {SAMPLES}

    def __getitem__(self, index):
        return torch.eye({SAMPLES}, dtype=torch.float64)[index], 0

folder = Path(sys.argv[1])
torch.set_num_threads(1)
model = torch.nn.Linear({SAMPLES}, 1, bias=False).double()
torch.nn.init.zeros_(model.weight)
optimizer = without_compiler(torch.optim.SGD)(model.parameters(), lr=0.1)  # starts sooner
with bw.Session(model, optimizer, OneHot(), plan=folder / "plan.json", run_folder=folder / "run",
                loaders=0) as session:
    for epoch in session.epochs():
        for features, _ in session.batches():
            session.step(model(features).mean())
            if session.rank == 0:
                (folder / f"with-{{session.world_size}}").touch()
            end = time.monotonic() + 3
            while not (folder / "go").exists() and time.monotonic() < end:
                time.sleep(0.05)
    if session.rank == 0:
        torch.save(model.weight.detach().flatten(), folder / "weights.pt")
"""


class ForkedHost(Host):
    """A host whose agents, and their workers, come from one process that has imported all."""

    said = ""

    def run(self, *words, environment):
        self.said = self.log()
        _, _, program, *more = map(str, words)  # python -m PROGRAM
        env = {**environment, "FORKED_ON": f"{self.space} node-{self.letter}"}
        self.agent = Forked(more, program=program, cwd=self.folder, env=env, prints=self.folder)

    def workers(self):
        """What the agent has forked, too: the process that forks its workers, and these."""
        here = super().workers()
        return [*here, *(one for each in here for one in children(each))]

    def log(self):
        return self.said + ("".join(self.agent.said()) if self.agent else "")


@pytest.fixture
def hosts(tmp_path, forks):
    """Two hosts on one wire; the second one's address, and so its rank, comes first."""
    made = []
    try:
        refuse_without_namespaces()
        for letter, address in (("a", "10.77.0.2"), ("b", "10.77.0.1")):
            made.append(ForkedHost(letter, address, tmp_path))
        first, second = made
        command(
            *("ip", "link", "add", first.card, "netns", first.space, "type", "veth"),
            *("peer", "name", second.card, "netns", second.space),
        )
        for host in made:
            host.connect()
        yield made
    except NoHosts as reason:
        pytest.skip(str(reason))
    finally:
        for host in made:
            host.remove()


def wait_for(path, hosts, seconds=300):
    """Until a file is there; it is taken away, so that it can come again."""
    end = time.monotonic() + seconds
    while not path.exists():
        logs = "\n".join(host.log()[-3000:] for host in hosts)
        assert time.monotonic() < end, logs
        assert hosts[0].agent.poll() is None, logs
        time.sleep(0.1)
    path.unlink()


@pytest.mark.slow
def test_a_host_that_goes_and_comes_back_costs_no_sample(hosts, tmp_path):
    """Two workers on one host and one on the other; then two alone; then three again."""
    first, second = hosts
    (tmp_path / "script.py").write_text(SCRIPT)
    plan = make_tiny_plan((4, 4, 4), epochs=EPOCHS, samples=SAMPLES, checkpoint_seconds=0.5)
    write_record(plan, tmp_path / "plan.json")
    script = (tmp_path / "script.py", tmp_path)
    first.start(first, 2, *script)
    second.start(first, 1, *script)
    wait_for(tmp_path / "with-3", hosts)
    second.kill()
    wait_for(tmp_path / "with-2", hosts)
    (tmp_path / "with-3").unlink(missing_ok=True)
    second.start(first, 1, *script)
    wait_for(tmp_path / "with-3", hosts)
    (tmp_path / "go").touch()
    assert [host.agent.wait(timeout=500) for host in hosts] == [0, 0]
    times = torch.load(tmp_path / "weights.pt") / (-0.1 / BATCH)
    assert torch.allclose(times, torch.full_like(times, EPOCHS), atol=1e-9)


RUN = (
    *("-m", "batchwright", "run", "data=digits", "probe.budget=1", "probe.learning=0"),
    *("global_batch=96", "precision=float32", "checkpoint_seconds=0.5", "--out", "run"),
)
SMALL = "network=held_network:network"


def wait_until(done, hosts, seconds=300):
    """Until something is so, while an agent lives."""
    end = time.monotonic() + seconds
    while not done():
        logs = "\n".join(host.log()[-3000:] for host in hosts)
        assert time.monotonic() < end, logs
        assert any(host.agent.poll() is None for host in hosts), logs
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dynamic-batch", "cyclic", "dual-batch"])
def test_every_method_trains_on_two_hosts_with_unequal_workers(hosts, tmp_path, cache, method):
    """Plain and hybrid do so in the test below."""
    for host, workers in zip(hosts, (2, 1), strict=True):
        # One kind, as the job says: what else runs here may slow down one of them throughout.
        words = (*RUN, SMALL, f"method={method}", "epochs=4", "probe.kind=cpu")
        host.start(hosts[0], workers, *words, nodes="2", XDG_CACHE_HOME=str(cache))
    codes = [host.agent.wait(timeout=500) for host in hosts]
    assert codes == [0, 0], [host.log()[-3000:] for host in hosts]
    trained_by_three(hosts, tmp_path / "run", method, epochs=4)


def trained_by_three(hosts, run, method, *, epochs):
    """Hold that a run is whole; the host whose address, and so whose rank, is first tells of it."""
    summary = read_record(run / "summary.json", RunSummary)
    assert (summary.plan.workers, summary.plan.method) == (3, method)
    assert not lost_or_repeated(summary, epochs=epochs)
    assert "held-out accuracy" in hosts[1].log()
    assert "held-out accuracy" not in hosts[0].log()


@pytest.mark.slow
@pytest.mark.parametrize(("method", "nodes"), [("plain", "1:2"), ("hybrid", "2")])
def test_a_run_goes_on_without_its_first_host_and_with_it_again(
    hosts, tmp_path, cache, method, nodes
):
    """The second host has rank 0, which writes, and the parameter server, if there is one."""
    first, second = hosts
    words = (*RUN, SMALL, f"method={method}", "epochs=8", "probe.kind=cpu")
    paths = os.pathsep.join([str(ROOT), *sys.path])

    def start(host, workers):
        own = {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": paths}
        host.start(first, workers, *words, nodes=nodes, **own)

    run = tmp_path / "run"
    hold(tmp_path, "run/checkpoints", 3)  # from the first step on, however few they are
    start(first, 2)
    start(second, 1)
    wait_until(lambda: (run / "checkpoints" / "last.pt").exists(), hosts)
    second.kill()
    if nodes == "1:2":
        here = epochs_in(run)
        hold(tmp_path, "run/checkpoints", 0.3)
        wait_until(lambda: epochs_in(run) > here + 1, [first])
    hold(tmp_path, "run/checkpoints", 3)
    (tmp_path / "with-3").unlink()  # which was built to be probed
    start(second, 1)
    wait_for(tmp_path / "with-3", hosts)
    release(tmp_path)
    codes = [host.agent.wait(timeout=500) for host in hosts]
    assert codes == [0, 0], [host.log()[-3000:] for host in hosts]
    trained_by_three(hosts, run, method, epochs=8)


NETWORK = """
import socket
from batchwright.workload.networks import resnet8
from benchmarks.harness.loads import Slowdown

def network(**keys):
    made = resnet8(**keys)
    if socket.gethostname() == "node-b":
        Slowdown(made, 12.0)  # told apart however long a core is waited for, too
    return made
"""


IMPATIENT = """
import torch.distributed as dist
from batchwright.__main__ import entry

join = dist.init_process_group
# Gloo tries to connect for five times as long.
dist.init_process_group = lambda *a, timeout, **how: join(*a, timeout=timeout / 30, **how)
entry()
"""


def close_all_ports_but(port, host):
    """Let no answer out of a host but from one port, without a word, as a firewall does."""
    rule = ("ip", "-n", host.space, "rule", "add", "pref")
    command(*rule, 100, "sport", port, "lookup", "main")
    command(*rule, 101, "to", f"{host.address}/24", "lookup", 77)
    command("ip", "-n", host.space, "route", "add", "blackhole", "default", "table", 77)


@pytest.mark.slow
def test_ports_that_a_firewall_closes_end_the_run_in_time_with_what_to_open(hosts, tmp_path, cache):
    """The two meet at the one that is open; what they exchange goes by others."""
    port, program = 29411, tmp_path / "impatient.py"
    program.write_text(IMPATIENT)
    close_all_ports_but(port, hosts[1])
    own = {k: v for k, v in os.environ.items() if k != "GLOO_SOCKET_IFNAME"}
    for rank, host in enumerate(reversed(hosts)):
        place = {"SLURM_PROCID": rank, "SLURM_NODEID": rank, "SLURM_LOCALID": 0, "SLURM_JOB_ID": 1}
        step = {"ID": 0, "NUM_TASKS": 2, "NODELIST": "n[1-2]", "TASKS_PER_NODE": "1(x2)"}
        said = place | {f"SLURM_STEP_{name}": value for name, value in step.items()}
        said |= {"MASTER_ADDR": hosts[1].address, "MASTER_PORT": port, "XDG_CACHE_HOME": cache}
        said = {name: str(value) for name, value in said.items()}
        words = ("-m", program, *RUN[2:], "timeout=60")
        host.run(sys.executable, *words, environment={**own, **said})
    codes = [host.agent.wait(timeout=500) for host in hosts]
    logs = "\n".join(host.log() for host in hosts)
    assert all(codes), logs
    (line,) = [line for line in logs.splitlines() if line.startswith("error: ")]
    assert f"has met the others at {hosts[1].address}:{port}, so that port is open" in line
    assert "(node-" in line
    assert "Traceback" not in logs


@pytest.mark.slow
def test_a_launcher_that_says_nothing_of_hosts_starts_a_run_on_two(hosts, tmp_path, cache):
    """As many do that are not torchrun: on their loopback interfaces these two would never meet."""
    program = tmp_path / "impatient.py"
    program.write_text(IMPATIENT)
    told = ("GLOO_SOCKET_IFNAME", "LOCAL_WORLD_SIZE")
    own = {k: v for k, v in os.environ.items() if k not in told}
    for rank, host in enumerate(reversed(hosts)):
        said = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0}
        said |= {"MASTER_ADDR": hosts[1].address, "MASTER_PORT": 29411, "XDG_CACHE_HOME": cache}
        said = {name: str(value) for name, value in said.items()}
        words = ("-m", program, *RUN[2:], SMALL, "epochs=2", "timeout=60")
        host.run(sys.executable, *words, environment={**own, **said})
    codes = [host.agent.wait(timeout=500) for host in hosts]
    assert codes == [0, 0], [host.log()[-3000:] for host in hosts]
    summary = read_record(tmp_path / "run" / "summary.json", RunSummary)
    assert summary.plan.workers == 2
    assert not lost_or_repeated(summary, epochs=2)


@pytest.mark.slow
def test_hosts_of_two_speeds_get_batches_of_their_own_from_one_run(hosts, tmp_path, cache):
    """The slower one has rank 0; both have the same processor."""
    (tmp_path / "slower.py").write_text(NETWORK)
    more = {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    words = (
        *with_keys(RUN, "probe.budget=20"),
        "network=slower:network",
        "method=plain",
        "epochs=2",
    )
    for host in hosts:
        host.start(hosts[0], 1, *words, nodes="2", **more)
    codes = [host.agent.wait(timeout=500) for host in hosts]
    assert codes == [0, 0], [host.log()[-3000:] for host in hosts]
    assert "a plan gives each kind a batch of its own" in hosts[1].log()
    summary = read_record(tmp_path / "run" / "summary.json", RunSummary)
    fast, slow = summary.plan.kinds
    assert (fast.count, slow.count, slow.kind) == (1, 1, f"{fast.kind} (node-b)")
    # Which share is how large is up to what else runs here, and held by plans from made-up times.
    planned = bw.load(tmp_path / "run" / "plan.json").stages[0].local_batch_sizes
    assert summary.plan.stages[0].local_batch_sizes == planned[::-1]
    assert sum(planned) == 96
    assert not summary.plan.considered[0].assumed
    assert not lost_or_repeated(summary, epochs=2)


DELAY, BANDWIDTH = 2e-3, 25e6  # seconds; bytes per second, 200 Mbit


@pytest.fixture
def apart(tmp_path, forks):
    """Two hosts with a wire between them that takes its time."""
    here = {"delay": DELAY, "bandwidth": BANDWIDTH, "kind": ForkedHost}
    try:
        with hosts_apart(tmp_path, **here) as made:
            yield made
    except NoHosts as reason:
        pytest.skip(str(reason))


@pytest.mark.slow
def test_the_network_between_hosts_is_measured_and_planned_with(apart, tmp_path, cache):
    """Nothing is quicker than the wire; how much slower it looks is up to what else runs here."""
    words = ("-m", "batchwright", "probe", "data=digits", "probe.budget=2", "probe.learning=0")
    for host in apart:
        # One kind, however long one of them waits for a core.
        more = ("global_batch=96", "precision=float32", "probe.kind=cpu", "--out", "profile.json")
        host.start(apart[0], 1, *words, *more, nodes="2", XDG_CACHE_HOME=str(cache))
    codes = [host.agent.wait(timeout=500) for host in apart]
    assert codes == [0, 0], [host.log()[-3000:] for host in apart]
    profile = read_record(tmp_path / "profile.json", Profile)
    (link,) = profile.links
    assert link.between == "hosts"
    assert 0.9 * DELAY < link.latency < 50 * DELAY
    assert BANDWIDTH / 50 < link.bandwidth < 1.1 * BANDWIDTH
    # All hosts together were measured; more of them are predicted by the network's figures.
    assert not bw.plan(profile).considered[0].assumed
    more = bw.plan(profile, ["workers=4"])
    assert {one.assumed for one in more.considered if one.workers == 4} == {True}
    assert more.job.link.latency == link.latency
    assert "from the measured link" in " ".join(more.explain().split())


def test_a_host_whose_partner_is_gone_answers_no_longer(monkeypatch):
    said = queue.SimpleQueue()
    monkeypatch.setattr(wire, "print", lambda *words, **_: said.put(words), raising=False)
    with ThreadPoolExecutor() as pool:
        answering = pool.submit(wire.ping_pong, 1000, True, "127.0.0.1", 0)
        _, port = said.get(timeout=500)
        with socket.create_connection(("127.0.0.1", port)) as line:
            line.sendall(bytes(10))
        with pytest.raises(OSError, match="gone"):
            answering.result(500)
