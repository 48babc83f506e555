"""An agent as a process of its own, whose verbs are those of `fake_verbs`.

python -m agents URL FOLDER NAME
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from batchwright.client import job_work
from batchwright.client.agent import Agent
from batchwright.client.http import Service, find_token
from batchwright.distributed.processes import PARENT_PID
from batchwright.errors import BatchwrightError
from batchwright.records.service import AgentIntroduction

if __name__ == "__main__":
    os.environ.pop(PARENT_PID, None)  # it is no worker of what has forked it
    job_work.VERBS = "fake_verbs"
    url, folder, name = sys.argv[1:]
    token = find_token(url)
    assert token is not None
    introduction = AgentIntroduction(name=name, allow=())
    try:
        with Service(url, token, answer_seconds=10.0) as service:
            Agent(service, token, Path(folder), introduction, tell=print).work()
    except BatchwrightError as error:
        print(error, flush=True)  # noqa: T201
        sys.exit(error.exit_code)
