"""The loss of a job: cross entropy, or a loss of the user's own, which is checked."""

from __future__ import annotations

import inspect
import math
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from traceback import extract_tb
from typing import Any

import torch
from torch import Tensor, nn

from batchwright.errors import BatchwrightError, JobError
from batchwright.records import Job
from batchwright.records.text.problems import described
from batchwright.workload.extras import in_words
from batchwright.workload.host import is_out_of_memory
from batchwright.workload.task import import_object

Loss = Callable[[Tensor, Tensor], Tensor]
"""Takes outputs (n, classes) and labels (n,); returns the mean loss over the n samples."""

_LOSS_FORM = (
    "it takes the network's outputs (n, classes) and the labels (n,), and gives their mean loss, a "
    "tensor with one number"
)
_TRIED = 6  # made-up samples
_OF_DEVICE = re.compile(r"\b(CUDA|HIP|cuDNN|MIOpen|NCCL|Triton)\w* (error|graph)", re.IGNORECASE)


def build_loss(job: Job, device: torch.device | None = None) -> Loss:
    """The job's loss; cross entropy is computed in float32 whatever the outputs' format.

    Args:
        job: Names the loss.
        device: Device of outputs and labels: a loss that is a module, with weights of classes for
            example, is moved there.

    Raises:
        JobError: The job's import string names nothing that can be called with outputs and labels.
            The returned loss raises it as well, where the user's code fails or returns no mean.
    """
    if job.loss == "cross_entropy":
        cross_entropy = nn.CrossEntropyLoss(label_smoothing=job.label_smoothing)
        return lambda outputs, labels: cross_entropy(outputs.float(), labels)
    if ":" not in job.loss:
        raise JobError(f"loss={job.loss}: unknown; try cross_entropy, or module:function")
    loss = import_object(job.loss, "loss")
    if isinstance(loss, type) and issubclass(loss, nn.Module):
        try:
            loss = loss()
        except Exception as error:  # the user's code may fail in any way
            raise JobError(
                f"loss={job.loss}: cannot be built without arguments ({in_words(error)}): name a "
                "function, or what you have built"
            ) from error
    if not callable(loss):
        raise JobError(f"loss={job.loss}: a {type(loss).__name__} cannot be called")
    if isinstance(loss, nn.Module) and any(one.requires_grad for one in loss.parameters()):
        raise JobError(
            f"loss={job.loss}: has parameters of its own, which no run trains: train in a loop of "
            "your own, with them in the optimizer, or set requires_grad to False in them"
        )
    if isinstance(loss, nn.Module) and device is not None:
        loss = loss.to(device)
    _check_call(job.loss, loss)

    def mean_loss(outputs: Tensor, labels: Tensor) -> Tensor:
        try:
            found = loss(outputs, labels)
        except Exception as error:
            if not _is_of_users_code(error):
                raise
            why = f"{_place(error)}{in_words(error).rstrip('.')}"
            raise JobError(f"loss={job.loss}: {why}; {_LOSS_FORM}") from error
        if isinstance(found, Tensor) and found.numel() == 1:
            # In training alone: an evaluation needs no gradient.
            if torch.is_grad_enabled() and outputs.requires_grad and not found.requires_grad:
                raise _ConstantLossError(
                    f"loss={job.loss}: has no gradient, so nothing would be learned: take it from "
                    f"the outputs, without detach(), no_grad(), argmax() or item(); {_LOSS_FORM}"
                )
            return found
        what = described(found)
        if isinstance(found, Tensor):
            what = f"a tensor of shape {tuple(found.shape)}"
        raise JobError(f"loss={job.loss}: gave {what}; {_LOSS_FORM}")

    return mean_loss


def _is_of_users_code(error: Exception) -> bool:
    """Whether an error inside a loss comes from the user's code.

    Errors of ours, of a device, of the compiler and of an exchange do not: training goes on after
    some of them, and others may come from an earlier kernel.
    """
    if isinstance(error, BatchwrightError) or is_out_of_memory(error):
        return False
    library = type(error).__module__.partition(".")[0]
    return library not in ("torch", "triton") and not _OF_DEVICE.search(str(error))


def _place(error: Exception) -> str:
    """File and line of the last call before those of PyTorch; empty if there is none."""
    torch_folder = str(Path(torch.__file__).parent)
    called = [
        one
        for one in extract_tb(error.__traceback__)[1:]
        if not one.filename.startswith((torch_folder, "<"))
    ]
    return f"{called[-1].filename}, line {called[-1].lineno}: " if called else ""


class _ConstantLossError(JobError):
    """A loss has no gradient with respect to the outputs."""


def check_loss(job: Job, loss: Loss, classes: int) -> None:
    """Refuse a loss that is a sum over the samples, or that has no gradient.

    The gradients of a sum would be many times too large. The loss is called with made-up outputs
    and labels, and with each of them twice, which doubles a sum. A failure, or another difference,
    shows nothing here: the run will show it. A gradient of zeros shows nothing either, as a loss
    may leave out samples that the network is not sure of.

    Raises:
        JobError: The loss is a sum, or has no gradient.
    """
    if job.loss == "cross_entropy":
        return
    outputs = torch.randn(_TRIED, classes, generator=torch.Generator().manual_seed(0))
    outputs.requires_grad_()
    labels = torch.arange(_TRIED) % classes
    with warnings.catch_warnings(), torch.random.fork_rng([]):
        warnings.simplefilter("ignore")
        try:
            once = float(loss(outputs.clone(), labels))  # a copy: a loss may change it in place
            twice = float(loss(outputs.repeat(2, 1), labels.repeat(2)))
            again = float(loss(outputs.clone(), labels))  # differs where the loss is random
        except _ConstantLossError:
            raise
        except Exception:  # noqa: BLE001 - the user's code may fail in any way
            return
    if once and once == again and math.isclose(twice, 2 * once, rel_tol=1e-4):
        raise JobError(
            f"loss={job.loss}: adds the samples up, as it doubles where the same outputs and "
            f'labels come twice: give their mean (reduction="mean"); {_LOSS_FORM}'
        )


def _check_call(name: str, loss: Callable[..., Any]) -> None:
    """Refuse a loss whose signature does not take outputs and labels, as far as it is known."""
    try:
        taken = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)
    except (TypeError, ValueError):  # functions written in C have no signature
        return
    try:
        taken.bind("outputs", "labels")
    except TypeError as error:
        raise JobError(
            f"loss={name}: cannot be called as loss(outputs, labels), {error}; {_LOSS_FORM}"
        ) from None
