r"""Fine-tuning in a loop of your own: layers frozen, a new head, two rates, averaged weights.

In this folder, first a network that knows the ten digits; then, in one process, it learns to tell
even from odd:

    python finetune_loop.py first
    python finetune_loop.py

The same fine-tuning on two workers, with the batch and the rates that a plan decides:

    batchwright probe data=finetune_loop:parity network=finetune_loop:network frozen='0.*,1.*' \
        workers=2 loaders=0 probe.budget=3 optimizer=sgd learning_rate=0.02 base_batch=64 \
        | batchwright plan - epochs=5 --out plan.json
    torchrun --standalone --nproc-per-node 2 finetune_loop.py plan.json

The first convolution is frozen, the second learns at a tenth of the new head's rate, and what is
evaluated is a moving average of the weights. On GPUs: as in classify.py.
"""

from __future__ import annotations

import sys

import torch
from classify import DEVICE, accuracy, images, network
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Subset, TensorDataset

import batchwright as bw

EPOCHS, WEIGHTS = 5, "digits.pt"
HEAD, FROZEN = 9, 2  # position of the last layer; the first layers, which are left as they are


def parity() -> tuple[TensorDataset, TensorDataset, tuple[str, ...]]:
    """The digits again, labelled even or odd."""

    def relabelled(subset: Subset[tuple[Tensor, ...]]) -> TensorDataset:
        pixels, digits = zip(*subset, strict=True)
        return TensorDataset(torch.stack(pixels), torch.stack(digits) % 2)

    training, held_out, _ = images()
    return relabelled(training), relabelled(held_out), ("even", "odd")


def train_first() -> None:
    """Two epochs on the ten digits, to have weights to start from."""
    training, _, names = images()
    torch.manual_seed(0)
    model = network(len(names)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, fused=True)
    for _ in range(2):
        for inputs, labels in DataLoader(training, batch_size=64, shuffle=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs.to(DEVICE)), labels.to(DEVICE)).backward()
            optimizer.step()
    torch.save(model.state_dict(), WEIGHTS)


def trained_network() -> nn.Sequential:
    """The first network with a fresh head for two classes."""
    torch.manual_seed(0)
    model = network(10)
    model.load_state_dict(torch.load(WEIGHTS, weights_only=True, map_location="cpu"))
    model[HEAD] = nn.Linear(256, 2)
    model[:FROZEN].requires_grad_(False)
    return model.to(DEVICE)


def make_optimizer(model: nn.Sequential) -> torch.optim.Optimizer:
    """The new head at 0.02, what lies before it at a tenth of that."""
    return torch.optim.SGD(
        [
            {"params": model[FROZEN:HEAD].parameters(), "lr": 0.002},
            {"params": model[HEAD].parameters(), "lr": 0.02},
        ],
        momentum=0.9,
        nesterov=True,
        fused=True,
    )


def make_average(model: nn.Module) -> AveragedModel:
    """A moving average over about ten steps, for evaluation."""
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)).eval()


def tune_plainly() -> None:
    """Before: one process, a batch and rates chosen by hand."""
    train_set, test_set, _ = parity()
    model = trained_network()
    optimizer, average = make_optimizer(model), make_average(model)
    loader = DataLoader(train_set, batch_size=64, shuffle=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loader))
    criterion = nn.CrossEntropyLoss()
    model.eval()  # batch normalization keeps the statistics that it came with
    for epoch in range(EPOCHS):
        for inputs, labels in loader:
            optimizer.zero_grad()
            criterion(model(inputs.to(DEVICE)), labels.to(DEVICE)).backward()
            optimizer.step()
            scheduler.step()
            average.update_parameters(model)
        with torch.inference_mode():
            right = sum(
                int(accuracy(average(inputs.to(DEVICE)), labels.to(DEVICE))["top1"].sum())
                for inputs, labels in DataLoader(test_set, batch_size=256)
            )
        print(f"epoch {epoch + 1}: {right / len(test_set):.1%}")


def tune_as_planned(plan: str) -> None:
    """After: as many workers as the plan says; the average goes into the checkpoints."""
    train_set, test_set, _ = parity()
    model = trained_network()
    optimizer = make_optimizer(model)
    criterion = nn.CrossEntropyLoss()
    model.eval()  # batch normalization keeps the statistics that it came with
    with bw.Session(
        model, optimizer, train_set, plan=plan, run_folder="tuned", loaders=0
    ) as session:
        average = make_average(model)  # of the weights that all workers have by now
        session.keep("average", average)
        for epoch in session.epochs():
            for inputs, labels in session.batches():
                if session.step(criterion(model(inputs), labels)):
                    average.update_parameters(model)
            scores = session.evaluate(test_set, accuracy, model=average)
            if session.rank == 0:
                print(f"epoch {epoch + 1}: {scores['top1']:.1%}")


if __name__ == "__main__":
    if sys.argv[1:] == ["first"]:
        train_first()
    elif len(sys.argv) > 1:
        tune_as_planned(sys.argv[1])
    else:
        tune_plainly()
