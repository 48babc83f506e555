"""Measures in every worker process: ``python -m batchwright.probing.worker FOLDER``.

The folder holds ``job.json``; rank 0 leaves ``profile.json`` there and reports its progress in
``progress.jsonl``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from batchwright.documents import read_record, write_record
from batchwright.group import Group
from batchwright.probing.probe import measure
from batchwright.processes import worker_main
from batchwright.records import Job
from batchwright.workload.host import prepare_process, resolve_device, worker_threads


def _main() -> None:
    folder = Path(sys.argv[1])
    job = read_record(folder / "job.json", Job)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    allocator = prepare_process(worker_threads(int(os.environ["LOCAL_WORLD_SIZE"])))
    group = Group(resolve_device(job.device, local_rank), job.timeout)

    def progress(done: int, total: int, what: str) -> None:
        line = json.dumps({"done": done, "total": total, "what": what})
        with (folder / "progress.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    try:
        profile = measure(
            job,
            rank=group.rank,
            world_size=group.size,
            local_rank=local_rank,
            allocator=allocator,
            progress=progress if group.rank == 0 else None,
        )
        if profile is not None:
            write_record(profile, folder / "profile.json")
    finally:
        group.close()


if __name__ == "__main__":
    worker_main(_main)
