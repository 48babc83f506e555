"""An agent whose verbs are those of `stand_in_verbs`, for `benchmarks.service.jobs`.

python -m benchmarks.service.job_agent URL FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from batchwright.client import agent, job_work, lease_heartbeat
from batchwright.client.http import TOKEN, Service
from batchwright.records.service import AgentIntroduction

if __name__ == "__main__":
    url, folder = sys.argv[1], Path(sys.argv[2])
    job_work.VERBS = "benchmarks.service.stand_in_verbs"
    job_work.STOP_SECONDS = lease_heartbeat.BEAT_SECONDS = agent.ASK_SECONDS = 0.5
    introduction = AgentIntroduction(name=agent.usual_name(folder), chosen=False, allow=())
    with Service(url, os.environ[TOKEN], answer_seconds=3.0) as service:
        agent.Agent(service, "", folder, introduction, tell=print).work()
