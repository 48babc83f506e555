"""The model card of a trained network: its use, accuracy, data, plan and licence."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from batchwright.records import EpochRecord, Plan, RunSummary
from batchwright.records.registries.networks import network_spec
from batchwright.records.text.formatting import counted, percent, significant
from batchwright.records.text.plan_facts import Fact, plan_facts
from batchwright.records.text.problems import printable
from batchwright.reporting.data.reading import compared_rows

UNKNOWN = "unknown"
RECALIBRATED = (
    "the run evaluated with statistics of batch normalization that were computed anew "
    "(cycle.recalibrate); these weights have those of training, so their accuracy may differ"
)
"""What is to be said of the weights where `recalibrates` is true."""

_MAX_CLASSES = 50  # class names that are listed
_MARKUP = re.compile(r"([\\`*_\[\]<>|&~$#])")  # characters with a meaning in Markdown or HTML


def model_card(
    summary: RunSummary,
    epoch: EpochRecord | None,
    config: Mapping[str, Any],
    *,
    licence: str = UNKNOWN,
    onnx: bool,
) -> str:
    """The card as Markdown, with the YAML head that model hubs read.

    Args:
        summary: The run's summary.
        epoch: The epoch after which the weights were taken; ``None``: unknown.
        config: The settings that are written beside the weights; see `save_model`.
        licence: Identifier of the licence, such as ``apache-2.0``.
        onnx: Whether there is an ONNX file.
    """
    plan, data = summary.plan, summary.plan.data
    facts = plan_facts(plan).items()
    at = "" if epoch is None else f" after epoch {epoch.epoch + 1} of {plan.epochs}"
    named, side, arguments = '"DIR"', config["side"], config["network_args"]
    if network_spec(plan.network.name) is None or arguments:
        named += f", network={plan.network.name!r}"
        named += f", network_args={arguments!r}" if arguments else ""
    # Files cannot be prepared as a user's own function prepared the images.
    what = "a tensor of images as the data set gave them"
    if config["mean"]:
        what = (
            "paths of image files or images of Pillow, which are prepared as the held-out ones "
            "were, or a tensor of RGB with values in [0, 1]"
        )
    some = ", ".join(data.classes[:_MAX_CLASSES])
    more = " ..." if len(data.classes) > _MAX_CLASSES else ""
    which = (
        "No licence was named: ask whoever gave you this before you use it."
        if licence == UNKNOWN
        else f"Of the weights: {licence}. That of the data is another matter."
    )
    averaged = "an average of " if plan.average_epochs else ""
    parts = [
        f"---\n{yaml.safe_dump({'license': licence})}pipeline_tag: image-classification\n"
        "tags:\n- image-classification\n- batchwright\n---",
        f"# {_plain(f'{plan.network.name} on {data.name}')}",
        f"{_plain(plan.network.name)}, {counted(plan.network.parameters, 'weight')}, trained on "
        f"{_plain(data.name)}: {averaged}the weights{at}.",
        "## Use",
        f"```python\nimport batchwright as bw\n\nmodel = bw.load_model({named})\n"
        "names = model.names(images)\n```",
        f"`images` are {what}, (n, {data.channels}, {side}, {side}); `model(tensor)` "
        "gives logits. The weights alone are in `model.safetensors`; `config.json` has mean and "
        "standard deviation by which the network wants its input normalized."
        + (" `model.onnx` is the same network, with that in it." if onnx else ""),
        "## What it reached",
        _accuracy(summary, epoch),
        _table(compared_rows(summary, naming_epoch=True)),
        "## Data",
        _table(
            [
                ["", ""],
                ["data", data.name],
                ["training images", f"{data.train_samples:,}"],
                ["held-out images", f"{data.val_samples:,} ({data.split})"],
                ["SHA-256", data.digest],
                ["classes", some + more],
            ]
        ),
        "## Training",
        _table([["choice", "value"], *(_fact(plan, k, v) for k, v in facts)]),
        "## Licence",
        which,
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def recalibrates(plan: Plan) -> bool:
    """Whether evaluations had statistics of batch normalization that no checkpoint has."""
    return plan.job.cycle.recalibrate > 0 and plan.network.batch_norm


def _accuracy(summary: RunSummary, epoch: EpochRecord | None) -> str:
    if epoch is None or epoch.top1 is None:
        return "The run's records have no held-out accuracy of these weights."
    chosen = ""
    if epoch.top1 == summary.best_accuracy:
        chosen = (
            " These are the epoch's that did best on the held-out images, so on others it may be a "
            "little lower."
        )
    if recalibrates(summary.plan):
        chosen += f" {RECALIBRATED[0].upper()}{RECALIBRATED[1:]}."
    return (
        f"After epoch {epoch.epoch + 1}: {percent(epoch.top1)} of the held-out images, "
        f"{epoch.val_correct:,} of {epoch.val_count:,}.{chosen}"
    )


def _fact(plan: Plan, name: str, value: Fact) -> list[str]:
    """The table row of a plan's value; a predicted accuracy names the plan's last epoch."""
    words = name.replace("_", " ")
    if name.startswith("predicted_accuracy") and isinstance(value, float):
        return [f"{words}, epoch {len(plan.epoch_accuracy)}", percent(value)]
    return [words, significant(value) if isinstance(value, float) else str(value)]


def _table(rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    head, *others = [_row(cells) for cells in rows]
    return "\n".join([head, "|" + "---|" * len(rows[0]), *others])


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(map(_plain, cells)) + " |"


def _plain(text: str) -> str:
    """The text as one line of Markdown, with special characters escaped."""
    return _MARKUP.sub(r"\\\1", printable(" ".join(text.split())))
