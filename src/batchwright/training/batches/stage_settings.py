"""Settings of a plan's row besides batch, rate and resolution: dropout and augmentation."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from batchwright.errors import PlanError
from batchwright.records import Plan, Stage
from batchwright.training.batches.feeding import Feed


class StageSettings:
    """Sets a network and its feed to the row of the plan that is trained now.

    Where the plan has one dropout throughout, the network is left as it is. Where it has several,
    they are for the network's dropout layers (`torch.nn.Dropout`, `Dropout2d` and the like) whose
    probability is one of the plan's: build the network with that of the first row. Layers with
    another probability keep it, as a network may drop something else in other places.

    The strength of the augmentation is for images that our pipeline augments; a data set that does
    it itself leaves nothing to set.

    Args:
        model: The network that is trained.
        feed: Source of its training batches.
        plan: The plan, whose rows have the settings.

    Raises:
        PlanError: The plan has several dropouts and no layer of the network has any of them, or a
            strength other than 1 where the data set augments its own images.
    """

    def __init__(self, model: nn.Module, feed: Feed, plan: Plan) -> None:
        self._feed = feed
        self._strengths = {stage.augmentation_strength for stage in plan.stages}
        self._layers: list[_DropoutNd] = []
        dropouts = {stage.dropout for stage in plan.stages}
        if len(dropouts) > 1:
            layers = (module for module in model.modules() if isinstance(module, _DropoutNd))
            self._layers = [layer for layer in layers if layer.p in dropouts]
            if not self._layers:
                raise PlanError(
                    f"the plan changes the dropout ({_listed(dropouts)}) and no dropout layer of "
                    "the network has any of these: build it with the first, or plan with "
                    "cycle.dropouts=auto"
                )
        if self._strengths != {1.0} and not feed.shifts:
            raise PlanError(
                f"the plan shifts images by {_listed(self._strengths)} times the usual, and the "
                "data set augments its images itself: plan with cycle.strengths=auto"
            )

    def enter(self, stage: Stage) -> None:
        """Set dropout and augmentation to those of a row."""
        for layer in self._layers:
            layer.p = stage.dropout
        if self._strengths != {1.0}:
            self._feed.strength = stage.augmentation_strength


def _listed(values: set[float]) -> str:
    return ", ".join(f"{value:g}" for value in sorted(values))
