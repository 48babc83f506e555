"""Rounds with a parameter server in words: rows that page and terminal show alike."""

from __future__ import annotations

from batchwright.records import Plan, RunSummary
from batchwright.records.text.formatting import counted, duration, local_batches, percent
from batchwright.reporting.data.round_curves import all_rounds, lanes


def server_words(plan: Plan) -> str:
    """How a plan's server merges, in a few words; empty without one."""
    rule = plan.server
    if rule is None:
        return ""
    order = {
        "bsp": "all wait for each other (BSP)",
        "ssp": f"at most {counted(rule.staleness or 0, 'round')} ahead of the slowest (SSP)",
        "asp": "nobody waits (ASP)",
    }[rule.consistency]
    often = "once a round"
    if rule.exchange_steps is not None:
        often = f"every {counted(rule.exchange_steps, 'step')}"
    merge = "" if rule.consistency == "bsp" else f", merge {rule.merge}"
    return f"{order}{merge}, factor {rule.update_factor}, {often}, momentum {rule.momentum}"


def round_facts(summary: RunSummary) -> list[tuple[str, str]]:
    """The rounds of a run as (word, value); empty without any."""
    told = all_rounds(summary)
    if told is None:
        return []
    facts = [
        ("server", server_words(summary.plan)),
        ("rounds", f"{told.rounds:,}"),
        (
            "spread of finish times, (latest - earliest) / mean",
            "-" if told.spread is None else f"{percent(told.spread)} (median epoch)",
        ),
        (
            "measured / predicted round",
            "nothing was predicted"
            if told.over_predicted is None
            else f"{told.over_predicted:.3f} (median epoch)",
        ),
        ("push, merge and pull", f"{percent(told.exchange_share)} of a round"),
        ("waiting for others", f"{percent(told.wait_share)} of the workers' time"),
        ("largest lead", counted(told.lead, "round")),
    ]
    if summary.simulated:
        del facts[3]  # its time is computed from the predicted one
    return facts


def round_rows(summary: RunSummary) -> list[list[str]]:
    """The workers' rounds: head first, then a row for each."""
    rows = [["worker", "batch", "rounds", "samples", "training", "exchange", "wait", "lead"]]
    for lane in lanes(summary):
        batches = tuple(dict.fromkeys(one.local_batch_size for one in lane.rounds))
        rows.append(
            [
                lane.label,
                local_batches(batches) if len(batches) < 2 else f"{min(batches)} to {max(batches)}",
                f"{len(lane.rounds):,}",
                f"{sum(one.samples for one in lane.rounds):,}",
                *(duration(lane.seconds(part)) for part in ("compute", "exchange", "wait")),
                str(max((one.lead for one in lane.rounds), default=0)),
            ]
        )
    return rows
