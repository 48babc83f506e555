"""Write docs/job.md, and the keys in docs/simulate.md, from the fields of records.

    python docs/job_page.py [--check]

Meanings and defaults are the records' own; units and examples stand here. A test checks that every
key has an example that is accepted, and that the page is in step.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic import BaseModel

from batchwright.planning.validation import PLANNING_KEYS
from batchwright.records import Disturbance, Job, Scenario, WorkerKind
from batchwright.records.text.job_keys import (
    default_words,
    described_field,
    field_of,
    job_keys,
)
from batchwright.workflows.job_changes import TRAINING_KEYS

PAGE = Path(__file__).with_name("job.md")
SIMULATE = Path(__file__).with_name("simulate.md")
KEYS_BEGIN, KEYS_END = "<!-- keys: written by docs/job_page.py -->", "<!-- /keys -->"

SECTIONS = {
    "data": "Data",
    "network": "Network and starting weights",
    "loss": "Learning",
    "precision": "Computing and workers",
    "global_batch": "Batch and resolution",
    "evaluate_epochs": "While it runs",
    "dual.small_workers": "Two batch sizes at once",
    "ags.mode": "Adaptive gradient scaling",
    "cycle.preset": "Cycles of resolutions",
    "virtual.sample_seconds": "The virtual cluster",
    "slurm.partition": "Slurm",
    "ray.address": "Ray",
    "probe.budget": "Measuring",
    "goal.objective": "What the plan aims for",
    "link.latency": "The network between machines",
}
"""First key of each section, in the record's order."""

NOTES = {
    "data": "How a probe measures loading: [probe](verbs.md#probe).",
    "loss": "Rate, warm-up and decay: [methods](methods.md#deciding), shown by "
    "[schedule](verbs.md#schedule). `scaling=gain`: [methods](methods.md#large-batches). Muon: "
    "[methods](methods.md#muon).",
    "precision": "`method=dynamic-batch`: [methods](methods.md#dynamic-batch-size). Keys of the "
    "other methods: below. Several machines: [hosts](hosts.md).",
    "dual.small_workers": "For `dual-batch` and `hybrid`: "
    "[two batch sizes](methods.md#two-batch-sizes-at-once), "
    "[parameter server](methods.md#parameter-server).",
    "ags.mode": "What the factors are: [methods](methods.md#large-batches).",
    "cycle.preset": "For `cyclic` and `hybrid`: [cycles](methods.md#cycles-of-resolutions), "
    "[low resolutions](methods.md#low-resolutions-that-are-cheap).",
    "virtual.sample_seconds": "For `launch=virtual`: [methods](methods.md#virtual-cluster).",
    "slurm.partition": "For `launch=slurm`: [Slurm](slurm.md).",
    "ray.address": "For `launch=ray`: [Ray](ray.md).",
    "probe.budget": "What is measured: [probe](verbs.md#probe).",
    "goal.objective": "How a plan is chosen, also among several kinds of workers (`goal.kinds`): "
    "[plan](verbs.md#plan), [methods](methods.md#deciding).\n\n"
    "`batchwright plan profile.json goal.kinds=prices.csv` reads kinds and prices from a file, "
    "one of:\n\n"
    "- your own, with the columns `kind` and `price` (of one worker for an hour) and, where known, "
    "`spot_price`, `preemptions_per_hour`, `count`, `memory`, `like` and `speed`;\n"
    "- a catalogue of SkyPilot's, with the columns `InstanceType`, `AcceleratorName`, "
    "`AcceleratorCount`, `vCPUs`, `MemoryGiB`, `Price`, `SpotPrice`, `Region` and "
    "`AvailabilityZone`. The cheapest place counts, and the price is that of one accelerator. "
    "Only accelerators that were measured count: those with the name of `probe.kind`, or a name "
    "that stands in the device's.\n\n"
    "A kind with a spot price becomes two, the second with `-spot` behind its name. There are as "
    "many as `count` says, else `goal.max_workers`, else (of a catalogue) those of the largest "
    "instance. In `run` and `sweep` the file prices only the workers that are there: at the spot "
    "price where a kind is called so, as by `probe.kind=a100-spot` or `BATCHWRIGHT_KIND`.",
    "link.latency": "For more workers than were measured: [plan](verbs.md#plan). How to get both: "
    "[hosts](hosts.md#a-plan-for-several-hosts).",
}
"""Links to further reading, by the first key of a section."""

