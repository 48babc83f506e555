"""Networks whose worker keeps to one core, for benchmarks where each worker is to have its own.

A job names them as import strings, so whoever builds the network, to measure or to train, is pinned
then; a process that is no worker stays where it was.
"""

from __future__ import annotations

import os

from torch import nn

from batchwright.workload.task import build_network
from benchmarks.harness.loads import pin

RESNET8 = "benchmarks.harness.pinned:resnet8"
SIDE = 32


def resnet8(num_classes: int) -> nn.Module:
    """`resnet8`; its worker, if it is one, runs on the core of its local rank."""
    rank = os.environ.get("LOCAL_RANK")
    if rank is not None and int(os.environ.get("RANK", "0")) >= 0:
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) > 1:  # else it is pinned already
            pin(cores[int(rank) % len(cores)])
    return build_network("resnet8", classes=num_classes, side=SIDE)
