"""Records as a real run on digits writes them, for any test that needs one."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Sequence
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any
from unittest import mock

from rich.console import Console

from batchwright.records import (
    Cluster,
    CollectiveTime,
    DataFacts,
    EpochRecord,
    Estimate,
    GradientNoise,
    Job,
    LearningRateRule,
    MemoryParts,
    MemoryPoint,
    NetworkFacts,
    PairTime,
    Plan,
    Prediction,
    Profile,
    Reason,
    RoundRecord,
    RunSummary,
    ServerRule,
    Stage,
    StepTime,
    WorkerTime,
)
from batchwright.records.profile import JOINED

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRAIN, VAL, EPOCHS = 1437, 360, 30
LOCAL_BATCHES = (4, 8, 16, 32, 64)


def make_job(**changes: Any) -> Job:
    """Digits on two CPU workers, everything resolved."""
    settled = {
        "augment": "crop",
        "learning_rate": 0.1,
        "warmup_epochs": 0,
        "precision": "bfloat16",
        "device": "cpu",
        "workers": 2,
        "resolutions": (32,),
    }
    return Job(**(settled | changes))


def with_keys(words: Sequence[str], *keys: str) -> tuple[str, ...]:
    """Words of a command with these in place of those of the same job keys, which go once."""
    given = {key.partition("=")[0] for key in keys}
    return (*(word for word in words if word.partition("=")[0] not in given), *keys)


def make_data(**changes: Any) -> DataFacts:
    facts = {
        "name": "digits",
        "digest": "5e" * 32,
        "train_samples": TRAIN,
        "val_samples": VAL,
        "split": "every fifth image of each class, seed 0",
        "classes": tuple("0123456789"),
        "side": 32,
    }
    return DataFacts(**(facts | changes))


def make_network(**changes: Any) -> NetworkFacts:
    facts = {
        "name": "resnet8",
        "parameters": 75_290,
        "trained_bytes": 301_160,
        "batch_norm": True,
        "least_side": 8,
    }
    return NetworkFacts(**(facts | changes))


def make_step(
    workers: int, batch: int, resolution: int = 32, *, seconds: float | None = None
) -> StepTime:
    """A measured step with three visits, of which the middle one is the median."""
    compute = compute_seconds(batch, workers) if seconds is None else seconds
    sync = 0.0031 if workers > 1 else 0.0
    step = compute + sync
    return StepTime(
        resolution=resolution,
        local_batch_size=batch,
        workers=workers,
        compute_seconds=compute,
        sync_seconds=sync,
        step_seconds=step,
        step_low=0.96 * step,
        step_high=1.07 * step,
        repeats=30,
        visits=(0.99 * step, step, 1.02 * step),
    )


def make_memory(workers: int, batch: int, resolution: int = 32) -> MemoryPoint:
    """A measured peak; several workers keep buffers for the exchange."""
    peak = 1_250_000 + (301_160 if workers > 1 else 0) + 668_000 * batch
    return MemoryPoint(
        resolution=resolution,
        local_batch_size=batch,
        workers=workers,
        peak_bytes=peak,
        resident_bytes=190_000_000 + peak,
    )


def make_cluster(**changes: Any) -> Cluster:
    facts = {
        "device": "cpu",
        "device_name": "Xeon Platinum 8481C",
        "workers": 2,
        "cores": 2,
        "threads": 1,
        "memory_bytes": 3 * 2**30,
        "python": "3.11.2",
        "torch": "2.13.0",
        "allocator": f"glibc, mmap and trim thresholds raised{JOINED}",
    }
    return Cluster(**(facts | changes))


def make_profile(**changes: Any) -> Profile:
    """Digits measured with one and with two workers, three visits to each point."""
    points = [(workers, batch) for workers in (1, 2) for batch in LOCAL_BATCHES]
    measured = {
        "job": make_job(),
        "data": make_data(),
        "network": make_network(),
        "cluster": make_cluster(),
        "steps": tuple(make_step(workers, batch) for workers, batch in points),
        "memory": tuple(make_memory(workers, batch) for workers, batch in points),
        "memory_parts": MemoryParts(
            parameters=301_160,
            buffers=1_600,
            gradients=301_160,
            optimizer=301_160,
            reduction=301_160,
        ),
        "collectives": (
            CollectiveTime(
                bytes=40_000, workers=2, seconds=0.0026, low=0.0024, high=0.003, repeats=20
            ),
            CollectiveTime(
                bytes=4_000_000, workers=2, seconds=0.0033, low=0.003, high=0.0041, repeats=20
            ),
        ),
        "noise": GradientNoise(
            noise_scale=212.0, trace=3.1, sqr_norm=0.0146, relative_error=0.3, parts=2, repeats=40
        ),
        "evaluation_seconds_per_image": 0.00026,
        "probe_seconds": 17.4,
    }
    return Profile(**(measured | changes))


def compute_seconds(local_batch: int, workers: int = 2) -> float:
    """Step time of one worker: a fixed cost and a cost per image, in seconds.

    One worker alone has the memory to itself, and is a little quicker for each image.
    """
    per_image = 0.00087 if workers > 1 else 0.00081
    return 0.0052 + per_image * local_batch


def make_kind_profile(
    kind: str,
    speed: float = 1.0,
    *,
    sides: Sequence[int] = (96, 128, 160, 192, 224),
    batches: Sequence[int] = tuple(8 * n for n in range(1, 31)),
    fixed: float = 0.004,
    memory_bytes: int = 80 * 2**30,
    workers: Sequence[int] = (1,),
    **changes: Any,
) -> Profile:
    """A made-up kind of GPU on a large data set: time and memory are lines in the batch.

    A step of one worker takes (``fixed`` + 6e-8 s x pixels x batch) / ``speed``; the network
    between workers is stated in the job.
    """

    def seconds(side: int, batch: int) -> float:
        return (fixed + 6e-8 * side**2 * batch) / speed

    points = [(count, side, batch) for count in workers for side in sides for batch in batches]
    measured = {
        "job": make_job(
            data="imagefolder:made-up",
            network="resnet18",
            device="cuda",
            workers="auto",
            augment="crop-flip",
            warmup_epochs="auto",
            precision="float32",
            resolutions=tuple(sides),
            link={"latency": 2e-5, "bandwidth": 1e10},
        ),
        "data": make_data(
            name="imagefolder",
            train_samples=1_281_167,
            val_samples=50_000,
            side=max(sides),
            classes=tuple(map(str, range(1000))),
        ),
        "network": make_network(name="resnet18", parameters=11_689_512, trained_bytes=46_758_048),
        "cluster": make_cluster(
            device="cuda",
            device_name=f"GPU {kind}",
            kind=kind,
            workers=max(workers),
            memory_bytes=memory_bytes,
        ),
        "steps": tuple(
            make_step(1, batch, side, seconds=seconds(side, batch)).model_copy(
                update={"workers": count}
            )
            for count, side, batch in points
        ),
        "memory": tuple(
            MemoryPoint(
                resolution=side,
                local_batch_size=batch,
                workers=count,
                peak_bytes=180_000_000 + 60 * side**2 * batch,
            )
            for count, side, batch in points
        ),
        "collectives": (),
        "noise": None,
        "evaluation_seconds_per_image": 0.0005 / speed,
        "probe_seconds": 30.0,
    }
    return Profile(**(measured | changes))


def make_prediction(global_batch: int, workers: int = 2, **changes: Any) -> Prediction:
    local = global_batch // workers
    steps = TRAIN // global_batch
    step = compute_seconds(local) + 0.0031
    fields = {
        "workers": workers,
        "global_batch_size": global_batch,
        "local_batch_size": local,
        "micro_batch_size": local,
        "resolution": 32,
        "steps_per_epoch": steps,
        "step_seconds": Estimate(value=step, low=0.94 * step, high=1.08 * step),
        "epoch_seconds": Estimate(
            value=steps * step, low=0.93 * steps * step, high=1.09 * steps * step
        ),
        "peak_bytes": Estimate(
            value=1_250_000 + 668_000 * local, low=668_000 * local, high=2_500_000 + 668_000 * local
        ),
        "extrapolated": local > LOCAL_BATCHES[-1],
    }
    return Prediction(**(fields | changes))


def make_plan(**changes: Any) -> Plan:
    considered = tuple(make_prediction(batch) for batch in (8, 16, 32, 64, 96, 128))
    chosen = next(one for one in considered if one.global_batch_size == 96)
    fields = {
        "job": make_job(),
        "data": make_data(),
        "network": make_network(),
        "method": "plain",
        "update": "sgd",
        "precision": "bfloat16",
        "learning_rate": LearningRateRule(
            base=0.1, base_batch=128, scaling="sqrt", peak=0.0866, warmup_epochs=0, decay="cosine"
        ),
        "stages": (
            Stage(
                epochs=EPOCHS,
                resolution=32,
                learning_rate=0.0866,
                dropout=0.0,
                augmentation="crop",
                local_batch_sizes=(48, 48),
                micro_batch_size=48,
                predicted_epoch_seconds=chosen.epoch_seconds,
                predicted_bytes=chosen.peak_bytes,
            ),
        ),
        "considered": considered,
        "reasons": (
            Reason(
                choice="global batch",
                value="96 samples",
                why="The smallest of the candidates after which doubling saves less than 5 % of "
                "the epoch time, with at least 10 steps an epoch.",
                source="predicted",
            ),
            Reason(
                choice="precision",
                value="bfloat16",
                why="The processor computes in it.",
                source="measured",
            ),
            Reason(
                choice="learning rate",
                value="0.0866 per step",
                why="0.1 at batch 128, times the square root of 96 / 128.",
                source="published",
                reference="Krizhevsky, arXiv 1404.5997, 2014",
            ),
            Reason(
                choice="warm-up",
                value="0 epochs",
                why="The rate is not scaled up.",
                source="assumed",
            ),
        ),
    }
    return Plan(**(fields | changes))


def reason(plan: Plan, choice: str) -> Reason:
    return next(one for one in plan.reasons if one.choice == choice)


def make_epoch(epoch: int, **changes: Any) -> EpochRecord:
    """An epoch of the sample run: the first is slower, the second worker a little slower."""
    steps = TRAIN // 96
    wobble = 1 + 0.03 * ((epoch * 7) % 5 - 2) / 2
    compute = steps * compute_seconds(48) * wobble * (1.5 if epoch == 0 else 1)
    progress = (epoch + 1) / EPOCHS
    correct = round(VAL * (0.985 - 0.72 * (1 - progress) ** 6)) - epoch % 3
    fields = {
        "epoch": epoch,
        "resolution": 32,
        "global_batch_size": 96,
        "steps": steps,
        "skipped_steps": 0,
        "samples": TRAIN,
        "learning_rate": 0.0866 * (1 - progress),
        "train_loss": 0.03 + 2.1 * (1 - progress) ** 4,
        "val_loss": 0.06 + 1.9 * (1 - progress) ** 4 + 0.01 * (epoch % 3),
        "val_correct": correct,
        "val_count": VAL,
        "noise_scale": 150.0 + 20 * epoch,
        "training_seconds": compute + steps * 0.0058,
        "evaluation_seconds": 0.061,
        "checkpoint_seconds": 0.012,
        "workers": (
            WorkerTime(
                local_batch_size=48,
                samples=TRAIN - TRAIN // 2,
                input_seconds=steps * 0.0018,
                compute_seconds=compute * 0.95,
                communication_seconds=steps * 0.0034 + compute * 0.05,
            ),
            WorkerTime(
                local_batch_size=48,
                samples=TRAIN // 2,
                input_seconds=steps * 0.0019,
                compute_seconds=compute,
                communication_seconds=steps * 0.0032,
            ),
        ),
    }
    return EpochRecord(**(fields | changes))


def make_summary(**changes: Any) -> RunSummary:
    """The whole sample run: 30 epochs on digits, two workers."""
    epochs = tuple(make_epoch(epoch) for epoch in range(EPOCHS))
    inside = sum(e.training_seconds + e.evaluation_seconds + e.checkpoint_seconds for e in epochs)
    fields = {
        "run_folder": "runs/digits",
        "plan": make_plan(),
        "profile": make_profile(),
        "epochs": epochs,
        "setup_seconds": 4.2,
        "wall_seconds": 4.2 + inside + 0.9,
    }
    return RunSummary(**(fields | changes))


# ------------------------------------------------------------- two batch sizes, several resolutions

SMALL_OVER_LARGE = 0.9  # samples per round of a small-batch worker over those of a large-batch one


def make_server(**changes: Any) -> ServerRule:
    """As published: asynchronous, one exchange a round, a factor of the samples' ratio."""
    fields = {
        "consistency": "asp",
        "staleness": None,
        "merge": "journal",
        "update_factor": "ratio",
        "exchange_steps": None,
        "momentum": "keep",
        "small_workers": 1,
        "extra_time": 1.05,
    }
    return ServerRule(**(fields | changes))


