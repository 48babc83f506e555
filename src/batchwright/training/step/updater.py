"""The update: summed gradients scaled and clipped, and the optimizer's own step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from batchwright.distributed.reducer import Ahead, Tally
from batchwright.errors import BrokenStepError, TrainingError
from batchwright.training.step.clock import StepClock
from batchwright.training.step.early_batches import Early
from batchwright.training.step.gradient_scaling import multiply
from batchwright.workload.extras import in_words
from batchwright.workload.host import is_out_of_memory, release_memory
from batchwright.workload.optimizers import can_skip_steps, skip_step_if


class Updater:
    """Steps an optimizer, at the rates that it has.

    Args:
        parameters: What is trained, whether the optimizer has it or not.
        optimizer: Of most of them.
        clip_norm: Largest global gradient norm; ``None``: no limit.

    Attributes:
        begun: Whether the update of the step in progress was queued ahead, and may be made.
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
        # On the CPU there is no device to be kept busy.
        self._waits = clip_norm is not None or parameters[0].device.type == "cpu"
        self.begun = False
        self.follow([p for p in parameters if p.requires_grad])

    def follow(self, trained: Sequence[nn.Parameter]) -> None:
        """From now on these of the parameters are those that a `Reducer` has."""
        self._trained = list(trained)
        self._known = -1  # entries of the optimizer's state, with one for each of these

    def rescale(self, tally: Tally, factor: float) -> Tensor:
        """Multiply all summed gradients.

        Args:
            tally: Of their sum.
            factor: By which they are multiplied.

        Returns:
            The squared norms after that, on the CPU, as `Tally.sqr_norms` has them.
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
    ) -> Ahead | None:
        """What the device goes on with while the host waits for a step's figures.

        The update, where no number of the host's is needed for it, as clipping needs the norm, and
        the optimizer can be told to leave a step out. Last the next batch, of which the host waits
        for nothing: it keeps the device busy while the host does the rest of the step.

        Args:
            weight: Of all samples of the step.
            factors: As for `apply`.
            early: The batches.
            clock: Books the time.
            waits: Whether the update waits for the host in any case.
        """
        # A first step makes the state, which SGD would leave unwritten if it left that one out;
        # without momentum it has none.
        known = len(self._optimizer.state) == self._known
        known = known or all(g.get("momentum") == 0 for g in self._optimizer.param_groups)
        waits = waits or self._waits or factors is not None or not known
        updates = not waits and can_skip_steps(self._optimizer)
        if not (updates or early.asked):
            return None

        def go_on(unusual: Tensor | None) -> None:
            if unusual is not None:
                self.begun = True
                with skip_step_if(self._optimizer, unusual):
                    self._step()
            early.make()

        # Once for both, or the batch's time is lost.
        return Ahead(clock.passing(go_on), weight if updates else None)

    def apply(self, norms: Tensor, factors: Tensor | None) -> bool:
        """Where the gradient is finite, scale, clip and step.

        Args:
            norms: Squared norms of the gradients of what is trained, as `rescale` gives them: of
                each, (trained,), where there are factors.
            factors: On the gradients of what is trained: float64 (trained,); ``None``: none.

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
        if len(state) != self._known:
            self._known = len(state) if all(p in state for p in self._trained) else -1
        return True

    def _step(self) -> None:
        """Step the optimizer; once more where memory ran out before it had changed anything.

        That is in its first step, which makes its state. Fused kernels leave no version behind; but
        Adam's raise each ``step`` before, and SGD notes its momentum only after.

        Raises:
            BrokenStepError: Some weights may be updated, and would be once more.
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
            made = [one for entry in state.values() for one in entry.values()]
            begun = before != [p._version for p in self._parameters] or not (
                all("step" in entry for entry in state.values())
                and all(one._version == 0 for one in made if isinstance(one, Tensor))
            )
            if begun:
                raise BrokenStepError(
                    "memory ran out while the optimizer stepped, and some weights may be updated: "
                    "to repeat the step would update them twice, so only the last checkpoint is "
                    f"whole ({in_words(error)})"
                ) from error
        state.clear()  # an entry may be half made
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
        """Drop all gradients before and after a step, also those that the optimizer lacks."""
        self.begun = False
        for parameter in self._parameters:
            parameter.grad = None

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._trained if p.grad is not None]
