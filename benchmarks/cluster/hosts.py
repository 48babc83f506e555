"""Two and four hosts on one machine: is their network measured, are steps predicted, is a run safe?

Hosts are network namespaces, each with one worker on one core (four hosts share two cores) and a
torchrun of its own. Between them is a link with a delay (`benchmarks.harness.wire`, in Python: not
every kernel has netem) and a bandwidth (`tc tbf`).

Network (`link_error`): latency and bandwidth of the profile against those of a plain socket over
the same link, measured before and after the probe; the largest error counts. The socket's latency
is half of a byte's round trip, its bandwidth comes from the difference between two large messages.
`wire_late` is the socket's latency over the delay that the link was set to.

Steps (`two_host_step_error`, `four_host_step_error`): `resnet8` on scikit-learn's digits is probed
by all hosts together (8 s) and planned, and steps that were not probed are measured by `check` on
all of them. |predicted - measured| / measured, median, with quartiles as spread.

Kills: a run with each of the five methods. The first host has one worker, which is worker 0 and has
the parameter server beside it; the second host has two workers; a third host keeps torchrun's
rendezvous. First a random worker of either host is killed, then the second host with all its
processes, which then comes back; under `plain` and `dual-batch` finally the first host, too. A kill
counts as recovered if epochs go on after it, with the host that was lost, and the run ends with all
hosts. Samples lost or repeated are those that the records of epochs and rounds count, minus the
data set.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import batchwright as bw
from batchwright.distributed.joining.environments import read_opened
from batchwright.records import Check, Profile, RunSummary
from batchwright.records.documents import read_record, write_record
from benchmarks.harness.benchmark import ROOT, Arguments, Benchmark, Found, say
from benchmarks.harness.figures import Figure, Value
from benchmarks.harness.loads import until
from benchmarks.harness.namespaces import Host, hosts_apart

HOSTS, DELAY, BANDWIDTH = (2, 4), 2e-3, 25e6  # seconds; bytes per second, 200 Mbit
JOB = ("data=digits", "network=resnet8", "device=cpu", "probe.learning=0")
BATCH, BUDGET, POINTS = 96, 8, {False: 3, True: 6}
SMALL, LARGE, TIMES = 1_000_000, 4_000_000, 8  # bytes of plain messages, and how many
METHODS = ("plain", "dynamic-batch", "cyclic", "dual-batch", "hybrid")
LOST_FIRST = ("plain", "dual-batch")  # methods under which the host of worker 0 is lost, too
KILLS = 2 * len(METHODS) + len(LOST_FIRST)
SAMPLES, EPOCHS = 1437, 150
MAX_SECONDS = 300.0  # for anything to go on
_KEEP = """
import sys, time
from torch.distributed import TCPStore
kept = TCPStore(sys.argv[1], 29411, is_master=True, wait_for_workers=False)
print("ready", flush=True)
time.sleep(3600)
"""
_CHECK = """
import os, sys
import batchwright as bw
if __name__ == "__main__":
    checked = bw.check("plan.json", points=int(sys.argv[1]))
    if os.environ["RANK"] == "0":
        checked.save("check.json")
"""
_CODE = """
import json, sys
from benchmarks.harness.wire import ping_pong
size, answering, address, port, times = sys.argv[1:]
print(json.dumps(ping_pong(int(size), bool(int(answering)), address, int(port), int(times))))
"""

BENCHMARK = Benchmark(
    "hosts",
    "Several hosts",
    "Two and four network namespaces of one machine under torchrun, `resnet8` on digits, a delay "
    "of 2 ms and 200 Mbit/s between them",
    (
        Figure("link_error", "share", "largest", "error of the probe's latency and bandwidth "
               "between hosts against a plain socket's, largest", at_most=0.1),
        Figure("wire_late", "ratio", "median", "latency of the plain socket over the delay that "
               "the link was set to"),
        Figure("two_host_step_error", "share", "median", "error of the predicted time of a step of "
               "two hosts, median", at_most=0.1),
        Figure("four_host_step_error", "share", "median", "error of the predicted time of a step "
               "of four hosts on two cores, median"),
        Figure("kills_recovered", "kills", "worst", "kills of workers and hosts, over all five "
               "methods, after which the run went on", at_least=float(KILLS), full=True),
        Figure("samples_lost_or_repeated", "samples", "worst", "samples lost or repeated by the "
               "end of a run with kills of workers and hosts, largest", at_most=0.0, full=True),
    ),
)  # fmt: skip


def measure(arguments: Arguments, folder: Path) -> Found:
    """Measure network and steps, and with --full kills."""
    # Commands run in folders of their own, where Python does not find benchmarks and our sources.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    found: dict[str, Sequence[float] | Value] = {}
    links, checks = [], {}
    for count in HOSTS:
        say(f"{count} hosts: plain messages, a probe, and steps that it predicts")
        place = folder / f"hosts{count}"
        place.mkdir()
        link, errors = network_and_steps(place, count, POINTS[arguments.full])
        links.append(link)
        checks[str(count)] = errors
        say(f"{link}; errors of steps {[round(one, 3) for one in errors]}")
    found["link_error"] = [error for link in links for error in link.errors]
    found["wire_late"] = [link.true_latency / DELAY for link in links]
    found["two_host_step_error"], found["four_host_step_error"] = checks["2"], checks["4"]
    told: dict[str, Any] = {"links": [asdict(one) for one in links], "step_errors": checks}
    if arguments.full:
        runs = [run_and_kill(folder / f"kills-{method}", method) for method in METHODS]
        found |= kills_found(runs)
        told["kills"] = [asdict(run) for run in runs]
    return found, told


# --------------------------------------------------------------------------------- network, steps


@dataclass(frozen=True)
class Link:
    """The link between two hosts, by a plain socket (``true_``) and by a probe: s, bytes/s."""

    true_latency: float
    true_bandwidth: float
    latency: float
    bandwidth: float

    @property
    def errors(self) -> tuple[float, float]:
        """Relative errors of the probe's latency and bandwidth."""
        return (
            abs(self.latency / self.true_latency - 1),
            abs(self.bandwidth / self.true_bandwidth - 1),
        )