def make_pair(**changes: Any) -> PairTime:
    fields = {
        "resolution": 32,
        "large_workers": 3,
        "small_workers": 1,
        "large_batch": 500,
        "small_batch": 83,
        "large_seconds": 0.3,
        "small_seconds": 0.06,
        "repeats": 5,
    }
    return PairTime(**(fields | changes))


def make_row(
    epochs: int,
    resolution: int = 32,
    batches: Sequence[int] = (64, 64, 64, 22),
    *,
    small: int = 1,
    **changes: Any,
) -> Stage:
    """A row of a plan with a server: the last ``small`` workers have fewer samples a round."""
    large = len(batches) - small
    ratio = SMALL_OVER_LARGE if large else 1.0
    of_large = round(TRAIN / (large + ratio * small))
    samples = [of_large] * large + [(TRAIN - large * of_large) // small for _ in range(small)]
    samples[-1] += TRAIN - sum(samples)
    seconds = round_seconds(batches[0], samples[0], resolution)
    fields = {
        "epochs": epochs,
        "resolution": resolution,
        "learning_rate": 0.1,
        "dropout": 0.0,
        "augmentation": "crop",
        "samples_per_round": tuple(samples),
        "update_factors": (1.0,) * large + (ratio,) * small,
        "local_batch_sizes": tuple(batches),
        "micro_batch_size": max(batches),
        "predicted_epoch_seconds": Estimate(value=seconds, low=0.95 * seconds, high=1.06 * seconds),
    }
    return Stage(**(fields | changes))


def round_seconds(local_batch: int, samples: int, resolution: int = 32) -> float:
    """A round of one worker by the sample step time, which falls with the image's area."""
    per_sample = compute_seconds(local_batch) / local_batch
    return samples * per_sample * (resolution / 32) ** 2


def make_dual_plan(**changes: Any) -> Plan:
    """Three workers with the large batch and one with the small one, at one resolution."""
    fields = {
        "job": make_job(method="dual-batch", workers=4),
        "method": "dual-batch",
        "merge": "parameter server",
        "server": make_server(),
        "stages": (make_row(6),),
        "considered": (),
    }
    return make_plan(**(fields | changes))


def make_hybrid_plan(**changes: Any) -> Plan:
    """Two stages of the learning rate, each at 16, 24 and 32 px, with a server."""
    fields = {
        "job": make_job(method="hybrid", workers=4, resolutions=(16, 24, 32)),
        "method": "hybrid",
        "learning_rate": LearningRateRule(
            base=0.1, base_batch=128, scaling="none", peak=0.1, warmup_epochs=0, decay="none"
        ),
        "stages": tuple(
            make_row(
                epochs,
                side,
                batches,
                learning_rate=0.1 / 10**stage,
                rate_stage=stage,
                dropout=dropout,
            )
            for stage, epochs in enumerate((4, 2))
            for side, batches, dropout in (
                (16, (192, 192, 192, 66), 0.1),
                (24, (96, 96, 96, 34), 0.2),
                (32, (64, 64, 64, 22), 0.3),
            )
        ),
    }
    return make_dual_plan(**(fields | changes))


def make_cyclic_plan(**changes: Any) -> Plan:
    """Two workers, exchanging at each step, through the resolutions of the hybrid plan."""
    rows = (
        row.model_copy(
            update={
                "samples_per_round": (),
                "update_factors": (),
                "local_batch_sizes": row.local_batch_sizes[:2],
            }
        )
        for row in make_hybrid_plan().stages
    )
    fields = {
        "job": make_job(method="cyclic", resolutions=(16, 24, 32)),
        "method": "cyclic",
        "merge": "sample-weighted all-reduce",
        "server": None,
        "stages": tuple(rows),
    }
    return make_hybrid_plan(**(fields | changes))


def make_rounds(
    plan: Plan,
    *,
    speeds: Sequence[float] = (),
    exchange: float = 0.004,
    evaluation: float = 0.061,
) -> tuple[RoundRecord, ...]:
    """The rounds of a plan with a server, in the order in which they end.

    Workers of these ``speeds``, one for each, take what `round_seconds` says, wait as the plan's
    consistency asks, and evaluate once for each epoch.
    """
    from batchwright.training.parameter_server.rounds import Rounds

    rounds = Rounds(plan, TRAIN)
    speeds = speeds or [1 - 0.01 * (worker % 3) for worker in range(plan.workers)]
    clock, done = 0.0, []
    ends: list[tuple[float, int]] = []  # of rounds that go on
    free = dict.fromkeys(range(plan.workers), 0.0)  # workers between two rounds, since when
    lead: dict[int, int] = {}
    began: dict[int, float] = {}
    last: dict[int, int] = {}  # index of each worker's last record
    scored = 0
    while not rounds.finished:
        for worker in sorted(free):
            if not rounds.ready(worker):
                continue
            lead[worker] = rounds.lead(worker)
            ticket = rounds.take(worker)
            since = free.pop(worker)
            if worker in last and clock > since:
                one = done[last[worker]]
                done[last[worker]] = one.model_copy(update={"wait_seconds": clock - since})
            if ticket is None:
                continue
            row = plan.stages[ticket.stage]
            batch = row.local_batch_sizes[worker]
            seconds = round_seconds(batch, ticket.samples, row.resolution) / speeds[worker]
            began[worker] = max(clock, since)
            ends.append((began[worker] + seconds, worker))
        ends.sort()
        clock, worker = ends.pop(0)
        ticket = rounds.commit(worker)
        row = plan.stages[ticket.stage]
        scores = rounds.epochs_done > scored
        scored = rounds.epochs_done
        last[worker] = len(done)
        done.append(
            RoundRecord(
                worker=worker,
                number=ticket.number,
                epoch=ticket.epoch,
                resolution=row.resolution,
                local_batch_size=row.local_batch_sizes[worker],
                samples=ticket.samples,
                steps=-(-ticket.samples // row.local_batch_sizes[worker]),
                update_factor=ticket.factor,
                loss=2.3 * 0.9**ticket.epoch,
                start=began[worker],
                compute_seconds=clock - began[worker],
                exchange_seconds=exchange,
                wait_seconds=0.0,
                evaluation_seconds=evaluation if scores else 0.0,
                lead=lead[worker],
            )
        )
        free[worker] = clock + exchange + (evaluation if scores else 0.0)
    return tuple(done)


def make_server_summary(
    plan: Plan | None = None, *, speeds: Sequence[float] = (), **changes: Any
) -> RunSummary:
    """A whole run with a parameter server: its rounds, and the epochs that are made of them."""
    plan = plan or make_hybrid_plan()
    rounds = make_rounds(plan, speeds=speeds)
    epochs, since, committed = [], [], 0
    for one in rounds:
        committed += one.samples
        since.append(one)
        while (len(epochs) + 1) * TRAIN <= committed:
            epochs.append(_epoch_of_rounds(plan, len(epochs), since))
            since = []
    inside = sum(e.training_seconds + e.evaluation_seconds for e in epochs)
    fields = {
        "plan": plan,
        "epochs": tuple(epochs),
        "rounds": rounds,
        "wall_seconds": 5.0 + inside,
    }
    return make_summary(**(fields | changes))


def _epoch_of_rounds(plan: Plan, epoch: int, rounds: Sequence[RoundRecord]) -> EpochRecord:
    row = plan.stages[plan.stage_of(epoch)]
    progress = (epoch + 1) / plan.epochs
    by_worker = [[r for r in rounds if r.worker == w] for w in range(plan.workers)]
    parts = ("compute", "wait", "exchange")
    times = [
        {part: sum(getattr(r, f"{part}_seconds") for r in ones) for part in parts}
        for ones in by_worker
    ]
    return make_epoch(
        epoch,
        resolution=row.resolution,
        global_batch_size=row.global_batch_size,
        steps=sum(r.steps for r in rounds),
        samples=sum(r.samples for r in rounds),
        learning_rate=row.learning_rate,
        noise_scale=None,
        train_loss=0.03 + 2.1 * (1 - progress) ** 4,
        val_loss=0.06 + 1.9 * (1 - progress) ** 4,
        val_correct=round(VAL * (0.985 - 0.72 * (1 - progress) ** 6)) - epoch % 3,
        training_seconds=fmean(sum(t.values()) for t in times),
        evaluation_seconds=sum(r.evaluation_seconds for r in rounds),
        checkpoint_seconds=0.0,
        workers=tuple(
            WorkerTime(
                place=f"node1/cpu:{worker}",
                local_batch_size=row.local_batch_sizes[worker],
                samples=sum(r.samples for r in by_worker[worker]),
                input_seconds=0.0,
                compute_seconds=times[worker]["compute"],
                wait_seconds=times[worker]["wait"],
                communication_seconds=times[worker]["exchange"],
            )
            for worker in range(plan.workers)
        ),
    )


def shown(renderable: Any, width: int = 80) -> str:
    """What a console of so many columns prints."""
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


def only_drawn(summary: RunSummary, name: str) -> Figure:
    """The figure of that file of a run, without those that `draw_run` draws beside it."""
    from batchwright.reporting.render import figures, image

    with mock.patch.object(figures, "figure", partial(partial, image.figure)):
        return dict(figures.draw_run(summary))[name]()


def png_that_claims(width: int, height: int) -> bytes:
    """A small PNG file whose header says that it is so large, and that has no pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        tail = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + tail

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")
