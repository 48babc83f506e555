"""The batch script of a run: it requests nodes, and starts and restarts a task for each worker."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from batchwright.errors import JobError
from batchwright.records import Job

NOTICE_SECONDS = 120
"""Seconds before the time limit at which Slurm signals the run: enough for a step and a checkpoint,
and for the minute by which Slurm's signal may be early."""
STILL_SECONDS = 600
"""Seconds from the end of the first task to the kill of those that stand still, with a GPU or a
disk that hangs: the others have missed them, and the first may write a checkpoint for long."""
STOPPED = (138, 140, 143)
"""Exit codes of a run that USR1, USR2 or TERM has stopped after a checkpoint."""

_BODY = """\
set -u
trap : USR1 USR2 TERM  # they are for the tasks; this shell stays, to queue the job again
export BATCHWRIGHT_ENGINE=slurm
unset SLURM_EXPORT_ENV  # of --export=NONE, with which tasks would not get what is exported here
# srun no longer takes it from the job.
[ -z "${{SLURM_CPUS_PER_TASK:-}}" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
left={restarts}
while :; do
  # Tasks see by themselves when another is gone, and the first may write when others have ended.
  {before}srun --kill-on-bad-exit=0 --wait={still} {command}
  code=$?
  case $code in
    {stopped})
      # Otherwise it was cancelled, or Slurm has queued it again itself.
      case $(scontrol show job -o "$SLURM_JOB_ID") in
        *JobState=RUNNING*)
          echo "stopped by SIG$(kill -l "$code"): the job is queued again, to go on from there"
          scontrol requeue "$SLURM_JOB_ID"
          ;;
      esac
      exit "$code"
      ;;
  esac
  # 129, 130: somebody has stopped it for good, by scancel --signal=HUP or INT.
  if [ "$code" -le 130 ] || [ "$left" -eq 0 ]; then
    exit "$code"
  fi
  left=$((left - 1))
  echo "a task was killed (exit code $code): all are started again"
done
"""


def script(folder: Path, job: Job, command: Sequence[str]) -> str:
    """The script's text.

    Args:
        folder: The run folder, under the path that all nodes see.
        job: The job, with the resources to request.
        command: The command of each task.

    Raises:
        JobError: The folder's name cannot stand in a line of the script.
    """
    if not str(folder).isprintable():  # what follows a line break would be a command
        raise JobError(f"launch=slurm: {str(folder)!r} has a line break or the like: rename it")
    if "\\" in str(folder):  # which turns %j off in the log's name, and is taken out of it
        raise JobError(
            f"launch=slurm: {str(folder)!r} has a backslash, which Slurm drops: rename it"
        )
    name = "".join(c if c.isascii() and c.isalnum() else "-" for c in job.network.lower())
    options: dict[str, object] = {
        "job-name": f"batchwright-{name}"[:50].strip("-"),
        "nodes": job.nodes,
        "ntasks-per-node": tasks_per_node(job),
        "gpus-per-node": job.slurm.gpus_per_node,
        "partition": job.slurm.partition,
        "account": job.slurm.account,
        "time": job.slurm.time,
        "signal": f"USR1@{notice(job.slurm.time)}",
        "open-mode": "append",
        "output": f"{folder}/logs/slurm/".replace("%", "%%") + "%j.log",
    }
    asked = [f"--{key}={shlex.quote(str(value))}" for key, value in options.items() if value]
    lines = [f"#SBATCH {one}" for one in (*asked, "--requeue", *job.slurm.lines)]
    return "\n".join(["#!/bin/bash", *lines, body(shlex.join(command), job.restarts)])


def body(command: str, restarts: int, before: str = "") -> str:
    """The script after its options: `srun`, repeated after a killed task; requeues after a signal.

    Args:
        command: The command of each task, quoted for the shell.
        restarts: How often tasks are started again in the same job.
        before: Shell commands before each `srun`.
    """
    stopped = " | ".join(map(str, STOPPED))
    first = f"{before}\n  " if before else ""
    return _BODY.format(
        restarts=restarts, command=command, stopped=stopped, before=first, still=STILL_SECONDS
    )


def tasks_per_node(job: Job) -> int:
    """Workers on each node: those of the job, else one for each GPU, else one."""
    if isinstance(job.workers, int):
        return job.workers // job.nodes
    return job.slurm.gpus_per_node or 1


def notice(limit: str) -> int:
    """Seconds before a time limit at which Slurm signals the run: at most a quarter of the limit.

    With a notice longer than the limit Slurm would signal at the start, and the job never progress.
    """
    if not limit or not limit[0].isdigit():
        return NOTICE_SECONDS
    days, _, rest = limit.rpartition("-")
    parts = [int(one) for one in re.split(":", rest)]
    if days:  # days-hours[:minutes[:seconds]]
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:  # minutes[:seconds]
        hours, (minutes, seconds) = 0, (*parts, 0)[:2]
    whole = ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    return max(1, min(NOTICE_SECONDS, whole // 4))