LATER = {
    "optimizer": "probe; from `auto` to `sgd` or `muon` plan",
    "goal.deadline": "train",
}
"""Keys that may change at a later verb than `_verb` says, or only in part."""

TIME = "s, or as 90s, 2h"

UNITS = {
    "val": "share",
    "body_rate": "ratio",
    "label_smoothing": "share",
    "dropout": "share",
    "crop_scale": "share",
    "rotation": "turns",
    "zoom": "share",
    "betas": "share",
    "weight_decay": "per step and rate",
    "learning_rate": "per step",
    "base_batch": "samples",
    "warmup_epochs": "epochs",
    "warmup_start": "share",
    "clip_norm": "gradient norm",
    "rebalance_steps": "steps",
    "least_local_batch": "samples",
    "most_local_batch": "samples",
    "epochs": "epochs",
    "workers": "processes",
    "nodes": "machines",
    "global_batch": "samples per step",
    "loaders": "processes",
    "micro_batch": "samples",
    "resolutions": "pixels",
    "evaluate_epochs": "epochs",
    "checkpoint_seconds": TIME,
    "checkpoint_steps": "steps",
    "checkpoint_epochs": "epochs",
    "timeout": TIME,
    "restarts": "times",
    "dual.small_workers": "workers",
    "dual.extra_time": "ratio",
    "dual.large_batches": "samples",
    "server.staleness": "rounds",
    "server.exchange_steps": "steps",
    "ags.least": "ratio",
    "ags.most": "ratio",
    "ags.lookback": "steps",
    "ags.parts": "parts",
    "cycle.stage_epochs": "epochs",
    "cycle.stage_rates": "ratio",
    "cycle.shares": "parts",
    "cycle.batches": "samples per step",
    "cycle.dropouts": "share",
    "cycle.strengths": "ratio",
    "cycle.recalibrate": "batches",
    "virtual.sample_seconds": "s, or as 2ms",
    "virtual.step_seconds": "s, or as 2ms",
    "virtual.speeds": "ratio",
    "virtual.overheads": "ratio",
    "virtual.links": "ratio",
    "slurm.gpus_per_node": "GPUs",
    "ray.cpus_per_worker": "cores",
    "ray.gpus_per_worker": "GPUs",
    "ray.min_workers": "processes",
    "probe.budget": TIME,
    "probe.error": "share",
    "probe.steps": "steps",
    "probe.learning": f"share, or {TIME}",
    "goal.doubling_gain": "share",
    "goal.least_steps": "steps per epoch",
    "goal.memory": "bytes, or as 8GiB",
    "goal.deadline": TIME,
    "goal.max_cost": "currency",
    "goal.max_workers": "workers",
    "goal.price": "currency per hour",
    "goal.accuracy": "share",
    "goal.patience": "evaluations",
    "goal.preemptions_per_hour": "per hour",
    "goal.restart_seconds": TIME,
    "goal.checkpoint_cost": TIME,
    "goal.confidence": "probability",
    "goal.accuracy_tolerance": "share",
    "goal.tolerance": "share",
    "link.latency": "s, or as 2ms",
    "link.bandwidth": "bytes per second, or as 10Gbit/s",
}