def network_and_steps(folder: Path, count: int, points: int) -> tuple[Link, list[float]]:
    """Probe on all hosts: the link between them, and relative errors of predicted steps."""
    cores = sorted(os.sched_getaffinity(0))
    with hosts_apart(folder, count, delay=DELAY, bandwidth=BANDWIDTH, cores=cores) as hosts:
        before = plain(hosts)
        together(
            hosts,
            "-m",
            "batchwright",
            "probe",
            *JOB,
            f"probe.budget={BUDGET}",
            "--out",
            "profile.json",
        )
        after = plain(hosts)
        profile = read_record(folder / "profile.json", Profile)
        plan = bw.plan(profile, epochs=2, global_batch=BATCH)
        write_record(plan, folder / "plan.json")
        (folder / "check.py").write_text(_CHECK)
        together(hosts, "check.py", points)
        checked = read_record(folder / "check.json", Check)
    (link,) = [one for one in profile.links if one.between == "hosts"]
    latency, bandwidth = (fmean(two) for two in zip(before, after, strict=True))
    errors = [abs(one.error) for one in checked.points if one.quantity == "step_seconds"]
    return Link(latency, bandwidth, link.latency, link.bandwidth), errors


def plain(hosts: Sequence[Host]) -> tuple[float, float]:
    """Latency and bandwidth from the first host to the second, by a plain socket."""
    latency = median(_messages(hosts, 1, 50)) / 2
    seconds = [median(_messages(hosts, size, TIMES)) for size in (SMALL, LARGE)]
    return latency, (LARGE - SMALL) / (seconds[1] - seconds[0])


