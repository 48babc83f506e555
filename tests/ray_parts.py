"""What tests of Ray need in its controller, which imports it: reports to look at.

An environment variable names their file.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from ray.train.v2._internal.execution.callback import ReportCallback

REPORTS = "TEST_RAY_REPORTS"


class Kept(ReportCallback):
    """Keeps what was reported to Ray Train; runs in its controller."""

    def after_report(self, training_report, metrics):
        """Called once for a report of all workers."""
        del training_report
        with Path(os.environ[REPORTS]).open("a", encoding="utf-8") as file:
            file.write(json.dumps(metrics) + "\n")
