"""Networks: the values of job key ``network``, except import strings."""

from __future__ import annotations

from dataclasses import dataclass

from batchwright.records.registries.registry import Registry


@dataclass(frozen=True)
class NetworkSpec:
    """A network.

    Attributes:
        name: Name, as in a job.
        build: Import string of a function (num_classes, *, dropout, top_resolution) ->
            `torch.nn.Module`. ``dropout`` is the share of features dropped before the classifier,
            ``top_resolution`` the largest training image side in pixels. Arguments of job key
            `network_args` are passed by name. For a library the function is (the library's name for
            the network, num_classes, *, ...).
        least_side: Smallest image side, in pixels, for example the side that halvings bring down to
            1; unset: it is found by trying.
        takes_name: Whether this is a library, whose name for a network follows a colon.
        by_tensors: Whether the forward pass depends on tensors alone, not on Python numbers that
            change from step to step, so that a CUDA graph can repeat it.
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
    """The registry's entry of a job's ``network``; `None` for an import string or unknown name."""
    kind, _, name = network.partition(":")
    spec = NETWORKS.get(kind)
    return spec if spec is not None and spec.takes_name == bool(name) else None


def by_tensors(network: str) -> bool:
    """Whether the forward pass of a job's ``network`` is known to depend on tensors alone."""
    spec = network_spec(network)
    return spec is not None and spec.by_tensors


def least_side(network: str) -> int:
    """Smallest image side in pixels; 1 if it is unknown before the network is built."""
    spec = network_spec(network)
    return (spec and spec.least_side) or 1
