"""The update: summed gradients scaled and clipped, and the optimizer's own step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from batchwright.distributed.tally import QueuedWork, Tally
from batchwright.errors import BrokenStepError, TrainingError
from batchwright.training.step.clock import StepClock
from batchwright.training.step.early_batches import Early
from batchwright.training.step.gradient_scaling import multiply
from batchwright.workload.extras import in_words
from batchwright.workload.host import is_out_of_memory, release_memory
from batchwright.workload.optimizers import can_skip_steps, skip_step_if


class Updater:
    """Applies summed gradients to the weights, at the rates that the optimizer has.

    Args:
        parameters: Everything that may be trained, whether the optimizer has it or not.
        optimizer: The optimizer of these parameters.
        clip_norm: Largest global gradient norm; ``None``: no limit.

    Attributes:
        begun: Whether the update of the step in progress was queued on the device before the host
            knew the step's figures, and may be made already.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        *,
        clip_norm: float | None,
    ) -> None:
        self._parameters, self._optimizer = parameters, optimizer
        self._clip_norm = clip_norm
        # Clipping needs the norm on the host, and on the CPU there is no device to be kept busy.
        self._waits = clip_norm is not None or parameters[0].device.type == "cpu"
        self.begun = False
        self.follow([p for p in parameters if p.requires_grad])

    def follow(self, trained: Sequence[nn.Parameter]) -> None:
        """From here on update these parameters, those of a `Reducer` in its order."""
        self._trained = list(trained)
        self._state_size = -1  # of the optimizer's state once it has an entry for each of these

    def rescale(self, tally: Tally, factor: float) -> Tensor:
        """Multiply all summed gradients by a factor, in place.

        Args:
            tally: Figures of the sum.
            factor: The factor.

        Returns:
            Squared norms of the multiplied gradients, on the CPU, shaped as `Tally.sqr_norms`.
        """
        assert tally.sqr_norms is not None  # noqa: S101 - every reducer gives them
        if factor != 1:
            torch._foreach_mul_(self._gradients(), factor)
        return tally.sqr_norms.cpu() * factor**2

    def ahead(
        self,
        weight: float,
        factors: Tensor | None,
        early: Early,
        clock: StepClock,
        *,
        waits: bool,
    ) -> QueuedWork | None:
        """Work that the device goes on with while the host waits for a step's figures.

        First the update, where it needs no number from the host (clipping needs the norm) and the
        optimizer can be told on the device to leave a step out. Then the next batch, for which the
        host waits for nothing: it keeps the device busy while the host does the rest of the step.

        Args:
            weight: Weight that the step should have: its samples over all workers.
            factors: Factors on the gradients, as for `apply`.
            early: The batches.
            clock: Books the time.
            waits: Whether the update has to wait for the host in any case.

        Returns:
            The work; ``None`` if there is none.
        """
        # The first step creates the optimizer's state, and SGD would leave it unwritten if it left
        # that step out; without momentum it has none.
        complete = len(self._optimizer.state) == self._state_size
        complete = complete or all(g.get("momentum") == 0 for g in self._optimizer.param_groups)
        waits = waits or self._waits or factors is not None or not complete
        updates = not waits and can_skip_steps(self._optimizer)
        if not (updates or early.asked):
            return None

        def queue(unusual: Tensor | None) -> None:
            if unusual is not None:
                self.begun = True
                with skip_step_if(self._optimizer, unusual):
                    self._step()
            early.make()

        # One mark on the clock for update and batch, or the batch's time would be lost.
        return QueuedWork(clock.passing(queue), weight if updates else None)

    def apply(self, norms: Tensor, factors: Tensor | None) -> bool:
        """Scale and clip the gradients and step the optimizer, if all gradients are finite.

        Args:
            norms: Squared norms of the trained parameters' gradients, as `rescale` returns them:
                of each parameter, (trained,), where there are factors.
            factors: Factors on these gradients, float64 (trained,); ``None``: none.

        Returns:
            Whether the weights were updated.
        """
        norms = norms.double()
        sqr_norm = float(norms.sum())
        if not math.isfinite(sqr_norm):
            return False
        if factors is not None:
            sqr_norm = float((factors.square() * norms).sum())
        norm, clip = math.sqrt(sqr_norm), 1.0
        if self._clip_norm is not None and norm > self._clip_norm:
            clip = self._clip_norm / norm
        if factors is not None:
            multiply([p.grad for p in self._trained], (clip * factors).tolist())
        elif clip != 1:
            torch._foreach_mul_(self._gradients(), clip)
        self._step()
        state = self._optimizer.state
        if len(state) != self._state_size:
            self._state_size = len(state) if all(p in state for p in self._trained) else -1
        return True

    def _step(self) -> None:
        """Step the optimizer, a second time where memory ran out before any weight had changed.

        Memory runs out in the first step, which creates the optimizer's state. Fused kernels raise
        no tensor's version; but Adam counts its ``step`` up before, and SGD stores its momentum
        after.

        Raises:
            BrokenStepError: Some weights may be updated, and would be updated twice.
            TrainingError: There is no memory for the state.
        """
        state = self._optimizer.state
        before = None if state else [p._version for p in self._parameters]
        try:
            self._optimizer.step()
            return
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            entries = [value for entry in state.values() for value in entry.values()]
            begun = before != [p._version for p in self._parameters] or not (
                all("step" in entry for entry in state.values())
                and all(value._version == 0 for value in entries if isinstance(value, Tensor))
            )
            if begun:
                raise BrokenStepError(
                    "memory ran out while the optimizer stepped, and some weights may be updated: "
                    "to repeat the step would update them twice, so only the last checkpoint is "
                    f"whole ({in_words(error)})"
                ) from error
        state.clear()  # an entry may be incomplete
        release_memory(self._parameters[0].device)
        try:
            self._optimizer.step()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise TrainingError(
                f"there is no memory for the optimizer's state ({in_words(error)}): take a smaller "
                "network or another optimizer, or free memory"
            ) from error

    def clear(self) -> None:
        """Drop all gradients before and after a step, those of parameters without optimizer too."""
        self.begun = False
        for parameter in self._parameters:
            parameter.grad = None

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._trained if p.grad is not None]
