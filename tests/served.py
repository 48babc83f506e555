"""Plans with a parameter server, for tests."""

from __future__ import annotations

from typing import Any

import samples
from batchwright.records import LearningRateRule, Plan, ServerRule
from test_session import make_tiny_plan

CONSTANT = LearningRateRule(
    base=0.1, base_batch=8, scaling="none", peak=0.1, warmup_epochs=0, decay="none"
)


def make_server(**changes: Any) -> ServerRule:
    """Everyone for themselves, by the journal's rule, whole weights once a round."""
    return samples.make_server(**({"small_workers": 0, "extra_time": 1.0} | changes))


def serve(
    plan: Plan, shares: tuple[int, ...], factors: tuple[float, ...] = (), **server: Any
) -> Plan:
    """The plan with a parameter server.

    Args:
        plan: Any other.
        shares: Samples per round of each worker, an epoch in all.
        factors: Update factors; unset: all 1.
        server: Changes to `make_server`.
    """
    factors = factors or (1.0,) * len(shares)
    rows = {"samples_per_round": shares, "update_factors": factors}
    return plan.model_copy(
        update={
            "method": "dual-batch",
            "merge": "parameter server",
            "server": make_server(**server),
            "stages": tuple(stage.model_copy(update=rows) for stage in plan.stages),
        }
    )


def make_served_plan(
    batches: tuple[int, ...], shares: tuple[int, ...], *, server: Any = None, **changes: Any
) -> Plan:
    """A plan for points, whose job leaves the shares as planned."""
    factors = changes.pop("factors", ())
    changes = {"rule": CONSTANT, "dual": {"shares": "planned"}} | changes
    plan = make_tiny_plan(batches, samples=sum(shares), **changes)
    return serve(plan, shares, factors, **(server or {}))
