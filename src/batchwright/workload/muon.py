"""Muon: momentum made orthogonal for the matrices and kernels of a network, SGD for the rest.

A loop of your own:

    optimizer = bw.muon(model, lr=0.1)
    with bw.Session(model, optimizer, dataset, plan="plan.json") as session:
        ...

`torch.optim.Muon` does the same for matrices, in bfloat16, which processors without that format
emulate: 55 ms a step of `resnet8` on one busy core, where float32 takes 14. So the few lines of
arithmetic are our own, and tests hold them against torch's bit by bit. The equations are in
docs/methods.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from math import sqrt
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from batchwright.errors import ArgumentError, JobError
from batchwright.records import Job
from batchwright.records.text.problems import described
from batchwright.workload.host import computes_in_bfloat16
from batchwright.workload.optimizers import without_compiler

SGD_SHARE = 1.0
"""Rate of what stays with SGD over the rate of the matrices, where none is given."""

ROUNDS = 5
"""Newton-Schulz steps."""

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of x, x^3 and x^5 in each of them: chosen by Jordan for the steepest rise from zero."""

MOST_AT_ONCE = 2**24
"""Numbers, padding counted, in a stack of matrices: what its update takes meanwhile is at most 12
bytes of each in bfloat16, 192 MiB, and 20 in float32. Products as large keep any GPU busy."""

MOST_PADDED = 1.5
"""The same over the numbers of the matrices themselves. A GPU multiplies zeros like other numbers,
so this is the most that it computes besides, where it is so slow that this counts. Four of the 6
stacks of `resnet18` have 14 to 34 %; each of its three shortcuts by itself would be some twenty
launches more, which take a host longer than those zeros take a GPU."""

_SMALLEST = 1e-7  # norm by which a smaller gradient is divided
_NO_MATRICES = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm)
"""Modules whose weights are rows to be looked up, or factors, whatever their shape."""


