"""What the service keeps: plain values and records in, records out.

Each part of the store speaks for one table or two. Nothing here knows of HTTP or of pages; what
cannot be done is told as a `problems.ServiceProblem`.
"""

from batchwright.service.store.store import Clock, Store

__all__ = ["Clock", "Store"]
