"""The `batchwright` command, with the usual rate of every optimizer a factor off.

    python -m benchmarks.planning.shifted_rates FACTOR COMMAND...

An arm of `benchmarks.planning.decisions`. The command has to run in one process (for a job:
`launch=in-process`): others would have the usual rates.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

from batchwright.cli import commands
from batchwright.records.registries.optimizers import OPTIMIZERS


@contextmanager
def usual_rates_times(factor: float) -> Iterator[None]:
    """Inside, the default rates of our optimizers are ``factor`` times as high in this process.

    Those for networks without batch normalization are, too.
    """
    shifted = {
        name: replace(
            one,
            rate=factor * one.rate,
            unnormalized_rate=one.unnormalized_rate and factor * one.unnormalized_rate,
        )
        for name, one in OPTIMIZERS.own.items()
    }
    with patch.dict(OPTIMIZERS._found, shifted):
        yield


def main() -> None:
    """Run the command."""
    factor = float(sys.argv.pop(1))
    with usual_rates_times(factor):
        commands.main()


if __name__ == "__main__":
    main()
