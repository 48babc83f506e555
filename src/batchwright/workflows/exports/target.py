"""What is exported to, and the words that all exports share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from batchwright.records import Plan
from batchwright.records.text.formatting import counted, local_batches


@dataclass(frozen=True)
class Target:
    """Where a plan is to run.

    Attributes:
        hosts: How many; each has as many workers as the others.
        plan: Path of the plan's file there.
        run: Path of the run folder there; where there are several hosts, on a disk that they share.
        settings: More that the program wants to know, by the names of `Export.settings`.
        beside: Folder here that the written file is to lie in.
    """

    hosts: int = 1
    plan: str = "plan.json"
    run: str = "run"
    settings: Mapping[str, str] = field(default_factory=dict)
    beside: str = "."


@dataclass(frozen=True)
class Export:
    """A program that takes plans.

    Attributes:
        name: Of the program.
        words: What is written for it.
        write: Makes the file's text; a `PlanError` says why it cannot.
        settings: What it can be told besides, and what each means.
        required: Those of them that it has to be told.
        keeps_run: Whether the file says where the run is kept.
    """

    name: str
    words: str
    write: Callable[[Plan, Target], str]
    settings: Mapping[str, str] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    keeps_run: bool = True


def headline(plan: Plan) -> str:
    """What the plan is, in a line that ends no comment, whatever names hold."""
    stage = plan.stages[-1]
    names = f"{plan.network.name} on {plan.data.name}"
    plain = "".join(c if c.isprintable() and c not in '"\\' else " " for c in names)
    return (
        f"{' '.join(plain.split())}: {counted(plan.workers, 'worker')}, global batch "
        f"{stage.global_batch_size} ({local_batches(stage.local_batch_sizes)}), "
        f"{counted(plan.epochs, 'epoch')}"
    )