EXAMPLES = {
    "data": "cifar100:~/data/cifar-100-python",
    "data_args": "{label: fine_label}",
    "val": "0.1",
    "unreadable": "skip",
    "network": "timm:resnet50",
    "network_args": "{pretrained: true}",
    "weights": "runs/a/checkpoints/best.pt",
    "frozen": "stem.*,stages.0.*",
    "body_rate": "0.1",
    "normalize": "0.485,0.456,0.406,0.229,0.224,0.225",
    "loss": "my_losses:focal",
    "label_smoothing": "0.1",
    "dropout": "0.2",
    "augment": "none",
    "crop_scale": "0.35",
    "rotation": "0.05",
    "zoom": "0.25",
    "optimizer": "adamw",
    "momentum": "0.95",
    "nesterov": "false",
    "betas": "0.9,0.95",
    "eps": "1e-6",
    "weight_decay": "1e-4",
    "learning_rate": "0.05",
    "base_batch": "256",
    "scaling": "linear",
    "warmup_epochs": "2.5",
    "warmup_start": "0.01",
    "warmup_law": "linear",
    "decay": "steps",
    "clip_norm": "1.0",
    "average_weights": "off",
    "batch_norm": "synchronized",
    "sampling": "balanced",
    "seed": "7",
    "epochs": "3",
    "precision": "float32",
    "compile": "auto",
    "cuda_graphs": "off",
    "method": "dynamic-batch",
    "rebalance": "published",
    "rebalance_steps": "10",
    "least_local_batch": "8",
    "most_local_batch": "256",
    "device": "cpu",
    "workers": "4",
    "launch": "in-process",
    "nodes": "2",
    "loaders": "4",
    "global_batch": "512",
    "batch_growth": "noise",
    "micro_batch": "64",
    "activation_checkpointing": "on",
    "resolutions": "160",
    "evaluate_epochs": "5",
    "track": "gradient-norm,hessian",
    "checkpoint_seconds": "10min",
    "checkpoint_steps": "500",
    "checkpoint_epochs": "10",
    "timeout": "5min",
    "restarts": "2",
    "port": "29500",
    "dual.small_workers": "3",
    "dual.extra_time": "1.1",
    "dual.large_batches": "600,560",
    "dual.rounding": "truncate",
    "dual.shares": "planned",
    "server.consistency": "ssp",
    "server.staleness": "1",
    "server.merge": "compsac",
    "server.update_factor": "sqrt",
    "server.exchange_steps": "50",
    "server.momentum": "reset",
    "ags.mode": "norm",
    "ags.least": "0.5",
    "ags.most": "4",
    "ags.lookback": "20",
    "ags.parts": "8",
    "cycle.preset": "cifar100",
    "cycle.keep": "epochs,weight_decay",
    "cycle.order": "one-pass",
    "cycle.stage_epochs": "80,40,20",
    "cycle.stage_rates": "1,0.1,0.01",
    "cycle.shares": "1,2",
    "cycle.batches": "512,256",
    "cycle.dropouts": "0.1,0.2",
    "cycle.strengths": "0.5,1",
    "cycle.recalibrate": "50",
    "virtual.sample_seconds": "0.00035,0.0005",
    "virtual.step_seconds": "15ms",
    "virtual.speeds": "1,1,0.5,0.5",
    "virtual.overheads": "1,1,0.1,0.1",
    "virtual.links": "1,1,1,0.1",
    "virtual.disturbances": "[{worker: 0, start: 10, end: 20, slowdown: 3}]",
    "slurm.partition": "gpu",
    "slurm.account": "vision",
    "slurm.time": "04:00:00",
    "slurm.gpus_per_node": "8",
    "slurm.lines": "--cpus-per-task=8,--constraint=a100",
    "ray.address": "10.0.0.2:6379",
    "ray.cpus_per_worker": "8",
    "ray.gpus_per_worker": "1",
    "ray.min_workers": "8",
    "probe.budget": "5",
    "probe.error": "0.03",
    "probe.steps": "30",
    "probe.learning": "5min",
    "probe.kind": "a100",
    "goal.objective": "time",
    "goal.doubling_gain": "0.1",
    "goal.least_steps": "50",
    "goal.memory": "8GiB",
    "goal.deadline": "2h",
    "goal.max_cost": "25",
    "goal.max_workers": "64",
    "goal.price": "0.40",
    "goal.accuracy": "0.9",
    "goal.patience": "5",
    "goal.confidence": "0.95",
    "goal.least": "cost",
    "goal.accuracy_tolerance": "0.02",
    "goal.kinds": "[{kind: t4, count: 4, price: 0.35}]",
    "goal.prices": "prices.csv",
    "goal.preemptions_per_hour": "0.05",
    "goal.restart_seconds": "1min",
    "goal.checkpoint_cost": "2",
    "goal.tolerance": "0.05",
    "link.latency": "2e-5",
    "link.bandwidth": "10Gbit/s",
}

