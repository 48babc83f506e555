"""Two hosts, made of network namespaces, under torchrun: one goes away and comes back."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from batchwright.records.documents import write_record
from test_session import make_tiny_plan

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
            if not (folder / "go").exists():
                time.sleep(0.8)
    if session.rank == 0:
        torch.save(model.weight.detach().flatten(), folder / "weights.pt")
"""


def command(*words, check=True):
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False)
    if check and done.returncode:
        pytest.skip(f"no network namespaces here: {done.stderr.strip()}")


class Host:
    """A network namespace with a host name and address of its own, in which an agent runs."""

    def __init__(self, letter, address, folder):
        self.letter, self.address, self.folder = letter, address, folder
        self.space = f"bw{letter}{os.getpid()}"
        self.card = f"bw{letter}{os.getpid()}"
        self.agent = None
        command("ip", "netns", "add", self.space)

    def connect(self):
        command("ip", "-n", self.space, "addr", "add", f"{self.address}/24", "dev", self.card)
        for device in ("lo", self.card):
            command("ip", "-n", self.space, "link", "set", device, "up")

    def start(self, first, workers):
        """Start an agent, with the rendezvous on the host ``first``."""
        torchrun = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2"),
            *("--nproc-per-node", str(workers), "--max-restarts", "5", "--monitor-interval", "0.2"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first.address}:29411"),
            *("--local-addr", self.address, "--rdzv-conf"),
            f"is_host={int(first is self)},last_call_timeout=2,keep_alive_interval=1",
            *(str(self.folder / "script.py"), str(self.folder)),
        ]
        named = f'hostname node-{self.letter}; exec "$@"'
        environment = os.environ | {
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "OMP_NUM_THREADS": "1",
        }
        environment.pop("GLOO_SOCKET_IFNAME", None)
        with (self.folder / f"{self.letter}.log").open("ab") as log:
            self.agent = subprocess.Popen(
                [
                    *("ip", "netns", "exec", self.space, "unshare", "--uts"),
                    *("sh", "-c", named, "sh", *torchrun),
                ],
                env=environment,
                stdout=log,
                stderr=log,
            )

    def kill(self):
        """End the agent and its workers at once, as a power cut would."""
        if self.agent is None or self.agent.poll() is not None:
            return
        for number in (self.agent.pid, *children(self.agent.pid)):
            os.kill(number, signal.SIGKILL)
        self.agent.wait()

    def remove(self):
        self.kill()
        command("ip", "netns", "del", self.space, check=False)


def children(parent):
    lists = Path(f"/proc/{parent}/task").glob("*/children")
    return [int(number) for path in lists for number in path.read_text().split()]


@pytest.fixture
def hosts(tmp_path):
    """Two hosts on one wire; the second one's address, and so its rank, comes first."""
    if sys.platform != "linux" or os.geteuid() or not shutil.which("ip"):
        pytest.skip("network namespaces need Linux, root and ip")
    made = []
    try:
        for letter, address in (("a", "10.77.0.2"), ("b", "10.77.0.1")):
            made.append(Host(letter, address, tmp_path))
        first, second = made
        command(
            *("ip", "link", "add", first.card, "netns", first.space, "type", "veth"),
            *("peer", "name", second.card, "netns", second.space),
        )
        for host in made:
            host.connect()
        yield made
    finally:
        for host in made:
            host.remove()


def wait_for(path, hosts, seconds=90):
    """Until a file is there; it is taken away, so that it can come again."""
    end = time.monotonic() + seconds
    while not path.exists():
        logs = "\n".join((path.parent / f"{host.letter}.log").read_text()[-3000:] for host in hosts)
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
    first.start(first, workers=2)
    second.start(first, workers=1)
    wait_for(tmp_path / "with-3", hosts)
    second.kill()
    wait_for(tmp_path / "with-2", hosts)
    (tmp_path / "with-3").unlink(missing_ok=True)
    second.start(first, workers=1)
    wait_for(tmp_path / "with-3", hosts)
    (tmp_path / "go").touch()
    assert [host.agent.wait(timeout=500) for host in hosts] == [0, 0]
    times = torch.load(tmp_path / "weights.pt") / (-0.1 / BATCH)
    assert torch.allclose(times, torch.full_like(times, EPOCHS), atol=1e-9)
