"""A backward pass in which memory runs out."""

import torch


class Tight(torch.autograd.Function):
    """Passes its input on; its backward pass has room for some samples only."""

    @staticmethod
    def forward(ctx, inputs, room):
        ctx.room = room
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        if len(gradient) > ctx.room:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: too many samples")
        return gradient, None
