"""Trains on points under torchrun and notes every step that was taken; for `test_recovery`.

    torchrun ... tests/recovering.py FOLDER LAUNCH [--resume]

FOLDER holds plan.json and takes the run; LAUNCH numbers the launches that share it. While FOLDER
holds a file "stay", no life takes more than `MOST` steps.
"""

import json
import os
import sys
import time
from pathlib import Path

folder, launch = Path(sys.argv[1]), sys.argv[2]
rank = os.environ["RANK"]
life = f"{launch}-{os.environ['TORCHELASTIC_RESTART_COUNT']}-{rank}"
notes = (folder / f"life-{life}.jsonl").open("w", encoding="utf-8")  # before the slow imports
print(os.getpid(), file=notes, flush=True)  # first line; the test kills by it
while os.environ["TORCHELASTIC_RESTART_COUNT"] != "0" and (folder / "hold").exists():
    time.sleep(0.01)  # nothing has been done by those that are started again

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.data import Dataset  # noqa: E402

from batchwright import Session  # noqa: E402
from batchwright.workload.optimizers import without_compiler  # noqa: E402

FEATURES, CLASSES = 4, 3
MOST = 40  # of a run's 126: three lives of so many leave some to a fourth


class Points(Dataset):
    """Points with their index and a label hidden in one feature."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        features = torch.randn(FEATURES, generator=torch.Generator().manual_seed(index))
        features[index % CLASSES] += 2
        return features + torch.rand(FEATURES), index % CLASSES, index


class Counter:
    """Steps since the start of the run, kept in checkpoints."""

    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def main():
    torch.manual_seed(int(rank))  # each worker drops out by its own chance
    model = nn.Sequential(
        nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, CLASSES)
    )
    # They start often; a user's own optimizer would take two seconds longer each time.
    optimizer = without_compiler(torch.optim.SGD)(model.parameters(), lr=0.1, momentum=0.9)
    samples = json.loads((folder / "plan.json").read_text())["data"]["train_samples"]
    counter, done = Counter(), 0
    with Session(
        model,
        optimizer,
        Points(samples),
        plan=folder / "plan.json",
        run_folder=folder / "run",
        resume="--resume" in sys.argv,
        loaders=0,
    ) as session:
        session.keep("counter", counter)
        for epoch in session.epochs():
            for features, labels, indices in session.batches():
                while done >= MOST and (folder / "stay").exists():
                    time.sleep(0.01)
                session.step(functional.cross_entropy(model(features), labels))
                note = {
                    "step": counter.count,
                    "epoch": epoch,
                    "indices": indices.tolist(),
                    "rate": optimizer.param_groups[0]["lr"],
                }
                print(json.dumps(note), file=notes, flush=True)
                counter.count += 1
                done += 1
            if epoch % 4 == 3:
                session.evaluate(Points(7), correct, forward=lambda m, b: (m(b[0]), b[1]))
    values = [*model.parameters(), *model.buffers()]
    torch.save(torch.cat([v.detach().double().flatten() for v in values]), folder / f"{rank}.pt")


def correct(outputs, labels):
    return outputs.argmax(dim=1) == labels


main()