HEAD = """\
# Job keys

<!-- Written by docs/job_page.py from records/job_*.py; change it there. -->

A job says what to train and on what: everything that changes the result is a key. Give keys on the
command line, in a YAML file, or both; the command line overrides the file:

```sh
batchwright run job.yaml epochs=3 probe.budget=5
```

```yaml
# job.yaml
data: cifar100:~/data/cifar-100-python
network: resnet8
epochs: 30
probe:
  budget: 30
```

In Python they are keyword arguments: `bw.run(data="digits", epochs=3, probe={"budget": 5})`.

- A list takes commas (`frozen=stem.*,stages.0.*`), a list of items YAML (`goal.kinds`, whose items
  have the keys at the foot of this page). `null` gives a key its default.
- A time may have its unit (`90s`, `10min`, `2h`, `1d`), and so may a size (`500MB`, `8GiB`) and a
  bandwidth (`10Gbit/s`).
- An unknown key, a wrong type, a value out of range, or two values of a key in the file or on
  the command line are refused with one line. For a word of another program (`lr`, `batch_size`,
  `gpus`, `amp`, `img_size`, `model` and many more) the line says which key it means.
- The run folder keeps the resolved job as `job.yaml`, with a value for every `auto` that machine
  and data decide. It can be given again.

The last column says from which verb on a key may still change:

- *probe*: it changes what is measured.
- *plan*: a profile can be planned again with another value.
- *train*: even a finished plan can run with another value, or go on with it (`data` only to another
  place of the same images).

`batchwright keys [WORD]` shows names, defaults and meanings on the command line. What the verbs do:
[verbs](verbs.md). A [loop of your own](loop.md) takes the keys from its plan.
"""


def page() -> str:
    """The text of docs/job.md."""
    lines = [HEAD]
    for key in job_keys(Job):
        if key in SECTIONS:
            lines += [
                f"\n## {SECTIONS[key]}\n",
                *([f"{NOTES[key]}\n"] if key in NOTES else []),
                "| key | meaning | unit | default | example | changes at |",
                "|---|---|---|---|---|---|",
            ]
        lines.append(_row(key))
    for key, model in (("goal.kinds", WorkerKind), ("virtual.disturbances", Disturbance)):
        lines += _items(key, model)
    return "\n".join(lines) + "\n"


def simulate_page(text: str) -> str:
    """docs/simulate.md with the keys of `Scenario` in their place."""
    before, _, rest = text.partition(KEYS_BEGIN)
    _, _, after = rest.partition(KEYS_END)
    rows = [
        f"| `{name}` | {one.description} | {default_words(one.default)} |"
        for name, one in Scenario.model_fields.items()
    ]
    table = ["| key | meaning | default |", "|---|---|---|", *rows]
    return "\n".join([f"{before}{KEYS_BEGIN}", *table, f"{KEYS_END}{after}"])


def _items(key: str, model: type[BaseModel]) -> list[str]:
    """Lines with the table of the keys of a list's items."""
    fields = model.model_fields
    rows = [
        f"| `{name}` | {one.description} | {default_words(one.default)} |"
        for name, one in fields.items()
    ]
    head = [f"\n### An item of {key}\n", "| key | meaning | default |", "|---|---|---|"]
    return [*head, *rows]


def _row(key: str) -> str:
    field = field_of(Job, key)
    example = EXAMPLES[key]
    example = f"`{key}='{example}'`" if " " in example else f"`{key}={example}`"
    cells = [
        f"`{key}`",
        described_field(field),
        UNITS.get(key, ""),
        default_words(field.default),
        example,
    ]
    return "| " + " | ".join([*cells, _verb(key)]) + " |"


def _verb(key: str) -> str:
    """The last verb at which the key may still have another value."""
    name = key.partition(".")[0]
    if key in LATER:
        return LATER[key]
    return "train" if name in TRAINING_KEYS else "plan" if name in PLANNING_KEYS else "probe"


def main() -> None:
    """Write the page, or with ``--check`` compare it."""
    made = {PAGE: page(), SIMULATE: simulate_page(SIMULATE.read_text(encoding="utf-8"))}
    for path, text in made.items():
        if sys.argv[1:] != ["--check"]:
            path.write_text(text, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != text:
            raise SystemExit(f"{path.name} is out of step: run python docs/job_page.py")


if __name__ == "__main__":
    main()
