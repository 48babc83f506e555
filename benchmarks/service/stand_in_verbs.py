"""A stand-in for the verbs that agents start, for `benchmarks.service.jobs`: a training of a second
with a checkpoint after each epoch, and a ledger of the trained epochs.

    python -m benchmarks.service.stand_in_verbs train PLAN.json --out RUN --report-to URL

STAND_IN is a folder with the files that a probe, a plan and a training write. Its ledger has a line
for each epoch that has its checkpoint: the job, the epoch, and the agent's folder.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

EPOCHS, EPOCH_SECONDS = 4, 0.25


def train(words: list[str], made: Path) -> None:
    """Train from the checkpoint, if there is one."""
    run = Path(words[words.index("--out") + 1])
    checkpoint = run / "checkpoints" / "last.pt"
    if "--resume" not in words:
        run.mkdir()
        shutil.copy(words[1], run / "plan.json")
    checkpoint.parent.mkdir(exist_ok=True)
    done = int(checkpoint.read_text()) if checkpoint.exists() else 0
    for epoch in range(done, EPOCHS):
        time.sleep(EPOCH_SECONDS)
        line = json.dumps({"kind": "note", "text": f"epoch {epoch + 1} of {EPOCHS}"})
        with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
        aside = checkpoint.with_suffix(".part")
        aside.write_text(str(epoch + 1), encoding="utf-8")
        aside.replace(checkpoint)
        told = f"{run.parent.name} {epoch} {run.parent.parent.parent.name}\n"
        with (made / "ledger").open("a", encoding="utf-8") as file:
            file.write(told)  # one write at the end of the file, so no two lines mix
    shutil.copy(made / "summary.json", run / "summary.json")


def main() -> None:
    """Run the verb of the command line; the process dies with its agent."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != int(os.environ["BATCHWRIGHT_VERB_PARENT"]):
        return
    made, words = Path(os.environ["STAND_IN"]), sys.argv[1:]
    if words[0] == "train":
        train(words, made)
    else:
        file = {"probe": "profile.json", "plan": "plan.json"}[words[0]]
        shutil.copy(made / file, words[words.index("--out") + 1])


if __name__ == "__main__":
    main()
