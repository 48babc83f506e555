"""Parts of `first_contact`: choice of the number format, the first command, busy machines."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median

import torch

from batchwright.distributed.group import Group
from batchwright.probing.bench import Bench
from batchwright.probing.measure.precision import choose_precision, planned_batch
from batchwright.records import MachineLoad, Precision, Profile, RunSummary
from batchwright.records.documents import read_record
from batchwright.records.job_sections import MAX_BUDGET
from batchwright.records.text.load_text import busy_warning
from batchwright.reporting.data.accounting import whole_accounting
from batchwright.workload.data.sources import open_data
from batchwright.workload.host import prepare_process
from benchmarks.harness.benchmark import ROOT, Found, say
from benchmarks.harness.plans import CPU, job_from

OWN_DATA = "benchmarks.first_contact.own_data"
NETWORKS = ("resnet8", "vgg8", "mobilenet_small", "resnet18", f"{OWN_DATA}:network")
FORMS = (("tensors", 32), ("pictures", 64))
"""Functions of `OWN_DATA`, and the side of their images in pixels."""

FORMATS: tuple[Precision, Precision] = ("float32", "bfloat16")
CHOOSING_SECONDS = 0.1 * MAX_BUDGET  # the time that a probe has for the choice
TURNS = 3  # rounds of float32, bfloat16, bfloat16, float32

COMMANDS = {False: 3, True: 5}  # by --full

PROBES = {False: 3, True: 10}  # by --full, with each number of busy programs
BESIDE = (0, 1, 2)  # busy programs
BUSY = "while True: pass"


# ------------------------------------------------------------------------------- number formats


@dataclass(frozen=True)
class Regret:
    """A choice of number format, and the measured step times of both."""

    network: str
    data: str  # function that makes the data
    batch: int  # planned local batch
    compared: int  # local batch at which the choice was made
    chosen: Precision
    ratio: float  # step time with bfloat16 over float32, measured for the choice
    seconds: dict[Precision, float]  # median step time at the planned batch, by format

    @property
    def regret(self) -> float:
        """Step time with the chosen format over that with the other."""
        other = next(one for one in FORMATS if one != self.chosen)
        return self.seconds[self.chosen] / self.seconds[other]


def _regret(network: str, data: str, side: int, group: Group) -> Regret:
    say(f"number format: {network}, {data}")
    words = f"data={OWN_DATA}:{data} network={network} device=cpu resolutions={side} workers=1"
    job = job_from(words)
    images = open_data(job, verify=False)
    choice = choose_precision(job, images, group, seconds=CHOOSING_SECONDS)
    batch = planned_batch(job, images.facts.train_samples, 1)
    steps = {}
    for name in FORMATS:
        bench = Bench(job.model_copy(update={"precision": name}), images, group)
        steps[name] = bench, bench.supply(batch, side)
    times: dict[Precision, list[float]] = {name: [] for name in FORMATS}
    for turn in range(TURNS + 1):
        for name in (*FORMATS, *reversed(FORMATS)):
            bench, supply = steps[name]
            taken = sum(bench.step(supply))
            if turn:  # the first turn chooses kernels
                times[name].append(taken)
    return Regret(
        network=network,
        data=data,
        batch=batch,
        compared=choice.times[0].local_batch_size if choice.times else batch,
        chosen=choice.precision,
        ratio=choice.ratio.ratio.value if choice.ratio else 1.0,
        seconds={name: median(taken) for name, taken in times.items()},
    )


def formats() -> Found:
    """Choose number formats in this process, and time both formats."""
    prepare_process(torch.get_num_threads())
    group = Group(CPU, timeout=60)
    try:
        pairs = product(FORMS, NETWORKS)
        found = [_regret(network, *form, group) for form, network in pairs]
    finally:
        group.close()
    return regrets_found(found), {"formats": [asdict(one) for one in found]}


def regrets_found(choices: Sequence[Regret]) -> dict[str, list[float]]:
    """The figures of number formats, by name."""
    regrets = [one.regret for one in choices]
    return {"precision_regret": [max(regrets)], "precision_regret_median": regrets}


# ----------------------------------------------------------------------------- the first command


def first_commands(folder: Path, *, full: bool) -> Found:
    """Time `batchwright run` on digits, from the shell; the first, uncounted one decodes them."""
    seconds, explained, parts = [], [], []
    for number in range(COMMANDS[full] + 1):
        say(f"first command, {number + 1} of {COMMANDS[full] + 1}")
        run, began = folder / f"digits{number}", time.perf_counter()
        subprocess.run(
            [str(Path(sys.executable).with_name("batchwright")), "run", "--out", str(run)],
            check=True,
            capture_output=True,
        )
        taken = time.perf_counter() - began
        told = whole_accounting(read_record(run / "summary.json", RunSummary))
        if number:
            seconds.append(taken)
            explained.append(sum(part for _, part in told) / taken)
            parts.append({name: round(part, 4) for name, part in told})
    return {"first_command_seconds": seconds, "explained_share": explained}, {
        "first_command": {"seconds": seconds, "explained": explained, "parts": parts}
    }


# --------------------------------------------------------------------------------- busy machines


def busy_probes(folder: Path, *, full: bool) -> Found:
    """Probe digits alone and beside programs that never wait, in turns."""
    loads: dict[int, list[MachineLoad | None]] = {beside: [] for beside in BESIDE}
    for number in range(PROBES[full]):
        for beside in BESIDE:
            say(f"probe {number + 1} of {PROBES[full]} beside {beside} busy programs")
            loads[beside].append(_load_beside(beside, folder / "profile.json"))
    told = {beside: [bool(busy_warning(one)) for one in some] for beside, some in loads.items()}
    return {
        "busy_told": [float(one) for beside in BESIDE[1:] for one in told[beside]],
        "quiet_called_busy": [float(one) for one in told[0]],
    }, {
        "busy": {
            str(beside): [one.model_dump() if one else None for one in some]
            for beside, some in loads.items()
        }
    }


def _load_beside(programs: int, out: Path) -> MachineLoad | None:
    with ExitStack() as running:
        for _ in range(programs):
            busy = running.enter_context(subprocess.Popen([sys.executable, "-c", BUSY]))
            running.callback(busy.kill)
        subprocess.run(
            [sys.executable, "-m", "batchwright", "probe", "probe.budget=5", "--out", str(out)],
            cwd=ROOT,
            check=True,
            capture_output=True,
        )
    return Profile.model_validate(json.loads(out.read_text(encoding="utf-8"))).load
