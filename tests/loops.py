"""Arms of a made-up benchmark. Their processes import this module, so it imports little."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # where benchmarks are

from benchmarks.harness.turns import Turns


def counting(turns: Turns, images: int) -> None:
    """Steps of so many images that take no time."""
    turns.ready()
    while True:
        turns.step_done(images)


def failing(turns: Turns) -> None:
    """Ends before its first step."""
    turns.ready()
    raise SystemExit(3)


def summing(turns: Turns, folder: Path) -> None:
    """Steps of as many images as the workers' ranks, from 1, add up to; each leaves its cores."""
    import torch
    from torch import distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    (folder / str(rank)).write_text(str(os.sched_getaffinity(0)))
    total = torch.zeros(())
    turns.ready()
    while True:
        total.fill_(rank + 1.0)
        dist.all_reduce(total)
        turns.step_done(int(total))
