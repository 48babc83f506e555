"""Muon: orthogonalized momentum for the matrices and kernels of a network, SGD for the rest.

A loop of your own:

    optimizer = bw.muon(model, lr=0.1)
    with bw.Session(model, optimizer, dataset, plan="plan.json") as session:
        ...

`torch.optim.Muon` does this for matrices alone, in bfloat16, which processors without that format
emulate, slowly (docs/decisions/0026). So the few lines of arithmetic are our own, and tests compare
them with torch's bit by bit. The equations are in docs/methods.md.
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
"""Rate of SGD's parameters over the rate of the matrices, where no rate is given."""

ROUNDS = 5
"""Newton-Schulz steps."""

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Factors of x, x^3 and x^5 in each step: chosen by Jordan for the steepest rise from zero."""

MOST_AT_ONCE = 2**24
"""Most numbers, with padding, in a stack of matrices. The temporary memory of its update is at most
12 bytes for each number in bfloat16, 192 MiB, and 20 in float32. Such products keep a GPU busy."""

MOST_PADDED = 1.5
"""Most numbers in a stack, with padding, over the numbers without. A GPU multiplies zeros as well,
so this bounds the additional work where it counts, on a slow GPU. Four of the 6 stacks of
`resnet18` have 14 to 34 % of padding; each of its three shortcuts by itself would be some twenty
launches more, which take a host longer than those zeros take a GPU."""

_SMALLEST = 1e-7  # least norm that a gradient is divided by
_NO_MATRICES = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm)
"""Modules whose weights are looked-up rows, or factors, whatever their shape."""


class Muon(torch.optim.Optimizer):
    r"""Two optimizers as one: Muon for some parameter groups, SGD for the others.

    A kernel counts as a matrix :math:`W` with a row for each output channel and columns in the
    order of its memory. With gradient :math:`G` and momentum :math:`M`,

    .. math:: M \leftarrow \mu M + (1 - \mu) G, \quad
        W \leftarrow (1 - \eta \lambda) W
        - \eta \sqrt{\max(1, rows / columns)} \; O(\mu M + (1 - \mu) G)

    where :math:`O` is `orthogonal`. The order of the columns changes nothing but the rounding.

    The matrices are views that share the kernels' storage. Each step makes them anew, which takes
    some microseconds, so a network may be moved to another device or memory format between steps.
    To all other code this is an ordinary optimizer of the kernels themselves: gradients, state
    (``momentum_buffer``, in the kernel's shape) and `state_dict` belong to the kernels.

    Some twenty operations on a small matrix take longer to launch on a GPU than to compute. So
    matrices whose short sides are equal are stepped together there (`stacks`); the CPU takes them
    one by one, in less memory.

    Attributes:
        together: Whether matrices are stepped together; ``None``: on all devices but the CPU.

    Args:
        groups: Parameter groups, each with its ``lr``. Groups with ``orthogonal=True`` are stepped
            by Muon; all others, also those added later, by `torch.optim.SGD`. Both take the options
            of SGD.

    References:
        Jordan et al. 2024, kellerjordan.github.io/posts/muon.
    """

    together: bool | None = None

    def __init__(self, groups: Iterable[dict[str, Any]]) -> None:
        self._make_sgd()
        super().__init__(groups, {**self._sgd.defaults, "orthogonal": False})

    def _make_sgd(self) -> None:
        """Make torch's SGD, which gets groups and state at each step."""
        self._sgd = without_compiler(torch.optim.SGD)([torch.empty(0)])

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._make_sgd()  # a copy has no SGD yet

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
                stepped = (one for one in group["params"] if one.grad is not None)
                for kernels in self._stacks(stepped):
                    self._step_stack(kernels, group)  # a call, so that its tensors are freed
        self._sgd.param_groups = [one for one in self.param_groups if not one["orthogonal"]]
        self._sgd.state = self.state
        self._sgd.step()
        return loss

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
        """The sets of kernels that are stepped together; on the CPU each kernel by itself."""
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
            kept = torch.empty_like(kernel).copy_(kept)  # now it has the kernel's memory layout
        state["momentum_buffer"] = kept
        weights = matrix_of(kernel.detach(), order)
        # A view where the gradient has the kernel's layout, as it usually does; else a copy.
        gradient = cast("Tensor", kernel.grad).permute(0, *order).reshape(weights.shape)
        return weights, matrix_of(kept, order), gradient


def stacks(kernels: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Split kernels with equal short sides into sets that are orthogonalized together.

    Longer kernels come first. Each set keeps to `MOST_AT_ONCE` and `MOST_PADDED`.
    """
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

    For :math:`A = U \Sigma V^T` it is about :math:`U V^T`. Five steps, from :math:`X = A / |A|`,

    .. math:: X \leftarrow a X + b \, X X^T X + c \, (X X^T)^2 X

    bring every singular value above 0.002 of the norm to between 0.68 and 1.21; smaller ones grow
    485 times at most. A factor of ``matrix`` cancels out, and zeros stay zeros.

    Args:
        matrix: Shape (rows, columns), unchanged.

    Returns:
        Shape (rows, columns). In bfloat16 on GPUs that compute in it, where that is fast and exact
        enough; else in the format of ``matrix``, or in float32 if that format is narrower.

    References:
        Jordan et al. 2024, kellerjordan.github.io/posts/muon.
    """
    tall = _is_tall(matrix)
    wide = _in_rounds(_of_norm_1(matrix.T if tall else matrix), torch.mm, torch.addmm)
    return wide.T if tall else wide


def orthogonal_together(matrices: Sequence[Tensor]) -> list[Tensor]:
    """`orthogonal` of matrices with equal short sides, on one device, in one format.

    On a GPU it takes as many operations as for one matrix. Shorter matrices are padded with zeros
    meanwhile, which add nothing to :math:`X X^T` and stay zeros.

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
    """``matrix`` over its norm, in the format of the orthogonalization."""
    matrix = matrix.to(_format_for(matrix))
    norm: Tensor = matrix.norm()
    return matrix / norm.clamp(min=_SMALLEST)


def _stack_of_norm_1(matrices: Sequence[Tensor]) -> Tensor:
    """Wide matrices over their norms, padded with zeros: (matrices, rows, most columns)."""
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
    """Newton-Schulz steps for a matrix of norm 1, or, with batched products, for a stack of them.

    Args:
        wide: (rows, columns) or (matrices, rows, columns), with rows <= columns.
        product: `torch.mm` or `torch.bmm`.
        added: `torch.addmm` or `torch.baddbmm`.
    """
    first, third, fifth = COEFFICIENTS
    for _ in range(ROUNDS):
        gram = product(wide, wide.mT)
        factors = added(gram, gram, gram, beta=third, alpha=fifth)
        wide = added(wide, factors, wide, beta=first)
    return wide


def _format_for(matrix: Tensor) -> torch.dtype:
    """The number format in which a matrix is orthogonalized."""
    if matrix.device.type == "cuda" and _fast_bfloat16(matrix.device):
        return torch.bfloat16
    return torch.promote_types(matrix.dtype, torch.float32)


_fast_bfloat16 = cache(computes_in_bfloat16)  # called for each matrix at each step


def matrix_of(kernel: Tensor, order: Sequence[int] | None = None) -> Tensor:
    """A kernel (out, ...) as a matrix (out, columns) that shares its storage.

    The columns are in the order of the kernel's memory: ``flatten(1)`` of a contiguous kernel,
    ``permute(0, 2, 3, 1).flatten(1)`` of a channels-last one.

    Args:
        kernel: Shape (out, ...).
        order: All dimensions but the first, in the order of its memory, if known.

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
    """All dimensions but the first, outermost in memory first, dimensions of size 1 last.

    The strides of dimensions of size 1 say nothing: those of a moved network and of its gradients
    differ.
    """
    sizes, strides = kernel.size(), kernel.stride()
    return sorted(range(1, kernel.ndim), key=lambda one: (sizes[one] == 1, -strides[one]))


def matrices_of(network: nn.Module) -> list[nn.Parameter]:
    """The trained parameters of a network that Muon steps, in the network's order.

    They are the matrices and kernels of at least two rows and two columns. Embeddings and
    normalizations are left out, and so are grouped convolutions, such as depthwise ones: they act
    on the channels of each group alone, and so are many small matrices.
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
        model: The model; its weights that require gradients now are stepped, see `matrices_of`.
        lr: Rate of the matrices, per step: the largest change of any singular value.
        momentum: Nesterov momentum of Muon and SGD; 0: none.
        weight_decay: Decay of matrices and kernels, per step and unit of rate; for SGD's part the
            usual L2 term. Vectors and scalars (normalizations and biases) do not decay.
        sgd_lr: Rate of SGD's parameters, per step; unset: `SGD_SHARE` of ``lr``.

    Returns:
        An optimizer of up to three parameter groups: the matrices, SGD's matrices, SGD's vectors.

    Raises:
        ArgumentError: ``model`` is no module.
        JobError: The model has no matrix or kernel that Muon could step.
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
    """Muon with a job's momentum and weight decay; its groups are those of `muon`."""
    return muon(network, rate, momentum=job.momentum, weight_decay=job.weight_decay)
