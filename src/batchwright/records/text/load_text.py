"""The load of a machine during measurements, in words."""

from __future__ import annotations

from batchwright.records.profile import MachineLoad
from batchwright.records.text.formatting import counted, percent

BUSY_SHARE = 0.05
"""Share of the cores from which on the work of others is reported."""

IDLE_SHARE = 0.5
"""Idle share of the cores above which the work of others cannot have disturbed ours."""

UNSTEADY = 0.5
"""Scatter between visits from which on it is reported whatever its cause."""


def load_words(load: MachineLoad | None) -> str:
    """What disturbed the measurements, as a sentence without its full stop; empty: nothing.

    >>> quiet = MachineLoad(
    ...     cores=2, seconds=9, ours=1.6, others=0.02, stolen=0, idle=0.38, throttled=0
    ... )
    >>> load_words(quiet), load_words(None)
    ('', '')
    >>> load_words(quiet.model_copy(update={"others": 0.8, "idle": 0.1, "scatter": 0.12}))
    'other programs used 0.80 of 2 cores, and the same step scattered by 12.0 %'
    """
    if load is None:
        return ""
    found = beside_steps(load)
    if load.scatter is not None and (found or load.scatter >= UNSTEADY):
        found.append(f"the same step scattered by {percent(load.scatter)}")
    return ", and ".join(found)


def beside_steps(load: MachineLoad | None) -> list[str]:
    """Others that took cores from steps that were timed, each in words; idle cores are room."""
    return disturbances(load, room=load.idle > IDLE_SHARE * load.cores) if load else []


def disturbances(load: MachineLoad, *, room: bool = False) -> list[str]:
    """Others that take at least `BUSY_SHARE` of the cores, each in words.

    With ``room`` there were idle cores besides, so that only a control group's limit can have kept
    our processes from using them.
    """
    users = [("a control group's limit kept back", load.throttled)]
    if not room:
        others = ("other programs used", load.others)
        users = [others, ("the host of this virtual machine took", load.stolen), *users]
    # A larger machine may have more cores in use than those that we may use.
    return [
        f"{who} {used:.2f} cores, where we may use {load.cores}"
        if used > load.cores
        else f"{who} {used:.2f} of {counted(load.cores, 'core')}"
        for who, used in users
        if used >= BUSY_SHARE * load.cores
    ]


def busy_warning(load: MachineLoad | None) -> str:
    """The warning about a profile of a busy machine, in a line; empty if the machine was quiet."""
    words = load_words(load)
    if not words:
        return ""
    return (
        f"the machine was busy while it was measured: {words}; times may be too long or too short: "
        "probe again while it is quiet"
    )
