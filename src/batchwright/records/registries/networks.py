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
            largest training image side, in pixels; and with what job key `network_args` says.
            A library's is (its name for the network, num_classes, *, ...).
        least_side: Least image side, in pixels, such as the one that halvings bring down to 1;
            unset: it is found by trying.
        takes_name: Whether it is a library, whose own name for a network stands behind a colon.
        by_tensors: Whether its forward pass goes by tensors alone, not by numbers of Python's that
            change from step to step, so that a CUDA graph repeats it.
    """

    name: str
    build: str
    least_side: int | None = None
    takes_name: bool = False
    by_tensors: bool = False

    @property
    def form(self) -> str:
        """How a job writes it."""
        return f"{self.name}:NAME" if self.takes_name else self.name


_LIBRARY = "batchwright.workload.library_networks"


def _own(name: str, least_side: int) -> NetworkSpec:
    build = f"batchwright.workload.networks:{name}"
    return NetworkSpec(name, build, least_side=least_side, by_tensors=True)


NETWORKS = Registry(
    "network",
    _own("resnet8", least_side=4),
    _own("resnet18", least_side=8),
    _own("vgg8", least_side=8),
    _own("mobilenet_small", least_side=4),
    NetworkSpec("timm", f"{_LIBRARY}:timm_network", takes_name=True, by_tensors=True),
    NetworkSpec("torchvision", f"{_LIBRARY}:torchvision_network", takes_name=True, by_tensors=True),
    NetworkSpec("transformers", f"{_LIBRARY}:transformers_network", takes_name=True),
    group="batchwright.networks",
)


def network_spec(network: str) -> NetworkSpec | None:
    """The member that a job's ``network`` names; `None`: an import string, or nothing."""
    kind, _, name = network.partition(":")
    spec = NETWORKS.get(kind)
    return spec if spec is not None and spec.takes_name == bool(name) else None


def by_tensors(network: str) -> bool:
    """Whether a network, as a job names it, surely goes by tensors alone."""
    spec = network_spec(network)
    return spec is not None and spec.by_tensors


def least_side(network: str) -> int:
    """Least image side in pixels, as far as it is known before the network is built."""
    spec = network_spec(network)
    return (spec and spec.least_side) or 1
