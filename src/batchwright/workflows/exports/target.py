"""The target of an export, and a program that plans are exported to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from batchwright.records import Plan
from batchwright.records.text.formatting import counted, local_batches


@dataclass(frozen=True)
class Target:
    """Where and how an exported plan will run.

    Attributes:
        hosts: Number of hosts, which share the workers evenly.
        plan: Path of the plan's file on the hosts.
        run: Path of the run folder on the hosts; with several hosts, on a disk that they share.
        settings: Further settings of the program, by the names of `Export.settings`.
        beside: Local folder of the exported file.
    """

    hosts: int = 1
    plan: str = "plan.json"
    run: str = "run"
    settings: Mapping[str, str] = field(default_factory=dict)
    beside: str = "."


@dataclass(frozen=True)
class Export:
    """A program that plans can be written for.

    Attributes:
        name: Name of the program.
        words: Description of the file.
        write: Makes the file's text; raises a `PlanError` for a plan that the program cannot
            follow.
        settings: Further settings of the program, with their meanings.
        required: Settings that must be given.
        keeps_run: Whether the file names the run folder.
    """

    name: str
    words: str
    write: Callable[[Plan, Target], str]
    settings: Mapping[str, str] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    keeps_run: bool = True


def headline(plan: Plan) -> str:
    """The plan in one line, without characters of names that could end a comment or text."""
    stage = plan.stages[-1]
    names = f"{plan.network.name} on {plan.data.name}"
    plain = "".join(c if c.isprintable() and c not in '"\\' else " " for c in names)
    return (
        f"{' '.join(plain.split())}: {counted(plan.workers, 'worker')}, global batch "
        f"{stage.global_batch_size} ({local_batches(stage.local_batch_sizes)}), "
        f"{counted(plan.epochs, 'epoch')}"
    )
