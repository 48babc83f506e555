"""Trains on points with a parameter server, dies as it is told; for `test_server_faults`.

    python -m serving FOLDER [--resume]

FOLDER holds plan.json and, in settings.json, how each worker's lives end; it takes the run.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional

from batchwright import Session
from batchwright.distributed.exit_reports import SERVER_RANK
from batchwright.distributed.processes import worker_main
from batchwright.records import Plan
from batchwright.records.documents import read_record
from hosting import Points, correct, make_model, without_compiler

folder = Path(sys.argv[1])
rank = os.environ["RANK"]


def server_pid():
    """The process that serves the run: our parent's other child, which is forked as we are."""
    parent = os.getppid()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
            name = (path.parent / "comm").read_text()
        except OSError:
            continue
        if int(fields[1]) == parent and name == f"worker {SERVER_RANK}\n":
            return int(path.parent.name)
    raise AssertionError("no server")


def work():
    """Lives as settings.json says: {rank: [[victim, round, step] for each life]}."""
    without_compiler()
    life = len(list(folder.glob(f"life-{rank}-*")))
    settings = json.loads((folder / "settings.json").read_text())
    ends = settings.get(rank, [])
    victim, *moment = ends[life] if life < len(ends) else [""]
    waits = not ends and any(one[0][0] in ("self", "error") for one in settings.values())
    plan = read_record(folder / "plan.json", Plan)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with (
        (folder / f"life-{rank}-{life}").open("w", encoding="utf-8") as notes,
        Session(
            model,
            optimizer,
            Points(plan.data.train_samples),
            plan=plan,
            run_folder=folder / "run",
            resume="--resume" in sys.argv,
            loaders=0,
            exit_on_stop=False,
        ) as session,
    ):
        for number, epoch in enumerate(session.epochs()):
            while number and waits and not (folder / "ended").exists():
                time.sleep(0.01)  # or it could do all before another comes to its end
            for step, (features, labels, indices) in enumerate(session.batches()):
                session.step(functional.cross_entropy(model(features), labels))
                print(json.dumps([number, epoch, indices.tolist()]), file=notes, flush=True)
                if [number, step] == moment:
                    meet_end(victim)
            session.evaluate(Points(7), correct, forward=lambda m, b: (m(b[0]), b[1]))


def meet_end(victim):
    """Kill somebody, and see what comes of it."""
    (folder / "ended").touch()
    if victim == "error":
        raise ValueError("no such thing")
    if victim == "self":
        os.kill(os.getpid(), signal.SIGKILL)
    # Checkpoints are written beside the training: one of the rounds before may be on its way.
    end = time.monotonic() + 500
    while not (folder / "run" / "checkpoints" / "last.pt").exists():
        assert time.monotonic() < end, "no checkpoint was written"
        time.sleep(0.01)
    os.kill(server_pid(), signal.SIGSTOP if victim == "still" else signal.SIGKILL)
    time.sleep(60)


if __name__ == "__main__":
    worker_main(work)
