"""Networks: job key ``network``, but for import strings."""

from __future__ import annotations

from dataclasses import dataclass

from batchwright.records.registries.registry import Registry


@dataclass(frozen=True)
class NetworkSpec:
    """A network.

    Attributes:
        name: As in a job.
        build: Import string of a function: (num_classes, *, dropout, top_resolution) ->
            `torch.nn.Module`, with the share of features dropped before the classifier and the
            largest training image side, in pixels.
        least_side: Least image side, in pixels, such as the one that halvings bring down to 1.
    """

    name: str
    build: str
    least_side: int


NETWORKS = Registry(
    "network",
    NetworkSpec("resnet8", "batchwright.workload.networks:resnet8", least_side=4),
    NetworkSpec("resnet18", "batchwright.workload.networks:resnet18", least_side=8),
    NetworkSpec("vgg8", "batchwright.workload.networks:vgg8", least_side=8),
    NetworkSpec("mobilenet_small", "batchwright.workload.networks:mobilenet_small", least_side=4),
    group="batchwright.networks",
)
