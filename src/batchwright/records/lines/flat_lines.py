"""Flat lines: one name for each value, grouped by slashes, as experiment trackers show them.

Records are exported as flat lines, and earlier versions wrote ``metrics.jsonl`` in this form. One
table of names serves both. An epoch's flat line holds less than its record; `completed` fills in
what other lines of the run hold of the epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter

from batchwright.records.lines.run_lines import EpochLine, RunLine, SharesLine, StepLine
from batchwright.records.profile import DataFacts
from batchwright.records.run import EpochRecord, LocalBatches

_ENDS = ("mean", "least", "most")
_NAMES: dict[str, dict[str, str]] = {
    "step": {
        "epoch": "epoch",
        "step": "step",
        "steps": "steps",
        "time/train_s": "training_seconds",
        "train/loss": "train_loss",
        "throughput/samples_per_sec": "samples_per_second",
        "lr": "learning_rate",
        "batch/global": "global_batch_size",
    },
    "shares": {"epoch": "epoch", "step": "step", "steps": "steps"},
    "epoch": {
        "epoch": "record.epoch",
        "epochs": "epochs",
        "train/loss": "record.train_loss",
        "val/loss": "record.val_loss",
        "val/top1": "record.top1",
        "time/epoch_s": "record.training_seconds",
        "time/eval_s": "record.evaluation_seconds",
        "time/checkpoint_s": "record.checkpoint_seconds",
        "throughput/samples_per_sec": "record.samples_per_second",
        "lr": "record.learning_rate",
        "resolution": "record.resolution",
        "batch/global": "record.global_batch_size",
        "steps/skipped": "record.skipped_steps",
        "steps/repeated": "record.repeated_steps",
        "plan/predicted_epoch_s": "predicted_seconds",
        "gns/simple": "record.noise_scale",
        "track/gradient_norm": "record.gradient_norm",
        "track/hessian": "record.hessian_eigenvalue",
        "plan/predicted_top1": "predicted_top1.value",
        "plan/predicted_top1_low": "predicted_top1.low",
        "plan/predicted_top1_high": "predicted_top1.high",
        "run/expected_top1": "expected_top1.value",
        "run/expected_top1_low": "expected_top1.low",
        "run/expected_top1_high": "expected_top1.high",
        "run/likely_epochs": "likely_epochs",
        **{f"ags/factor_{end}": f"record.gradient_factors.{end}" for end in _ENDS},
        **{f"lr/gain_{end}": f"record.rate_gain.{end}" for end in _ENDS},
    },
    "round": {
        "round": "record.number",
        "worker": "record.worker",
        "epoch": "record.epoch",
        "resolution": "record.resolution",
        "batch/local": "record.local_batch_size",
        "samples": "record.samples",
        "steps": "record.steps",
        "steps/skipped": "record.skipped_steps",
        "steps/repeated": "record.repeated_steps",
        "factor": "record.update_factor",
        "train/loss": "record.loss",
        "lead": "record.lead",
        "time/start_s": "record.start",
        "time/compute_s": "record.compute_seconds",
        "time/exchange_s": "record.exchange_seconds",
        "time/wait_s": "record.wait_seconds",
        "time/eval_s": "record.evaluation_seconds",
        "memory/peak_bytes": "record.peak_bytes",
        "lr": "learning_rate",
        "committed": "committed",
    },
    "evaluation": {"epoch": "epoch", "val/top1": "top1"},
    "note": {"text": "text"},
}
"""Flat names of each kind of line, and the path of each value in the record."""

_OF_WORKERS: dict[str, dict[str, str]] = {
    "step": {
        "batch/local/{}": "local_batch_size",
        "time/rank{}/compute_s": "compute_seconds",
        "time/rank{}/wait_s": "wait_seconds",
    },
    "shares": {
        "batch/local/{}": "local_batch_size",
        "place/{}": "place",
        "speed/{}": "speed",
    },
    "epoch": {
        "batch/local/{}": "local_batch_size",
        "time/rank{}/input_s": "input_seconds",
        "time/rank{}/compute_s": "compute_seconds",
        "time/rank{}/wait_s": "wait_seconds",
        "time/rank{}/comm_s": "communication_seconds",
        "time/rank{}/loading_cpu_s": "loading_cpu_seconds",
        "memory/rank{}/peak_bytes": "peak_bytes",
    },
}
_DERIVED = {"step": ("global_batch_size",), "epoch": ("top1", "samples_per_second")}
_LINE: TypeAdapter[RunLine] = TypeAdapter(RunLine)
_ABSENT = object()


def flat_values(line: RunLine) -> dict[str, Any]:
    """A line's values under flat names, always in the same order.

    Values that the job does not have, such as factors without `ags.mode`, are left out; a value
    that is unknown for this line is `None`.
    """
    found: dict[str, Any] = {"kind": line.kind}
    for name, path in _NAMES[line.kind].items():
        value: Any = line
        for part in path.split("."):
            value = _ABSENT if value is None else getattr(value, part)
        if value is not _ABSENT and not (value is None and name.startswith(("track/", "run/"))):
            found[name] = value
    record = line.record if isinstance(line, EpochLine) else line
    for rank, worker in enumerate(getattr(record, "workers", ())):
        for pattern, field in _OF_WORKERS[line.kind].items():
            value = getattr(worker, field)
            if value or field != "loading_cpu_seconds":
                found[pattern.format(rank)] = value
    return found


def is_flat(values: Mapping[str, Any]) -> bool:
    """Whether the values of a parsed line are flat, and not those of a record."""
    return any("/" in name for name in values)


def from_flat(values: Mapping[str, Any], data: Callable[[], DataFacts] | None = None) -> RunLine:
    """The record of a flat line.

    An epoch's record lacks the workers' places and changes of local batches; its samples and steps
    are computed from its speed, and the number of evaluated images is that of the data.

    Args:
        values: The parsed line.
        data: Returns the facts of the run's data; called for epochs alone.

    Raises:
        ValueError: No run wrote this line, or it is that of an epoch and ``data`` is `None`.
    """
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in _NAMES:
        raise ValueError(f"there is no kind of line {str(kind)[:40]!r}")
    nested: dict[str, Any] = {"kind": kind}
    for name, path in _NAMES[kind].items():
        if name in values:
            *groups, last = path.split(".")
            place = nested
            for group in groups:
                place = place.setdefault(group, {})
            place[last] = values[name]
    record = nested.get("record", {}) if kind == "epoch" else nested
    if kind in _OF_WORKERS:
        record["workers"] = list(_workers(values, _OF_WORKERS[kind]))
    if kind == "epoch":
        if data is None:
            raise ValueError("an epoch's flat line needs the run's plan to be read")
        _measure(record, data())
    for name in _DERIVED.get(kind, ()):
        record.pop(name, None)
    return _LINE.validate_python(nested)


def _workers(values: Mapping[str, Any], names: Mapping[str, str]) -> Iterable[dict[str, Any]]:
    """The values of each worker in rank order, up to the first rank without a local batch."""
    for rank in range(len(values)):
        if f"batch/local/{rank}" not in values:
            return
        named = {field: pattern.format(rank) for pattern, field in names.items()}
        yield {field: values[name] for field, name in named.items() if name in values}


def _measure(record: dict[str, Any], data: DataFacts) -> None:
    """Compute an epoch's samples, steps and evaluated images from the values of its flat line."""
    try:
        speed, seconds = record.get("samples_per_second"), record.get("training_seconds")
        # Converted to numbers first: a text times a large number would take all memory.
        known = (float(speed), float(seconds)) if speed and seconds else None
        samples = data.train_samples if known is None else round(known[0] * known[1])
        total = sum(one["local_batch_size"] for one in record["workers"]) or 1
        for worker in record["workers"]:
            worker["samples"] = round(samples * worker["local_batch_size"] / total)
            worker["local_batch_size"] = max(1, worker["local_batch_size"])
        record["samples"] = samples
        record["steps"] = max(1, round(samples / record["global_batch_size"]))
        record.setdefault("skipped_steps", 0)
        top1 = record.get("top1")
        if top1 is not None and 0 <= top1 <= 1 and data.val_samples:
            record["val_correct"] = round(top1 * data.val_samples)
            record["val_count"] = data.val_samples
    except (TypeError, ValueError, KeyError, ArithmeticError) as error:
        raise ValueError(f"no epoch's line: {error!r}") from None


