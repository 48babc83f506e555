"""Handwritten digits in Transformers' Trainer, whose workers may be uneven.

    torchrun --standalone --nproc-per-node 2 in_transformers.py

Lines with `bw` are all that Batchwright changes. `"auto"` behind the trainer chooses batch,
accumulation and rate from a probe of the Trainer's own loss. The model is a tiny one, made here.
"""

from __future__ import annotations

import sys
import tempfile

import torch
from sklearn.datasets import load_digits
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

import batchwright as bw


class Digits(Dataset[dict[str, object]]):
    """Images (1, 8, 8) with their labels."""

    def __init__(self) -> None:
        digits = load_digits()
        self.images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
        self.labels = digits.target.tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, object]:
        return {"pixel_values": self.images[index], "labels": self.labels[index]}


if __name__ == "__main__":
    torch.manual_seed(0)
    shape = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10}
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = ViTForImageClassification(ViTConfig(**shape, **size, intermediate_size=64))
    arguments = TrainingArguments(
        output_dir=sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(),
        num_train_epochs=15,
        per_device_train_batch_size=32,
        learning_rate=3e-3,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(model, arguments, train_dataset=Digits())
    bw.ForTransformers(trainer, shares="follow")
    trainer.train()
    if trainer.is_world_process_zero():
        data = Digits()
        with torch.inference_mode():
            found = model.eval()(data.images.to(model.device)).logits.argmax(1).tolist()
        right = sum(a == b for a, b in zip(found, data.labels, strict=True)) / len(found)
        print(f"right: {right:.1%}")
