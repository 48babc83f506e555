"""What autograd has recorded of a pass, node by node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor


def graph_nodes(output: Tensor) -> Iterator[Any]:
    """Each node of the graph that ``output`` was computed by, once: functions, then parameters."""
    nodes: list[Any] = [output.grad_fn]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
        yield node
