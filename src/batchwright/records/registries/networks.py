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
        normalization: For a library, import string of a function (its name for the network, the
            network with trained weights) -> what images were normalized by for these weights,
            three means and three standard deviations of red, green and blue from 0 to 1, or `None`
            where it does not say. Unset: it never says.
        pretrained_side: For a library, import string of a function (its name for the network) ->
            the image side in pixels that a network with trained weights is built for whatever the
            job's is, or `None`. Unset: all are built for the job's.
    """

    name: str
    build: str
    least_side: int | None = None
    takes_name: bool = False
    by_tensors: bool = False
    normalization: str = ""
    pretrained_side: str = ""

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
    NetworkSpec(
        "timm",
        f"{_LIBRARY}:timm_network",
        takes_name=True,
        by_tensors=True,
        normalization=f"{_LIBRARY}:timm_normalization",
    ),
    NetworkSpec(
        "torchvision",
        f"{_LIBRARY}:torchvision_network",
        takes_name=True,
        by_tensors=True,
        normalization=f"{_LIBRARY}:torchvision_normalization",
    ),
    NetworkSpec(
        "transformers",
        f"{_LIBRARY}:transformers_network",
        takes_name=True,
        normalization=f"{_LIBRARY}:transformers_normalization",
        pretrained_side=f"{_LIBRARY}:transformers_side",
    ),
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
