"""A training script as people write it by hand: PyTorch, Pillow, SGD, a cosine schedule, float32.

    python -m benchmarks.planning.plain_torch --data cifar100:PATH --network resnet8 --side 32 \
        --epochs 10 --rate 0.1 --loaders 2

Prints a line of JSON after each epoch's evaluation. Uses nothing of Batchwright.
"""

import json

import torch
from torch.nn import functional

from benchmarks.planning.plain_images import NETWORKS, arguments, loaders, optimizer_of


def main() -> None:
    """Train."""
    asked = arguments()
    torch.manual_seed(asked.seed)
    train, test, classes = loaders(asked)
    network = NETWORKS[asked.network](classes).to(asked.device)
    optimizer, schedule = optimizer_of(network, asked.rate, asked.epochs)
    for _ in range(asked.epochs):
        network.train()
        for batch in train:
            images, labels = (one.to(asked.device, non_blocking=True) for one in batch)
            optimizer.zero_grad()
            functional.cross_entropy(network(images), labels).backward()
            optimizer.step()
        schedule.step()
        network.eval()
        correct = total = 0
        with torch.no_grad():
            for batch in test:
                images, labels = (one.to(asked.device, non_blocking=True) for one in batch)
                correct += int((network(images).argmax(1) == labels).sum())
                total += len(labels)
        told = {"accuracy": correct / total, "versions": {"torch": torch.__version__}}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
