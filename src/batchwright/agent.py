"""The agent's process: torch's elastic agent, told which ends of workers are worth a new start.

    python -m batchwright.agent SPECIFICATION

A killed or silent worker may do better next time, an error of a worker's own comes again.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as rendezvous

from batchwright.processes import AGENT_PID, PARENT_PID, die_with_parent
from batchwright.reports import AGENT_REPORT, RESTARTS_LOG, killed, reports_in

POLL_SECONDS = 0.1
_KILL_SECONDS = 25  # torch's agent kills those that it could not stop within 30 s


class Agent(LocalElasticAgent):
    """Starts all workers again after one was lost, and says so; ends them after one's own error.

    Args:
        spec: As torch's agent takes it.
        logs: Folder of reports and logs.
        shutdown_seconds: From a stop signal until workers are killed.
    """

    def __init__(self, spec: WorkerSpec, logs: Path, shutdown_seconds: int) -> None:
        specification = DefaultLogsSpecs(log_dir=str(logs), redirects=Std.ALL)
        super().__init__(spec, specification)
        self._shutdown_timeout = shutdown_seconds  # older versions have no argument for it
        self._logs = logs

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed() and self._remaining_restarts:
            reports = reports_in(self._logs)
            if reports and not reports[0]["secondary"]:
                self._remaining_restarts = 0
            else:
                self._tell(_what_happened(exit_codes(result.failures), reports))
        return result

    def _tell(self, what: str) -> None:
        most = self._worker_group.spec.max_restarts
        number = most - self._remaining_restarts + 1
        with (self._logs / RESTARTS_LOG).open("a", encoding="utf-8") as log:
            log.write(f"{what}; all were started again ({number} of {most})\n")


def exit_codes(failures: Mapping[int, ProcessFailure]) -> dict[int, int]:
    """Exit code of each worker that failed by rank, without those that the agent had to kill."""
    first = min((failure.timestamp for failure in failures.values()), default=0)
    return {
        rank: failure.exitcode
        for rank, failure in failures.items()
        if failure.timestamp < first + _KILL_SECONDS
    }


def _what_happened(codes: Mapping[int, int], reports: list[dict[str, Any]]) -> str:
    for rank, name in killed(codes):
        return f"worker {rank} was killed by {name}"
    if reports:
        return f"worker {reports[0]['rank']}: {reports[0]['message']}"
    rank, code = next(iter(codes.items()))
    return f"worker {rank} ended with exit code {code}"


def run_agent(specification: dict[str, Any]) -> int:
    """Run workers as `batchwright.launch.run_workers` specifies them; returns the exit code."""
    os.environ[AGENT_PID] = str(os.getpid())
    logs = Path(specification["logs"])
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=f"localhost:{specification['port']}",
        run_id="workers",
        min_nodes=1,
        max_nodes=1,
        local_addr="localhost",
    )
    spec = WorkerSpec(
        role="default",
        local_world_size=specification["workers"],
        entrypoint=sys.executable,
        args=("-m", specification["module"], *specification["arguments"]),
        rdzv_handler=rendezvous.get_rendezvous_handler(parameters),
        max_restarts=specification["restarts"],
        monitor_interval=POLL_SECONDS,
        local_addr="localhost",
    )
    agent = Agent(spec, logs, specification["grace"])
    try:
        result = agent.run()
    except SignalException:
        return 1  # the launcher's own: it knows
    finally:
        spec.rdzv_handler.shutdown()
    if result.is_failed():
        codes = exit_codes(result.failures)
        (logs / AGENT_REPORT).write_text(json.dumps(codes), encoding="utf-8")
        return 1
    return 0


if __name__ == "__main__":
    die_with_parent(PARENT_PID)
    sys.exit(run_agent(json.loads(sys.argv[1])))
