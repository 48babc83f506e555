"""One worker process of a probe: ``python -m batchwright.probing.worker FOLDER COUNTS MEETING FD``.

FOLDER holds ``job.json``; COUNTS are the numbers of workers that commands may name, separated by
commas; the workers find each other through the file MEETING; commands come through the socket with
the file descriptor FD, and rank 0 answers through it.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

from batchwright.distributed.group import Group
from batchwright.distributed.processes import worker_main
from batchwright.errors import SharedMemoryError
from batchwright.probing.commands import TrialRun, read_command
from batchwright.probing.executor import Executor
from batchwright.records import Job, Record
from batchwright.records.documents import read_record
from batchwright.workload.host import enter, prepare_process, resolve_device, worker_threads

NO_SHARED_MEMORY = 71  # exit code (EX_OSERR): a loader process lacked shared memory for its batches
_LOADER_KILLED = re.compile(r"DataLoader worker .* is killed by signal: Killed")


class Ready(Record):
    """Rank 0's message once all workers have joined the group."""


def _main() -> None:
    folder, counts, meeting, descriptor = sys.argv[1:]
    with suppress(OSError):  # where memory runs out, the kernel is to end this process (Linux)
        Path("/proc/self/oom_score_adj").write_text("1000")
    job = read_record(Path(folder) / "job.json", Job)
    allocator = prepare_process(worker_threads(int(os.environ["LOCAL_WORLD_SIZE"])))
    device = enter(resolve_device(job.device, int(os.environ["LOCAL_RANK"])))
    with socket.socket(fileno=int(descriptor)) as line:
        group = Group(device, job.timeout, meeting=Path(meeting))
        executor = Executor(job, group, [int(count) for count in counts.split(",")], allocator)

        def answer(record: Record) -> None:
            if group.rank == 0:
                line.sendall(record.model_dump_json().encode() + b"\n")

        answer(Ready())
        with line.makefile("rb") as commands:
            for text in commands:
                try:
                    answer(
                        executor.carry_out(
                            read_command(text), lambda share: answer(TrialRun(done=share))
                        )
                    )
                except SharedMemoryError:
                    os._exit(NO_SHARED_MEMORY)
                except RuntimeError as error:
                    if _LOADER_KILLED.search(str(error)):  # memory ran out, as where this is killed
                        os.kill(os.getpid(), signal.SIGKILL)
                    raise
    group.close()


if __name__ == "__main__":
    worker_main(_main)
