r"""Latency and bandwidth between two workers.

A message of one byte goes there and back: half of its time is the latency :math:`\alpha`. Large
messages of two sizes go one way, each answered by one byte. The time by which the larger one takes
longer gives the bandwidth,

.. math:: \beta = \frac{G_2 - G_1}{t_2 - t_1},

without the time of the answer or of a connection's slow start.
"""

from __future__ import annotations

from statistics import median

import torch
import torch.distributed as dist

from batchwright.distributed.group import Group
from batchwright.probing.commands import TimeLink
from batchwright.probing.measure.timing import now, spread
from batchwright.records import LinkTime

_PINGS, _WARM_UP = 50, 5
_FIRST_BYTES = 2**18  # of the message that shows which size fits into the time
_MIN_BYTES, _MAX_BYTES = 2**20, 2**28  # of the larger messages
_PAIRS = 5  # of a larger and a smaller message
_SMALLER = 4  # the larger message over the smaller one


def time_link(group: Group, command: TimeLink) -> LinkTime:
    """Time messages between rank 0 and its partner; only rank 0's result has a meaning.

    Args:
        group: The workers that carry the command out.
        command: Names the partner, and the time to spend.
    """
    two = _Two(group, command.partner)
    for _ in range(_WARM_UP):
        two.send(1)
    pings = sorted(two.send(1) / 2 for _ in range(_PINGS))
    two.send(_FIRST_BYTES)  # lets the connection's congestion window grow
    first = max(two.send(_FIRST_BYTES) - 2 * median(pings), 1e-9)
    in_time = command.seconds * _FIRST_BYTES / first / _PAIRS / (1 + 1 / _SMALLER)
    large = two.agreed(int(min(_MAX_BYTES, max(_MIN_BYTES, in_time))))
    small = large // _SMALLER
    rates = []
    for _ in range(_PAIRS):
        longer = two.send(large) - two.send(small)
        rates.append((large - small) / max(longer, 1e-9))
    low, latency, high = spread(pings)
    slow, rate, fast = spread(rates)
    return LinkTime(
        between=command.between,
        latency=latency,
        latency_low=low,
        latency_high=high,
        bandwidth=rate,
        bandwidth_low=slow,
        bandwidth_high=fast,
        bytes=large,
    )


class _Two:
    """Rank 0 and its partner; the methods do nothing on all other workers.

    The first call has to be `send`, whose messages go in both directions.
    """

    def __init__(self, group: Group, partner: int) -> None:
        self._group, self._partner = group, partner
        self._first = True
        self._answer = torch.zeros(1, dtype=torch.uint8, device=group.device)

    def send(self, size: int) -> float:
        """Send ``size`` bytes to the partner and one byte back; seconds, on rank 0."""
        group = self._group
        if group.rank not in (0, self._partner):
            return 1.0
        message = torch.zeros(size, dtype=torch.uint8, device=group.device)

        def there_and_back() -> None:
            if group.rank == 0:
                dist.send(message, self._partner, group=group.handle)
                dist.recv(self._answer, self._partner, group=group.handle)
            else:
                dist.recv(message, 0, group=group.handle)
                dist.send(self._answer, 0, group=group.handle)

        start = now(group.device)
        group.exchange(there_and_back, first=self._first)
        self._first = False
        return now(group.device) - start

    def agreed(self, size: int) -> int:
        """Rank 0's ``size``, on the partner as well."""
        group = self._group
        if group.rank not in (0, self._partner):
            return size
        agreed = torch.tensor([size], device=group.device)

        def one_way() -> None:
            if group.rank == 0:
                dist.send(agreed, self._partner, group=group.handle)
            else:
                dist.recv(agreed, 0, group=group.handle)

        group.exchange(one_way, first=False)
        return int(agreed.item())