class Muon(torch.optim.Optimizer):
    r"""Two optimizers as one: Muon for some parameter groups, SGD for the others.

    A kernel counts as a matrix :math:`W` with a row for each output channel, whose columns stand
    in the order in which they lie in memory. With gradient :math:`G` and momentum :math:`M`,

    .. math:: M \leftarrow \mu M + (1 - \mu) G, \quad
        W \leftarrow (1 - \eta \lambda) W
        - \eta \sqrt{\max(1, rows / columns)} \; O(\mu M + (1 - \mu) G)

    where :math:`O` is `orthogonal`. The order of the columns changes nothing but the rounding.

    The matrices are views that share the kernels' storage. They are made anew at each step, which
    takes some microseconds, so a network that was moved to another device or memory format since
    is stepped as it is now. To all else this is an ordinary optimizer of the kernels themselves:
    theirs are the gradients, the state (``momentum_buffer``, in the kernel's shape) and the
    `state_dict`.

    Some twenty operations on a small matrix take longer to launch on a GPU than to compute. So
    matrices of one short side are stepped together there (`stacks`); the CPU takes them one by one,
    in less memory.

    Attributes:
        together: Whether they are; ``None``: on all devices but the CPU.

    Args:
        groups: Parameter groups, each with its ``lr``. One with ``orthogonal=True`` is stepped by
            Muon; any other, also one that is added later, by `torch.optim.SGD`, whose options
            both understand.

    References:
        Jordan et al. 2024, kellerjordan.github.io/posts/muon.
    """

    together: bool | None = None

    def __init__(self, groups: Iterable[dict[str, Any]]) -> None:
        self._make_sgd()
        super().__init__(groups, {**self._sgd.defaults, "orthogonal": False})

    def _make_sgd(self) -> None:
        """Torch's own, which is handed groups and state at each step."""
        self._sgd = without_compiler(torch.optim.SGD)([torch.empty(0)])

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._make_sgd()  # a copy has none yet

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient.

        Args:
            closure: Computes the loss and its gradients anew, if given.

        Returns:
            What ``closure`` returned.

        Raises:
            ValueError: A kernel's memory is laid out so that it is no matrix.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["orthogonal"]:
                self._step_matrices(group)
        self._sgd.param_groups = [one for one in self.param_groups if not one["orthogonal"]]
        self._sgd.state = self.state
        self._sgd.step()
        return loss

    def _step_matrices(self, group: dict[str, Any]) -> None:
        for kernels in self._stacks(one for one in group["params"] if one.grad is not None):
            self._step_stack(kernels, group)  # and let go of what it made before the next

    def _step_stack(self, kernels: list[nn.Parameter], group: dict[str, Any]) -> None:
        rate, keep = group["lr"], group["momentum"]
        views = zip(*map(self._matrices, kernels), strict=True)
        weights, momenta, gradients = map(list, views)
        torch._foreach_lerp_(momenta, gradients, 1 - keep)
        ahead = torch._foreach_lerp(gradients, momenta, keep) if group["nesterov"] else momenta
        torch._foreach_mul_(weights, 1 - rate * group["weight_decay"])
        for matrix, update in zip(weights, orthogonal_together(ahead), strict=True):
            rows, columns = matrix.shape
            matrix.add_(update, alpha=-rate * sqrt(max(1, rows / columns)))

    def _stacks(self, kernels: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        """Kernels in the sets that are stepped together: on the CPU each by itself."""
        alike: dict[Any, list[nn.Parameter]] = defaultdict(list)
        for kernel in kernels:
            if self.together or (self.together is None and kernel.device.type != "cpu"):
                short = min(len(kernel), kernel.numel() // len(kernel))
                alike[kernel.device, kernel.dtype, short].append(kernel)
            else:
                yield [kernel]
        for some in alike.values():
            yield from stacks(some)

    def _matrices(self, kernel: nn.Parameter) -> tuple[Tensor, Tensor, Tensor]:
        """Views of a kernel, its momentum and its gradient as matrices."""
        order, state = _order(kernel), self.state[kernel]
        kept = state.get("momentum_buffer")
        if kept is None:
            kept = torch.zeros_like(kernel, memory_format=torch.preserve_format)
        elif kept.stride() != kernel.stride() and _order(kept) != order:
            kept = torch.empty_like(kernel).copy_(kept)  # it is to lie in memory as the kernel does
        state["momentum_buffer"] = kept
        weights = matrix_of(kernel.detach(), order)
        # Of the same layout as a rule; else this copies.
        gradient = cast("Tensor", kernel.grad).permute(0, *order).reshape(weights.shape)
        return weights, matrix_of(kept, order), gradient


def stacks(kernels: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Kernels of one short side in the sets that are made orthogonal at once, the longest first."""
    stack: list[nn.Parameter] = []
    numbers = 0
    for kernel in sorted(kernels, key=Tensor.numel, reverse=True):
        padded = (len(stack) + 1) * (stack[0] if stack else kernel).numel()
        if stack and padded > min(MOST_AT_ONCE, MOST_PADDED * (numbers + kernel.numel())):
            yield stack
            stack, numbers = [], 0
        stack.append(kernel)
        numbers += kernel.numel()
    if stack:
        yield stack


def orthogonal(matrix: Tensor) -> Tensor:
    r"""Nearly the nearest matrix to ``matrix`` whose singular values are all 1.

    Of :math:`U \Sigma V^T` about :math:`U V^T`: five times, from :math:`X = A / |A|`,

    .. math:: X \leftarrow a X + b \, X X^T X + c \, (X X^T)^2 X

    bring every singular value above 0.002 of the norm to between 0.68 and 1.21; smaller ones grow
    485 times at most. A factor of ``matrix`` cancels, and zeros stay zeros.

    Args:
        matrix: Shape (rows, columns), unchanged.

    Returns:
        Same shape; in bfloat16 on GPUs that compute in it, where it is fast and exact enough, else
        in ``matrix``'s format, or float32 if that is narrower.

    References:
        Jordan et al. 2024, kellerjordan.github.io/posts/muon.
    """
    tall = _is_tall(matrix)
    wide = _in_rounds(_of_norm_1(matrix.T if tall else matrix), torch.mm, torch.addmm)
    return wide.T if tall else wide


def orthogonal_together(matrices: Sequence[Tensor]) -> list[Tensor]:
    """`orthogonal` of matrices with the same short side, on one device, in one format.

    A GPU takes as many operations for all of them as for one. The shorter ones have zeros at their
    ends meanwhile, which add nothing to :math:`X X^T` and stay zeros.

    Args:
        matrices: Each (rows, columns), wide or tall, unchanged.
    """
    if len(matrices) < 2:
        return [orthogonal(one) for one in matrices]
    wide = [one.T if _is_tall(one) else one for one in matrices]
    stack = _in_rounds(_stack_of_norm_1(wide), torch.bmm, torch.baddbmm)
    done = [one[:, : like.size(1)] for one, like in zip(stack.unbind(), wide, strict=True)]
    return [one.T if _is_tall(like) else one for one, like in zip(done, matrices, strict=True)]


def _is_tall(matrix: Tensor) -> bool:
    return matrix.size(0) > matrix.size(1)


def _of_norm_1(matrix: Tensor) -> Tensor:
    """In the format in which it is made orthogonal."""
    matrix = matrix.to(_format_for(matrix))
    norm: Tensor = matrix.norm()
    return matrix / norm.clamp(min=_SMALLEST)


def _stack_of_norm_1(matrices: Sequence[Tensor]) -> Tensor:
    """The same of wide matrices, as (matrices, rows, most columns), with zeros behind each."""
    first, most = matrices[0], max(one.size(1) for one in matrices)
    shape = len(matrices), first.size(0), most
    stack = torch.zeros(shape, dtype=_format_for(first), device=first.device)
    for place, one in zip(stack.unbind(), matrices, strict=True):
        place[:, : one.size(1)].copy_(one)
    norms = torch.linalg.vector_norm(stack, dim=(1, 2), keepdim=True)
    return stack.div_(norms.clamp(min=_SMALLEST))


def _in_rounds(
    wide: Tensor, product: Callable[..., Tensor], added: Callable[..., Tensor]
) -> Tensor:
    """Newton-Schulz steps of one matrix of norm 1, or with batched products of a stack of them."""
    first, third, fifth = COEFFICIENTS
    for _ in range(ROUNDS):
        gram = product(wide, wide.mT)
        factors = added(gram, gram, gram, beta=third, alpha=fifth)
        wide = added(wide, factors, wide, beta=first)
    return wide


def _format_for(matrix: Tensor) -> torch.dtype:
    """What a matrix is made orthogonal in."""
    if matrix.device.type == "cuda" and _fast_bfloat16(matrix.device):
        return torch.bfloat16
    return torch.promote_types(matrix.dtype, torch.float32)


_fast_bfloat16 = cache(computes_in_bfloat16)  # it is asked for each matrix at each step


def matrix_of(kernel: Tensor, order: Sequence[int] | None = None) -> Tensor:
    """A kernel as a matrix that shares its storage: (out, ...) as (out, columns).

    The columns stand in the order in which they lie in memory: ``flatten(1)`` of a contiguous
    kernel, ``permute(0, 2, 3, 1).flatten(1)`` of a channels-last one.

    Args:
        kernel: Shape (out, ...).
        order: All dimensions but the first in the order of its memory, if that is known.

    Raises:
        ValueError: No such view is possible.
    """
    try:
        return kernel.permute(0, *(order or _order(kernel))).view(len(kernel), -1)
    except RuntimeError as error:
        raise ValueError(
            f"optimizer=muon: a kernel of shape {tuple(kernel.shape)} with strides "
            f"{kernel.stride()} cannot be seen as a matrix: make it contiguous, or channels-last"
        ) from error


def _order(kernel: Tensor) -> list[int]:
    """All dimensions but the first, outermost in memory first; those of size 1 last.

    Strides of these say nothing: what a network was moved to and its gradients differ in them.
    """
    sizes, strides = kernel.size(), kernel.stride()
    return sorted(range(1, kernel.ndim), key=lambda one: (sizes[one] == 1, -strides[one]))


def matrices_of(network: nn.Module) -> list[nn.Parameter]:
    """The trained parameters of a network that Muon steps, in the network's order.

    Matrices and kernels of at least two rows and two columns, but those of embeddings, of
    normalizations, and of convolutions in groups (depthwise ones are), which act on each group's
    channels alone and so are many small matrices.
    """
    left = {
        id(parameter)
        for layer in network.modules()
        if isinstance(layer, _NO_MATRICES) or (isinstance(layer, _ConvNd) and layer.groups > 1)
        for parameter in layer.parameters(recurse=False)
    }
    return [
        parameter
        for parameter in network.parameters()
        if parameter.requires_grad
        and id(parameter) not in left
        and parameter.ndim > 1
        and 1 < len(parameter) < parameter.numel()
    ]


def muon(
    model: nn.Module,
    lr: float,
    *,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    sgd_lr: float | None = None,
) -> Muon:
    """Muon for the matrices and kernels of a model, SGD for everything else it trains.

    Build it after the model is on its device and after layers are frozen.

    Args:
        model: Its weights that take gradients now are stepped; see `matrices_of`.
        lr: Rate of the matrices, per step: the largest change of any singular value.
        momentum: Of both, Nesterov's; 0: none.
        weight_decay: Of matrices and kernels, per step and unit of rate; for SGD's part the usual
            L2 term. Vectors and scalars (normalizations and biases) do not decay.
        sgd_lr: Rate of the rest, per step; unset: `SGD_SHARE` of ``lr``.

    Returns:
        An optimizer of up to three parameter groups: the matrices, SGD's matrices, SGD's vectors.

    Raises:
        ArgumentError: The model is none.
        JobError: Nothing in the model is such a matrix.
        ValueError: A kernel's memory is laid out so that it is no matrix.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"muon takes the model itself, a torch.nn.Module, not {described(model)}: write "
            "bw.muon(model, lr=0.1)"
        )
    matrices = matrices_of(model)
    if not matrices:
        raise JobError(
            "optimizer=muon: the network has no matrix or kernel to train (embeddings, grouped "
            "convolutions and vectors stay with SGD): try optimizer=sgd"
        )
    for kernel in matrices:
        matrix_of(kernel.detach())
    taken = {id(parameter) for parameter in matrices}
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in taken]
    common = {"momentum": momentum, "nesterov": momentum > 0, "weight_decay": weight_decay}
    sgd = {**common, "lr": SGD_SHARE * lr if sgd_lr is None else sgd_lr, "fused": True}
    groups: list[dict[str, Any]] = [
        {"params": matrices, "orthogonal": True, "lr": lr, **common},
        {"params": [p for p in rest if p.ndim > 1], **sgd},
        {"params": [p for p in rest if p.ndim <= 1], **sgd, "weight_decay": 0.0},
    ]
    return cast("Muon", without_compiler(Muon)([group for group in groups if group["params"]]))


def for_job(network: nn.Module, job: Job, rate: float) -> Muon:
    """Muon as a job asks for it; its groups are those of `muon`."""
    return muon(network, rate, momentum=job.momentum, weight_decay=job.weight_decay)
