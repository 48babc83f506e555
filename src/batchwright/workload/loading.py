"""What loader processes deliver, and one clear line where they cannot start.

Python 3.14 starts processes by "forkserver" on Linux, others by "spawn", where earlier ones on
Linux forked. Then each loader process imports the script that was started, and gets its data set
pickled.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pickle import PicklingError
from typing import Any

from torch.utils.data import DataLoader

from batchwright.errors import DataError, PlanError

_ENDED = (
    "the loader processes ended as they started, and what they said stands above; each imports the "
    'script, so what it runs must stand under `if __name__ == "__main__":`; or give loaders=0'
)


def batches_of(loader: DataLoader[Any]) -> Iterator[Any]:
    """What ``loader`` delivers.

    Raises:
        DataError: What the loader processes need cannot be pickled.
        PlanError: They ended while they imported the script.
    """
    try:
        batches = iter(loader)
    except (PicklingError, AttributeError, TypeError) as error:  # what pickling may raise
        raise DataError(
            f"the data set cannot be sent to loader processes ({error}): define its class, and the "
            "functions that it calls, at the top level of a module, or give loaders=0"
        ) from error
    except (EOFError, ConnectionError):  # the fork server itself imports the script
        raise PlanError(_ENDED) from None
    try:
        first = next(batches, None)
    except RuntimeError as error:
        forked = multiprocessing.get_start_method() == "fork"
        if forked or not str(error).endswith("exited unexpectedly"):
            raise
        raise PlanError(_ENDED) from None
    if first is not None:
        yield first
        yield from batches
