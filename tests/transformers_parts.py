"""A Trainer of Transformers, which takes seconds to import: for `test_for_transformers`."""

from __future__ import annotations

import torch
import transformers


class Noting(transformers.Trainer):
    """Notes which samples it sees and each step's gradient; may be slow or run out of memory."""

    take, room = None, None

    def compute_loss(self, model, inputs, *more, **named):
        self.note(model, inputs)
        return super().compute_loss(model, inputs, *more, **named)

    def note(self, model, inputs):
        first = next(iter(inputs.values()))
        if self.room is not None and len(first) > self.room:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: too many samples")
        if self.take is not None:
            self.take(len(first))
        if model.training and "pixel_values" in inputs:
            numbers = (100 * inputs["pixel_values"][:, 0, 0, 0]).round().int()
            self.seen.append(numbers.tolist())


class Own(Noting):
    """Has a loss of its own, and does not say whether it is a mean."""

    def compute_loss(self, model, inputs, *more, **named):
        self.note(model, inputs)
        return model(**inputs)["loss"]


class Stepping(Noting):
    """Has a training step of its own, which may take its loss from the model itself."""

    past = False

    def training_step(self, model, inputs, *more, **named):
        model.train()
        inputs = self._prepare_inputs(inputs)
        loss = model(**inputs)["loss"] if self.past else self.compute_loss(model, inputs)
        self.accelerator.backward(loss)
        return loss.detach()


class Mean(Own):
    """Says that its loss is the mean over a batch."""

    loss_is_scaled_for_ga = False


class Said(Noting):
    """Says the same of the loss that its model returns."""

    loss_is_scaled_for_ga = False


class Gradients(transformers.TrainerCallback):
    def __init__(self):
        self.found = []

    def on_pre_optimizer_step(self, args, state, control, model, **_):
        none = (torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters())
        self.found.append([one.clone() for one in none])
