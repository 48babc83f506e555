"""Trainings at the scale of the papers: ResNet-18 on all of CIFAR-100.

They are not probed: batches, schedule and times of a step are the published ones.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import batchwright as bw
from batchwright.records import Plan, RunSummary
from batchwright.workload.host import computes_in_bfloat16
from benchmarks.harness.plans import job_from, opened, planned

if TYPE_CHECKING:
    from benchmarks.gpu.steps import Here

SIDES, TIMES = (24, 32), ((0.000352682, 0.000505636), (0.014788833, 0.015562114))
LARGE_BATCHES = (600, 560)
PUBLISHED_EPOCHS, SHORT_EPOCHS = 140, 14
POSTER_EPOCHS, POSTER_BASE_BATCH = 20, 4
POSTER_BATCHES = tuple(times * POSTER_BASE_BATCH for times in (240, 60))
POSTER_WARMUPS = (0, 5, 10, 20)  # of 90 epochs


def short(here: Here) -> None:
    """The most valuable trainings of each kind, at the papers' scale except for the epochs.

    A tenth of the epochs of `hybrid` and of large batches alone, and the poster's larger batch
    without warm-up and with the one that was best in the poster.
    """
    for what, small, cycles in (("hybrid, 3 of 4 small", 3, True), ("large batches", 0, False)):
        prefix = f"{what}, {SHORT_EPOCHS} epochs: "
        if not here.has(f"{prefix}real seconds"):
            published(here, small=small, cycles=cycles, epochs=SHORT_EPOCHS, prefix=prefix)
    poster(here, POSTER_BATCHES[:1], (0, 10))


def published(
    here: Here, *, small: int, cycles: bool, epochs: int = PUBLISHED_EPOCHS, prefix: str = ""
) -> None:
    """Train one cell of experiment C of the dual-batch paper.

    Four virtual workers and a server, 140 epochs, k = 1.05, `cycle.preset=cifar100`.

    Args:
        here: The step that runs.
        small: Number of workers with the small batch.
        cycles: Whether each stage goes through 24 and 32 px, as in `hybrid`; else all is at 32 px.
        epochs: Number of epochs.
        prefix: Beginning of the names of findings.
    """
    plan = published_plan(here, small=small, cycles=cycles, epochs=epochs)
    real, summary = _trained(here, plan)
    seconds = sum(epoch.training_seconds for epoch in summary.epochs)
    here.found(f"{prefix}held-out accuracy", summary.accuracy)
    here.found(f"{prefix}held-out loss", summary.epochs[-1].val_loss)
    here.found(f"{prefix}simulated seconds", seconds)
    here.found(f"{prefix}real seconds", real)


def published_plan(here: Here, *, small: int, cycles: bool, epochs: int = PUBLISHED_EPOCHS) -> Plan:
    """The plan of a cell; arguments as of `published`."""
    levels = slice(None) if cycles else slice(1, None)
    large = [batch // 10 if here.tiny else batch for batch in LARGE_BATCHES[levels]]
    per_level: dict[str, Any] = {
        "resolutions": SIDES[levels],
        "dual": {
            "small_workers": small,
            "extra_time": 1.05 if small else 1.0,
            "large_batches": large,
        },
        "virtual": {"sample_seconds": TIMES[0][levels], "step_seconds": TIMES[1][levels]},
        "cycle": {"preset": "cifar100"},
    }
    if not cycles:
        per_level |= {"cycle": {"preset": "cifar100", "order": "fixed"}, "dropout": 0.2}
    return _plan(
        here,
        "method=hybrid launch=virtual workers=4 evaluate_epochs=5",
        epochs=3 if here.tiny else epochs,
        **per_level,
    )


def poster(
    here: Here, batches: Sequence[int] = POSTER_BATCHES, warmups: Sequence[int] = POSTER_WARMUPS
) -> None:
    """Train with the poster's warm-ups at 240 and 60 times the base batch, at least 1,000 steps."""
    epochs = 2 if here.tiny else POSTER_EPOCHS
    for batch, warmup in product(batches, warmups):
        what = f"batch {batch}, warm-up {warmup} of 90 epochs: held-out accuracy"
        if here.has(what):
            continue
        plan = _plan(
            here,
            f"method=plain launch=in-process workers=1 global_batch={batch} micro_batch={batch} "
            f"learning_rate=0.0125 base_batch={POSTER_BASE_BATCH} scaling=linear decay=steps "
            f"weight_decay=5e-5 warmup_epochs={epochs * warmup / 90:.4f} evaluate_epochs={epochs}",
            epochs=epochs,
            resolutions=(32,),
        )
        here.found(what, _trained(here, plan)[1].accuracy)


def _plan(here: Here, words: str, **keys: Any) -> Plan:
    known = opened(here.image_data(), "resnet8" if here.tiny else "resnet18", 32)
    precision = "bfloat16" if computes_in_bfloat16(here.device) else "float32"
    job = job_from(
        f"network={known.network.name} device={here.kind} precision={precision} {words}",
        data=known.data,
        **keys,
    )
    return planned(job, known)


def _trained(here: Here, plan: Plan) -> tuple[float, RunSummary]:
    """Train by a plan: real seconds, and the run's summary."""
    began = time.monotonic()
    folder = here.work / f"{here.name}-{len(list(here.work.iterdir()))}"
    summary = bw.train(plan, run_folder=folder)
    return time.monotonic() - began, summary
