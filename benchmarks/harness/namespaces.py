"""Hosts made of network namespaces of this machine, with torchrun on each."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.harness.benchmark import ROOT
from benchmarks.harness.loads import children

_BURST_BYTES, _QUEUE = 20_000, "400ms"  # for `tc tbf`: two packets at once, and the longest queue
_PACKET_BYTES = 9000  # large, as the wire's work grows with the number of packets


class NoHosts(RuntimeError):  # noqa: N818 - what there is not
    """Network namespaces are not available; the message says why."""


def command(*words: object) -> None:
    """Run a command.

    Raises:
        NoHosts: The command failed.
    """
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoHosts(f"no network namespaces here: {done.stderr.strip()}")


class Host:
    """A network namespace with its own host name and address, in which a torchrun agent runs.

    Args:
        letter: The host's name is ``node-`` and this letter.
        address: IPv4 address of its network card.
        folder: Working folder of its commands, and of their logs; hosts may share it.
        core: The only core that it may use; ``None``: all cores.

    Raises:
        NoHosts: The namespace cannot be made.
    """

    def __init__(self, letter: str, address: str, folder: Path, core: int | None = None) -> None:
        self.letter, self.address, self.folder, self._core = letter, address, folder, core
        self.space = self.card = f"bw{letter}{os.getpid()}"
        self.agent: subprocess.Popen[bytes] | None = None
        command("ip", "netns", "add", self.space)

    def connect(self) -> None:
        """Bring up the host's network card, which must exist."""
        command("ip", "-n", self.space, "addr", "add", f"{self.address}/24", "dev", self.card)
        for device in ("lo", self.card):
            command("ip", "-n", self.space, "link", "set", device, "up")

    def limit(self, bandwidth: float) -> None:
        """Limit the host to sending ``bandwidth`` bytes per second."""
        command(
            *("ip", "netns", "exec", self.space, "tc", "qdisc", "add", "dev", self.card, "root"),
            *("tbf", "rate", f"{int(8 * bandwidth)}bit"),
            *("burst", _BURST_BYTES, "latency", _QUEUE),
        )

    def start(
        self, first: Host, workers: int, *words: object, nodes: str = "1:2", **more: str
    ) -> None:
        """Start an agent of torchrun.

        Args:
            first: The host of the rendezvous.
            workers: Number of workers on this host.
            words: Arguments of Python, such as a script and its arguments.
            nodes: torchrun's ``--nnodes``.
            more: Further environment variables.
        """
        torchrun = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes),
            *("--nproc-per-node", str(workers), "--max-restarts", "5", "--monitor-interval", "0.2"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first.address}:29411"),
            *("--local-addr", self.address, "--rdzv-conf"),
            f"is_host={int(first is self)},last_call_timeout=2,keep_alive_interval=1",
            *map(str, words),
        ]
        environment = {
            **os.environ,
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "OMP_NUM_THREADS": "1",
            **more,
        }
        environment.pop("GLOO_SOCKET_IFNAME", None)
        self.run(*torchrun, environment=environment)

    def run(self, *words: object, environment: dict[str, str]) -> None:
        """Start a command on this host; its output goes to a file named by the host's letter."""
        with (self.folder / f"{self.letter}.log").open("ab") as log:
            self.agent = self.popen(*words, env=environment, stdout=log, stderr=log)

    def popen(self, *words: object, **options: Any) -> subprocess.Popen[Any]:
        """Start a process on this host, in its folder."""
        core = [] if self._core is None else ["taskset", "--cpu-list", str(self._core)]
        named = f'hostname node-{self.letter}; exec "$@"'
        return subprocess.Popen(
            [
                *("ip", "netns", "exec", self.space, "unshare", "--uts"),
                *("sh", "-c", named, "sh", *core, *map(str, words)),
            ],
            cwd=self.folder,
            **options,
        )

    def log(self) -> str:
        """The output of this host's commands."""
        path = self.folder / f"{self.letter}.log"
        return path.read_text() if path.exists() else ""

    def workers(self) -> list[int]:
        """Process numbers of the workers that the agent has started."""
        return children(self.agent.pid) if self.agent is not None else []

    def kill(self) -> None:
        """Kill the agent and its workers at once, like a power cut."""
        if self.agent is None or self.agent.poll() is not None:
            return
        for number in (self.agent.pid, *self.workers()):
            with suppress(ProcessLookupError):  # a worker ends with its agent
                os.kill(number, signal.SIGKILL)
        self.agent.wait()

    def remove(self) -> None:
        """Kill the host's processes, and remove the namespace."""
        self.kill()
        with suppress(NoHosts):
            command("ip", "netns", "del", self.space)


@contextmanager
def hosts_apart(
    folder: Path,
    count: int = 2,
    *,
    delay: float,
    bandwidth: float,
    cores: Sequence[int] = (),
    kind: type[Host] = Host,
) -> Iterator[list[Host]]:
    """Inside, hosts with a slow network between them.

    Args:
        folder: Working folder of all hosts.
        count: Number of hosts.
        delay: Delay of a packet in one direction, in seconds; `wire.ping_pong` measures the actual
            delay.
        bandwidth: Bandwidth of each host in one direction, in bytes per second.
        cores: Cores that the hosts get in turn, one each; empty: all hosts use all cores.
        kind: Class of the hosts; tests have one whose programs are forked.

    Raises:
        NoHosts: They cannot be made here.
    """
    refuse_without_namespaces()
    for needed in ("/dev/net/tun", shutil.which("tc") or "tc"):
        if not Path(needed).exists():
            raise NoHosts(f"a slow network between hosts needs {needed}: apt-get install iproute2")
    with ExitStack() as made:
        hosts = []
        for number in range(count):
            core = cores[number % len(cores)] if cores else None
            host = kind("abcdefgh"[number], f"10.78.0.{number + 1}", folder, core)
            made.callback(host.remove)
            hosts.append(host)
        wire = subprocess.Popen(
            [
                *(sys.executable, "-m", "benchmarks.harness.wire", str(delay)),
                *(f"{host.card}={host.address}" for host in hosts),
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        made.enter_context(wire)
        made.callback(wire.kill)
        assert wire.stdout is not None
        if wire.stdout.readline() != "ready\n":
            raise NoHosts("hosts with a slow network between them need /dev/net/tun and root")
        for host in hosts:
            command("ip", "link", "set", host.card, "mtu", _PACKET_BYTES, "netns", host.space)
            host.connect()
            host.limit(bandwidth)
        yield hosts


def refuse_without_namespaces() -> None:
    """Raise if network namespaces cannot be made here.

    Raises:
        NoHosts: They cannot; the message says what is needed.
    """
    if sys.platform != "linux" or os.geteuid() or not shutil.which("ip"):
        raise NoHosts("network namespaces need Linux, root and ip: apt-get install iproute2")
