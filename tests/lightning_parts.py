"""A module and a Trainer of Lightning, which takes seconds to import: for `test_for_lightning`."""

from __future__ import annotations

import lightning as L  # noqa: N812 - as its own pages have it
import torch
from torch import nn
from torch.nn import functional

from tight import Tight


class Module(L.LightningModule):
    """A small network that notes which samples it sees, and may be slow or run out of memory."""

    def __init__(
        self,
        *,
        take=None,
        room=None,
        manual=False,
        back=None,
        rare=0,
        past=False,
        halves=False,
    ):
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.rare, self.few = (nn.Linear(6, 1) if rare else None), rare
        self.back = back
        self.take, self.room, self.seen, self.gradients = take, room, [], []
        self.automatic_optimization, self.past, self.halves = not manual, past, halves

    def training_step(self, batch, batch_idx):
        inputs, labels, numbers = batch
        if self.room is not None and len(inputs) > self.room:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: too many samples")
        if self.take is not None:
            self.take(len(inputs))
        self.seen.append(numbers.tolist())
        hidden = self.body[:2](inputs)
        if self.back is not None:
            hidden = Tight.apply(hidden, self.back)
        loss = functional.cross_entropy(self.body[2](hidden), labels)
        if self.rare is not None and (few := numbers < self.few).any():  # not in each batch
            loss = loss + self.rare(inputs[few]).square().sum() / len(inputs)
        self.log("loss", loss)
        if self.automatic_optimization:
            return loss
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        if self.halves:  # the second of which has the first in it
            half = loss / 2
            self.manual_backward(half, retain_graph=True)
            loss = loss - half
        loss.backward() if self.past else self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        return None

    def on_before_optimizer_step(self, optimizer):
        if optimizer.param_groups[0]["params"][0] is not self.body[0].weight:
            return  # the second one
        none = (torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters())
        self.gradients.append([one.clone() for one in none])

    def configure_optimizers(self):
        if not self.automatic_optimization:  # what takes several optimizers
            return [torch.optim.SGD(one.parameters(), 0.2, 0.9) for one in self.body[::2]]
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)


def trainer(workers, *callbacks, **how):
    return L.Trainer(
        accelerator="cpu",
        devices=workers,
        callbacks=list(callbacks),
        **{
            "strategy": "ddp" if workers > 1 else "auto",
            "max_epochs": 2,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **how,
        },
    )
