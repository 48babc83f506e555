"""`export`: writes a plan as a file of another program, which starts the plan or follows it.

There are two kinds of programs. An engine (`launchers`) starts Batchwright's own training on its
machines, and so can run any plan. A trainer (`trainers`) has its own training loop: it gets batch,
accumulation, rate and schedule as its own settings, and plans that it cannot follow are refused.
"""

from __future__ import annotations

from batchwright.errors import ArgumentError, PlanError
from batchwright.records import Plan
from batchwright.records.registries.registry import Registry
from batchwright.workflows.exports import launchers, trainers
from batchwright.workflows.exports.target import Export, Target

_PACKAGE = "what pip installs there, such as 'batchwright[data] @ git+https://HOST/REPOSITORY@TAG'"

EXPORTS = Registry(
    "export",
    Export("torchrun", "a shell script, to be started on each host", launchers.torchrun),
    Export(
        "sbatch",
        "a batch script of Slurm",
        launchers.sbatch,
        settings={
            "partition": "the partition to queue in",
            "account": "who is charged",
            "time": "a limit, such as 04:00:00",
            "cpus-per-task": "cores of each task, else as many as its workers had when timed",
        },
    ),
    Export(
        "ray",
        "a shell script, for `ray job submit` or a machine of the Ray cluster",
        launchers.ray,
        settings={
            "cpus": "cores that each worker reserves, else as many as it had when timed",
            "min_workers": "fewest workers with which it goes on, else all",
        },
    ),
    Export(
        "kubernetes",
        "a Job, with a Service where there are several hosts",
        launchers.kubernetes,
        settings={
            "image": "the container, with Batchwright and PyTorch in it",
            "claim": "PersistentVolumeClaim that holds data and run folder, mounted at /runs",
            "namespace": "where it is made, else kubectl's own",
        },
        required=("image", "claim"),
    ),
    Export(
        "skypilot",
        "a task of SkyPilot",
        launchers.skypilot,
        settings={
            "accelerator": "a GPU's name, such as H100",
            "bucket": "where the run of one host is kept, such as s3://runs",
            "volume": "where it is kept instead, and that of several hosts: a volume of SkyPilot",
            "package": f"{_PACKAGE}, or a wheel below the folder",
        },
        required=("package",),
    ),
    Export(
        "dstack",
        "a task of dstack",
        launchers.dstack,
        settings={
            "accelerator": "a GPU's name, such as H100",
            "volume": "where the run is kept",
            "package": _PACKAGE,
        },
        required=("volume", "package"),
    ),
    Export("lightning", "Python for a script with Lightning's Trainer", trainers.lightning),
    Export("transformers", "Python for a script with Transformers' Trainer", trainers.transformers),
    Export("accelerate", "Python for a loop with accelerate", trainers.accelerate),
    Export("deepspeed", "DeepSpeed's configuration, JSON", trainers.deepspeed, keeps_run=False),
    Export("timm", "arguments of timm's train.py, YAML", trainers.timm),
    group="batchwright.exports",
)
"""The programs that a plan can be written for; other packages add members as entry points."""


def export(plan: Plan, name: str, target: Target) -> str:
    """Write a plan for another program.

    Args:
        plan: The plan to run or follow.
        name: Name of a member of `EXPORTS`.
        target: Where and how the plan will run.

    Returns:
        The text of the program's file, which ends with a line break.

    Raises:
        ArgumentError: There is no such export, or a setting is unknown or missing.
        PlanError: The program cannot follow the plan; the message says why, and what can.
    """
    if name not in EXPORTS:
        near = [one for one in EXPORTS if name and name.lower() in EXPORTS[one].words.lower()]
        hint = f"{near[0]} is {EXPORTS[near[0]].words}; " if near else ""
        raise ArgumentError(f"there is no export {name!r}: {hint}known are {', '.join(EXPORTS)}")
    spec = EXPORTS[name]
    for key, value in target.settings.items():
        if key not in spec.settings:
            known = f"it takes {', '.join(spec.settings)}" if spec.settings else "it takes none"
            raise ArgumentError(f"{name} has no setting {key!r}: {known}")
        if not value.isprintable():
            raise ArgumentError(f"--set {key}={value!r}: give it in one line")
    for key in spec.required:
        if not target.settings.get(key):
            meant = spec.settings[key]
            raise ArgumentError(f"{name} needs --set {key}=...: {meant}")
    if not target.run:
        raise ArgumentError("--run-folder is empty: name the run folder there")
    if not spec.keeps_run and target.run != Target.run:
        raise ArgumentError(
            f"--run-folder {target.run}: {name}'s file has no place for one; leave it out and "
            "name the folder in your script"
        )
    if plan.workers % target.hosts:
        raise PlanError(
            f"{plan.workers} workers cannot be shared evenly among {target.hosts} hosts: give "
            f"--hosts that divides {plan.workers}, or plan again with other workers="
        )
    return spec.write(plan, target)