def completed(
    epochs: Iterable[EpochRecord], steps: Sequence[StepLine], shares: Sequence[SharesLine]
) -> list[EpochRecord]:
    """Epochs of flat lines with steps, places and local batches filled in from other lines."""
    lines: list[SharesLine | StepLine] = [*shares, *steps]
    steps_of = {line.epoch: line.steps for line in lines if line.steps}
    changes = sorted(shares, key=lambda line: (line.epoch, line.step))
    return [
        record
        if any(worker.place for worker in record.workers)
        else _completed(record, steps_of.get(record.epoch), changes, places_of(shares, record))
        for record in epochs
    ]


def places_of(shares: Sequence[SharesLine], record: EpochRecord | StepLine) -> tuple[str, ...]:
    """Host and device of each worker, from the newest line with as many workers; else empty."""
    alike = (line for line in reversed(shares) if len(line.workers) == len(record.workers))
    return tuple(worker.place for line in alike for worker in line.workers)[: len(record.workers)]


def _completed(
    record: EpochRecord, steps: int | None, shares: Sequence[SharesLine], places: Sequence[str]
) -> EpochRecord:
    ones = [line for line in shares if len(line.workers) == len(record.workers)]
    before = [line for line in ones if (line.epoch, line.step) <= (record.epoch, 0)]
    inside = [line for line in ones if line.epoch == record.epoch and line.step > 0]
    first = [LocalBatches(step=0, sizes=line.sizes) for line in before[-1:]]
    later = [LocalBatches(step=line.step, sizes=line.sizes) for line in inside] if first else []
    named = places or [f"rank {rank}" for rank in range(len(record.workers))]
    return record.model_copy(
        update={
            "steps": steps or record.steps,
            "shares": (*first, *later),
            "workers": tuple(
                worker.model_copy(update={"place": place})
                for worker, place in zip(record.workers, named, strict=True)
            ),
        }
    )
