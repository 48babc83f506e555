"""MLflow: a run in the experiment ``batchwright``, found again by a tag."""

from __future__ import annotations

import time
from collections.abc import Mapping
from math import isfinite

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from batchwright.client.trackers.following import TrackedRun

EXPERIMENT, TAG = "batchwright", "batchwright.run"
_MAX_METRICS = 1000  # of a request
_STATES = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class _MLflow:
    def __init__(self, client: MlflowClient, run: TrackedRun) -> None:
        self._client, self._waiting = client, list[Metric]()
        found = client.get_experiment_by_name(EXPERIMENT)
        experiment = client.create_experiment(EXPERIMENT) if found is None else found.experiment_id
        others = client.search_runs([experiment], f"tags.`{TAG}` = '{run.id}'", max_results=1)
        if others:
            self._run = others[0].info.run_id
            client.update_run(self._run, status="RUNNING")
        else:
            tags = {TAG: run.id}
            self._run = client.create_run(experiment, tags=tags, run_name=run.name).info.run_id
        if not others or not others[0].data.params:  # an earlier process may have ended in between
            params = [Param(name, str(value)) for name, value in run.facts.items()]
            client.log_batch(self._run, params=params)
        # A process that was killed may have logged more than trackers.json says.
        metrics = others[0].data.metrics if others else ()
        self._newest = {  # by metric, the highest step with a value
            name: max(one.step for one in client.get_metric_history(self._run, name))
            for name in metrics
        }

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        self._waiting += [
            Metric(name, value, now, step)
            for name, value in values.items()
            if isfinite(value) and self._newest.get(name, -1) < step
        ]

    def flush(self) -> None:
        while self._waiting:
            self._client.log_batch(self._run, metrics=self._waiting[:_MAX_METRICS])
            del self._waiting[:_MAX_METRICS]

    def close(self, outcome: str) -> None:
        if outcome in _STATES:
            self._client.set_terminated(self._run, _STATES[outcome])


def open_tracker(place: str, run: TrackedRun) -> _MLflow:
    """The run at a tracking address; an empty one means MLflow's default."""
    return _MLflow(MlflowClient(tracking_uri=place or None), run)
