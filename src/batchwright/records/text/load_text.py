"""What disturbed measurements, in words."""

from __future__ import annotations

from batchwright.records.profile import MachineLoad
from batchwright.records.text.formatting import counted, percent

BUSY_SHARE = 0.05
"""Share of the cores from which on others' work is told. On two cores beside one program that never
waits it was 0.35 to 0.5; programs that mostly wait, and the display, took less than 0.01."""

IDLE_SHARE = 0.5
"""Share of the cores above which, left idle, others' work cannot have been in the way."""

UNSTEADY = 0.5
"""Scatter from visit to visit from which on the machine is called unsteady, whatever the cause.
Over the few visits of a short probe it was up to 0.27 on a quiet machine."""


def load_words(load: MachineLoad | None) -> str:
    """What disturbed measurements, in a sentence without its full stop; empty if nothing.

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
    found = disturbances(load, room=load.idle > IDLE_SHARE * load.cores)
    if load.scatter is not None and (found or load.scatter >= UNSTEADY):
        found.append(f"the same step scattered by {percent(load.scatter)}")
    return ", and ".join(found)


def disturbances(load: MachineLoad, *, room: bool = False) -> list[str]:
    """Who takes a good share of the cores besides us, each in words.

    With ``room``, cores were idle beside all that ran: only a limit can have kept us from them.
    """
    told = [("a control group's limit kept back", load.throttled)]
    if not room:
        others = ("other programs used", load.others)
        told = [others, ("the host of this virtual machine took", load.stolen), *told]
    return [
        f"{who} {_of(used, load.cores)}" for who, used in told if used >= BUSY_SHARE * load.cores
    ]


def _of(used: float, cores: int) -> str:
    """Cores that are used, among those that we may use or on a machine that has more."""
    if used > cores:
        return f"{used:.2f} cores, where we may use {cores}"
    return f"{used:.2f} of {counted(cores, 'core')}"


def busy_warning(load: MachineLoad | None) -> str:
    """What a busy machine means for a profile and its plans, in a line; empty if it was quiet."""
    told = load_words(load)
    if not told:
        return ""
    return (
        f"the machine was busy while it was measured: {told}; times may be too long or too short: "
        "probe again while it is quiet"
    )
