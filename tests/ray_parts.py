"""What tests of Ray need on the nodes, which import it: a network to wait for, reports to look at.

Environment variables name files for both.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from ray.train.v2._internal.execution.callback import ReportCallback
from torch import nn

import kept_network

REPORTS, GO = "TEST_RAY_REPORTS", "TEST_RAY_GO"


class Kept(ReportCallback):
    """Keeps what was reported to Ray Train; runs in its controller."""

    def after_report(self, training_report, metrics):
        """Called once for a report of all workers."""
        del training_report
        with Path(os.environ[REPORTS]).open("a", encoding="utf-8") as file:
            file.write(json.dumps(metrics) + "\n")


class Paced(nn.Module):
    """Trains slowly until a file says go."""

    def __init__(self, classes):
        super().__init__()
        self.inner = kept_network.network(classes)

    def forward(self, images):
        """As the inner network."""
        if self.training and not Path(os.environ[GO]).exists():
            time.sleep(0.2)
        return self.inner(images)


def paced(num_classes):
    """The network of the tests' plans."""
    return Paced(num_classes)
