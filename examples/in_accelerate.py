"""Handwritten digits in a loop with accelerate, whose workers may be uneven.

    torchrun --standalone --nproc-per-node 2 in_accelerate.py

Lines with `bw` or `feed` are all that Batchwright changes.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import batchwright as bw

if __name__ == "__main__":
    digits = load_digits()
    pixels = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    loader = DataLoader(TensorDataset(pixels, labels), batch_size=64, shuffle=True)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    feed = bw.ForAccelerate(accelerator, model, optimizer, loader, shares="follow")
    for _ in range(5):
        for inputs, targets in feed:
            with accelerator.accumulate(model):
                feed.backward(functional.cross_entropy(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
    with torch.inference_mode():
        found = model(pixels.to(accelerator.device)).argmax(1).cpu()
    accelerator.print(f"right: {float((found == labels).float().mean()):.1%}")
    accelerator.end_training()
