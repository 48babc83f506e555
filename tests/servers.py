"""Plans with a parameter server, and models of a few numbers, for tests of the server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from batchwright.records import Plan, ServerRule, Stage
from batchwright.training.parameter_server.merging import Weights
from samples import make_data, make_job, make_plan, make_server


def make_rule(consistency: str = "asp", **changes: Any) -> ServerRule:
    return make_server(**({"consistency": consistency, "small_workers": 0} | changes))


def make_server_plan(
    shares: Sequence[int] = (6, 6),
    *,
    rule: ServerRule | None = None,
    epochs: int = 2,
    factors: Sequence[float] | None = None,
    batches: Sequence[int] | None = None,
    stages: Sequence[dict[str, Any]] = ({},),
    **changes: Any,
) -> Plan:
    """A plan whose data set is as large as the shares together; every stage takes ``epochs``."""
    made = tuple(
        Stage(
            **{
                "epochs": epochs,
                "resolution": 8,
                "learning_rate": 0.1,
                "dropout": 0.0,
                "augmentation": "none",
                "samples_per_round": tuple(shares),
                "update_factors": tuple(factors or [1.0] * len(shares)),
                "local_batch_sizes": tuple(batches or [2] * len(shares)),
                "micro_batch_size": 64,
                **fields,
            }
        )
        for fields in stages
    )
    fields = {
        "job": make_job(workers=len(shares), resolutions=(8,)),
        "data": make_data(train_samples=sum(shares)),
        "method": "dual-batch",
        "merge": "parameter server",
        "server": rule or make_rule(),
        "precision": "float32",
        "stages": made,
        "considered": (),
        "reasons": (),
    }
    return make_plan(**(fields | changes))


def numbers(*values: float, counters: Sequence[int] = ()) -> Weights:
    """A model of so many numbers."""
    return Weights(
        torch.tensor(values, dtype=torch.float32), torch.tensor(counters, dtype=torch.int64)
    )