def _messages(hosts: Sequence[Host], size: int, times: int) -> list[float]:
    def one(host: Host, answering: int) -> Any:
        words = (sys.executable, "-c", _CODE, size, answering, hosts[1].address, 29500, times)
        return host.popen(*words, stdout=subprocess.PIPE, text=True)

    with one(hosts[1], 1) as answers:
        try:
            answers.stdout.readline()
            told: list[float] = json.loads(one(hosts[0], 0).communicate()[0])
        finally:
            answers.kill()
    return told[times // 4 :]  # the connection opens its window


def together(hosts: Sequence[Host], *words: object) -> None:
    """Have a worker of each host run Python with these words, and wait for their end.

    Raises:
        SystemExit: The command failed on a host; the message has the ends of the logs.
    """
    for host in hosts:
        host.start(hosts[0], 1, *words, nodes=str(len(hosts)))
    codes = [host.agent.wait() for host in hosts if host.agent is not None]
    if any(codes):
        raise SystemExit(f"{words} failed:\n" + "\n".join(one.log()[-2000:] for one in hosts))


# ----------------------------------------------------------------------------------------- kills


@dataclass(frozen=True)
class KilledRun:
    """Result of a run with kills."""

    method: str
    kills: int
    recovered: int
    lost_or_repeated: int | None  # samples; ``None`` if the run did not end well
    seconds: float


def kills_found(runs: Sequence[KilledRun]) -> dict[str, Sequence[float] | Value]:
    """The figures of kills, by name; samples only if all runs ended well."""
    recovered = [float(sum(run.recovered for run in runs))]
    counts = [float(run.lost_or_repeated) for run in runs if run.lost_or_repeated is not None]
    found: dict[str, Sequence[float] | Value] = {"kills_recovered": recovered}
    return found | ({"samples_lost_or_repeated": counts} if len(counts) == len(runs) else {})


def run_and_kill(folder: Path, method: str) -> KilledRun:
    """Run a method on two hosts, and kill a worker and hosts as the module's docstring says."""
    say(f"{method}: a run with kills")
    folder.mkdir()
    begun, recovered, moments = time.monotonic(), 0, random.Random(METHODS.index(method))
    run, served = folder / "run", method in ("dual-batch", "hybrid")
    words = (
        *("-m", "batchwright", "run", *JOB, "probe.budget=1", f"method={method}"),
        *(f"global_batch={BATCH}", f"epochs={EPOCHS}", "checkpoint_seconds=0.5", "--out", "run"),
    )
    with hosts_apart(folder, 3, delay=DELAY / 10, bandwidth=4 * BANDWIDTH) as made:
        *both, keeper = made
        workers = dict(zip(both, (1, 2), strict=True))  # ranks follow the order of addresses
        keep = keeper.popen(sys.executable, "-c", _KEEP, keeper.address, stdout=subprocess.PIPE)
        keeper.agent = keep  # which ends with its host
        keep.stdout.readline()

        def start(host: Host) -> None:
            host.start(keeper, workers[host], *words, nodes="2" if served else "1:2")

        def strike_worker() -> None:
            host = moments.choice(both)
            with suppress(ProcessLookupError):
                os.kill(moments.choice(host.workers()), signal.SIGKILL)

        def strike(host: Host) -> None:
            known = len(read_opened(run).launches)
            host.kill()
            if not served:  # the other host goes on without it
                _goes_on(run, both)
            start(host)
            # The host is back once its new agent has opened the run folder. Until then, the other
            # one alone knows of the run, and must not be killed.
            until(lambda: len(read_opened(run).launches) > known or _ended(both), MAX_SECONDS)

        for host in both:
            start(host)
        lost_hosts = both[::-1] if method in LOST_FIRST else both[1:]
        strikes = [strike_worker, *(partial(strike, one) for one in lost_hosts)]
        for kill in strikes:
            if not _goes_on(run, both, checkpoint=True):
                break
            time.sleep(moments.uniform(0, 0.5))
            kill()
            recovered += _goes_on(run, both)
        until(lambda: _ended(both), MAX_SECONDS)
        ended = [one.agent.poll() for one in both if one.agent is not None] == [0, 0]
        if not ended:
            say("\n".join(one.log()[-3000:] for one in both))
    lost = lost_or_repeated(read_record(run / "summary.json", RunSummary)) if ended else None
    recovered -= int(not ended and recovered > 0)
    seconds = time.monotonic() - begun
    made = KilledRun(method, len(strikes), recovered, lost, seconds)
    say(str(made))
    return made


def _goes_on(run: Path, hosts: Sequence[Host], *, checkpoint: bool = False) -> bool:
    """Wait for two more epochs, and a checkpoint if asked for; return whether epochs went on."""
    before = epochs_in(run)

    def there() -> bool:
        kept = not checkpoint or (run / "checkpoints" / "last.pt").exists()
        return _ended(hosts) or (kept and epochs_in(run) > before + 1)

    return until(there, MAX_SECONDS, every=0.1) and epochs_in(run) > before


def _ended(hosts: Sequence[Host]) -> bool:
    return all(one.agent is None or one.agent.poll() is not None for one in hosts)


def epochs_in(run: Path) -> int:
    """Number of epochs in a run's records."""
    path = run / "metrics.jsonl"
    lines = path.read_bytes().splitlines() if path.exists() else []
    return sum(b'"epoch":' in line and b'"samples":' in line for line in lines)


def lost_or_repeated(summary: RunSummary, epochs: int = EPOCHS, samples: int = SAMPLES) -> int:
    """Samples that were lost or repeated, by the run's records.

    A parameter server waits for no worker, so a round may be in the next epoch's record: with a
    server, sums over all epochs are compared, and each round must be there once.
    """
    missing = samples * abs(epochs - len(summary.epochs))
    told = [one.samples - samples for one in summary.epochs]
    if summary.plan.server is None:
        return missing + sum(map(abs, told))
    numbers = sorted(one.number for one in summary.rounds)
    rounds = sum(one.samples for one in summary.rounds) - samples * len(summary.epochs)
    if numbers != list(range(len(numbers))):
        missing += samples  # a round's, about
    return missing + max(abs(sum(told)), abs(rounds))


if __name__ == "__main__":
    BENCHMARK.run(measure, __doc__)
