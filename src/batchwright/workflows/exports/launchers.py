"""Engines that start Batchwright's own training on their machines.

Whatever starts it, the command is the same: `batchwright train`, on several hosts by torchrun on
each. A run that an engine starts again, after a preemption or a lost
machine, goes on from its last checkpoint.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from os.path import relpath
from pathlib import PurePath, PurePosixPath
from typing import Any

import yaml

from batchwright.errors import ArgumentError, PlanError
from batchwright.records import Plan
from batchwright.records.documents import change_job
from batchwright.records.job_sections import SLURM_TIME, SLURM_TIME_HINT
from batchwright.workflows.engines.slurm_script import body, notice
from batchwright.workflows.exports.target import Target, headline

PORT = 29400
"""Where the hosts meet, if the job leaves its port open."""
TIME_MARGIN = 1.5
"""A time limit over the predicted time: start, checkpoints and a slower machine are in it."""
MIN_MINUTES = 10
LARGEST_CONFIG_MAP = 900_000
"""Bytes of a plan in a ConfigMap; Kubernetes takes 1 MiB with all that is around it."""


_LABEL = r"[a-z\d]([a-z\d-]{0,61}[a-z\d])?"
_LABEL_HINT = "Kubernetes takes small letters, digits and dashes, 63 at most"
_WRITTEN = {
    "time": (SLURM_TIME, SLURM_TIME_HINT),
    "cpus-per-task": (r"0*[1-9]\d*", "give a whole number of cores, 1 or more"),
    "namespace": (_LABEL, _LABEL_HINT),
    "image": (r"\S+", "an image's name has no blanks"),
    "volume": (r"[^:]+", "give a volume's name; it is mounted at /runs"),
    "bucket": (
        r"(s3|gs|r2)://[^/]+/?|(?!s3:|gs:|r2:)[a-z\d]+://.+",
        "give a whole bucket with where it is, such as s3://runs; SkyPilot mounts no folder of one",
    ),
    "claim": (rf"{_LABEL}(\.{_LABEL})*", f"{_LABEL_HINT}, and dots between such words"),
}
"""Settings that their programs take in one way of writing only, and how."""


def torchrun(plan: Plan, target: Target) -> str:
    """A script for each host; the first argument is the first host's address."""
    if target.hosts == 1:
        lines = _on_one_host(plan, target)
    else:
        lines = [
            f"head=${{1:?name the first host: sh {shlex.quote('FILE')} HOST}}",
            *_on_several_hosts(plan, target, f'"$head:{_port(plan)}"'),
        ]
    return _shell(plan, lines)


def sbatch(plan: Plan, target: Target) -> str:
    """A batch script of Slurm that stops, is queued again and goes on as `launch=slurm` does.

    On several hosts Slurm starts a task for each worker: torchrun would end by a signal that is for
    the workers.
    """
    _look_at_settings(target)
    slurm = plan.job.slurm  # what the job says of it, --set goes before
    limit = target.settings.get("time") or slurm.time or _time_limit(plan)
    tasks = 1 if target.hosts == 1 else plan.workers // target.hosts
    devices = _devices(plan, target, "gpus-per-node", "cpus-per-task")
    # On GPUs, too, a worker has its cores: else all that share a task would have one together.
    cores = devices.pop("cpus-per-task", plan.workers // target.hosts * (plan.worker_cores or 1))
    devices["cpus-per-task"] = max(1, cores // tasks)
    options: dict[str, object] = {
        "job-name": _name(plan),
        "nodes": target.hosts,
        "ntasks-per-node": tasks,
        **devices,
        "partition": slurm.partition,
        "account": slurm.account,
        **target.settings,
        "time": limit,
        "signal": f"USR1@{notice(limit)}",
        "open-mode": "append",
    }
    head = [f"#SBATCH --{key}={shlex.quote(str(value))}" for key, value in options.items() if value]
    head += [f"#SBATCH {line}" for line in slurm.lines]
    again = body(_train(plan, target), plan.job.restarts, "; ".join(_resume(target)))
    return "\n".join(["#!/bin/bash", *head, "#SBATCH --requeue", _comment(plan) + again])


def kubernetes(plan: Plan, target: Target) -> str:
    """A Job with a pod for each host; several find each other by a Service without an address."""
    _look_at_settings(target)
    text = plan.model_dump_json(exclude_defaults=True)
    if (size := len(text.encode())) > LARGEST_CONFIG_MAP:
        raise PlanError(
            f"the plan has {size:,} bytes, and a ConfigMap takes {LARGEST_CONFIG_MAP:,}: "
            "train it by another export, or plan with fewer stages"
        )
    name, settings = _name(plan, _below_runs(target)), target.settings
    namespace = {"namespace": settings["namespace"]} if settings.get("namespace") else {}
    inside = Target(target.hosts, "/plan/plan.json", _below_runs(target), settings)
    lines = (
        _on_one_host(plan, inside)
        if target.hosts == 1
        else _on_several_hosts(plan, inside, f'"{name}-0.{name}:{_port(plan)}"')
    )
    resources = _devices(plan, target, "nvidia.com/gpu", "cpu")
    container = {
        "name": "train",
        "image": settings["image"],
        "command": ["sh", "-euc", "\n".join(lines) + "\n"],
        "workingDir": "/runs",
        "resources": {"limits": resources, "requests": resources},
        "volumeMounts": [
            {"name": "runs", "mountPath": "/runs"},
            {"name": "plan", "mountPath": "/plan", "readOnly": True},
            {"name": "memory", "mountPath": "/dev/shm"},  # noqa: S108 - workers exchange there
        ],
    }
    pod = {
        "restartPolicy": "OnFailure",
        # Long enough for a checkpoint before a node is given up.
        "terminationGracePeriodSeconds": 120,
        "containers": [container],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": settings["claim"]}},
            {"name": "plan", "configMap": {"name": name}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    job = {
        "backoffLimit": plan.job.restarts * target.hosts,
        "template": {"metadata": {"labels": {"app": name}}, "spec": pod},
    }
    documents: list[dict[str, Any]] = [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": name, **namespace},
            "data": {"plan.json": text},
        }
    ]
    if target.hosts > 1:
        count = target.hosts
        job |= {"completionMode": "Indexed", "completions": count, "parallelism": count}
        pod["subdomain"] = name
        documents.append(
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": name, **namespace},
                # Pods meet before they are ready.
                "spec": {
                    "clusterIP": "None",
                    "publishNotReadyAddresses": True,
                    "selector": {"app": name},
                },
            }
        )
    documents.append(
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": name, **namespace},
            "spec": job,
        }
    )
    return _comment(plan) + "---\n".join(map(_yaml, documents))


def ray(plan: Plan, target: Target) -> str:
    """A script that has Ray Train start the workers, for `ray job submit` or a Ray machine."""
    if target.hosts > 1:
        raise ArgumentError("ray places the workers on its machines by itself: leave --hosts out")
    asked = {"cpus": "ray.cpus_per_worker", "min_workers": "ray.min_workers"}
    given = {key: target.settings[name] for name, key in asked.items() if name in target.settings}
    if plan.worker_cores and plan.job.ray.cpus_per_worker == "auto":
        given = {asked["cpus"]: str(plan.worker_cores)} | given
    keys = [
        "launch=ray",
        f"ray.gpus_per_worker={int(plan.job.device == 'cuda')}",
        *_without_nodes(plan),
        *(f"{key}={value}" for key, value in given.items()),
    ]
    change_job(plan.job.model_copy(update={"workers": plan.workers}), overrides=keys)
    lines = [*_resume(target), f"exec {_train(plan, target, *keys)}"]
    return _shell(plan, lines)


def skypilot(plan: Plan, target: Target) -> str:
    """A task that SkyPilot's managed jobs start again on another machine."""
    path = PurePath(target.plan)
    if path.is_absolute() or ".." in path.parts:
        raise ArgumentError(
            f"skypilot takes the folder along where `sky jobs launch` is started, and {path} is "
            "not below it: give the plan's path as it is seen from there"
        )
    accelerator = _accelerator(plan, target, "skypilot")
    count = _devices(plan, target, "accelerators", "cpus")
    resources: dict[str, object] = {**count}
    if "accelerators" in count:
        resources["accelerators"] = f"{accelerator}:{count['accelerators']}"
    else:
        resources["cpus"] = f"{count['cpus']}+"
    resources["job_recovery"] = {"max_restarts_on_errors": plan.job.restarts}
    inside = Target(target.hosts, target.plan, _below_runs(target), target.settings)
    task = {
        "name": _name(plan, _below_runs(target)),
        "num_nodes": target.hosts,
        "resources": resources,
        "workdir": ".",
        **_kept_by_skypilot(target),
        "setup": f"{_install(target)}\n",
        "run": _script(plan, inside, '"$(echo "$SKYPILOT_NODE_IPS" | head -n 1):{port}"'),
    }
    return _comment(plan) + _yaml(task)


def _kept_by_skypilot(target: Target) -> dict[str, object]:
    """What holds the run folder: files there are appended to and locked, which `MOUNT` cannot."""
    _look_at_settings(target)
    bucket, volume = (target.settings.get(key, "") for key in ("bucket", "volume"))
    if bool(bucket) == bool(volume):
        raise ArgumentError(
            "skypilot needs --set bucket=..., on one host, or --set volume=...: where the run is "
            "kept; give one of them"
        )
    if volume:
        return {"volumes": {"/runs": volume}}
    if target.hosts > 1:
        raise ArgumentError(
            f"skypilot: {target.hosts} hosts need a run folder that they share at once, and each "
            "writes to its own copy of a bucket: make a volume (sky volumes apply, with "
            "access_mode: ReadWriteMany) and give --set volume=NAME"
        )
    return {"file_mounts": {"/runs": {"source": bucket, "mode": "MOUNT_CACHED"}}}


def dstack(plan: Plan, target: Target) -> str:
    """A task that dstack tries again after an interruption."""
    _look_at_settings(target)
    accelerator = _accelerator(plan, target, "dstack")
    count = _devices(plan, target, "gpu", "cpu")
    resources: dict[str, object] = {"shm_size": "8GB"}
    if "gpu" in count:
        resources["gpu"] = f"{accelerator}:{count['gpu']}"
    else:
        resources["cpu"] = f"{count['cpu']}.."
    inside = Target(target.hosts, "plan.json", _below_runs(target), target.settings)
    script = _script(plan, inside, '"$DSTACK_MASTER_NODE_IP:{port}"')
    task: dict[str, object] = {
        "type": "task",
        "name": _name(plan, _below_runs(target)),
        "nodes": target.hosts,
        "python": "3.11",
        # It looks for files from where its own lies, and takes a colon in a word for another path.
        "files": [{"local_path": relpath(target.plan, target.beside), "path": "plan.json"}],
        "commands": [_install(target), script],
        "resources": resources,
        "volumes": [f"{target.settings['volume']}:/runs"],
        "retry": {"on_events": ["interruption", "no-capacity"], "duration": "1d"},
    }
    return _comment(plan) + _yaml(task)


# ------------------------------------------------------------------------------------------- lines


def _script(plan: Plan, target: Target, meeting: str) -> str:
    """What a host does, for programs that start the same on each."""
    if target.hosts == 1:
        lines = _on_one_host(plan, target)
    else:
        lines = _on_several_hosts(plan, target, meeting.format(port=_port(plan)))
    return "\n".join(["set -eu", *lines]) + "\n"


def _on_one_host(plan: Plan, target: Target) -> list[str]:
    return [*_resume(target), f"exec {_train(plan, target)}"]


def _on_several_hosts(plan: Plan, target: Target, meeting: str) -> list[str]:
    """Each host starts its workers, of which the first of all leads."""
    return [
        *_resume(target),
        "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # without it, a host that comes back is lost",
        f"exec torchrun --nnodes {target.hosts} "
        f"--nproc-per-node {plan.workers // target.hosts} --max-restarts {plan.job.restarts} \\",
        f"  --rdzv-backend c10d --rdzv-endpoint {meeting} \\",
        f"  -m {_train(plan, target)}",
    ]


def _resume(target: Target) -> list[str]:
    """Nothing is written there before all hosts have come, so that all see the same."""
    return ["resume=", f"[ ! -e {shlex.quote(target.run)}/plan.json ] || resume=--resume"]


def _below_runs(target: Target) -> str:
    """The run folder there, where the volume is /runs; it may be named with that or without.

    Raises:
        ArgumentError: It is not on the volume, so that it would not outlive the machine.
    """
    path = PurePosixPath("/runs", target.run)
    if path.parts[:2] != ("/", "runs") or ".." in path.parts or len(path.parts) < 3:
        raise ArgumentError(
            f"--run-folder {target.run}: what is kept is mounted at /runs there: name a folder in "
            "it, such as mine/a"
        )
    return str(path)


def _train(plan: Plan, target: Target, *keys: str) -> str:
    """The command, which names what the plan imports, and trains where it was started.

    Unless ``keys`` of the job say where else.

    Raises:
        PlanError: Its workers are simulated.
    """
    job = plan.job
    if job.launcher.simulated:
        raise PlanError(
            f"the plan is for launch={job.launch}, whose workers and times are simulated in one "
            "process: plan again with launch=auto, or train it here by `batchwright train`"
        )
    here = job.launcher.joins or target.hosts == 1
    launched = keys or (
        *["launch=auto"] * bool(job.launcher.submit or not here),
        *_without_nodes(plan),
    )
    named = [f"{key}={getattr(job, key)}" for key in job.code_keys]
    words = [target.plan, *named, *launched, "--out", target.run]
    return f"batchwright train {shlex.join(words)} $resume"


def _without_nodes(plan: Plan) -> list[str]:
    """The key that takes out what `launch=slurm` alone takes."""
    return ["nodes=1"] * (plan.job.nodes > 1)


def _shell(plan: Plan, lines: list[str]) -> str:
    return "\n".join(["#!/bin/sh", f"# {headline(plan)}.", "set -eu", *lines]) + "\n"


def _comment(plan: Plan) -> str:
    return f"# {headline(plan)}.\n"


class _Dumper(yaml.SafeDumper):
    """Writes scripts as blocks of lines, and what is there twice in full."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - none is wanted
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else "'" if _is_read_otherwise(value) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


def _is_read_otherwise(value: str) -> bool:
    """Whether other readers of YAML take a plain word for a number or yes or no, as Go's do."""
    return bool(re.fullmatch(r"[yYnN]|[-+.]?\d[\d_.]*([eE][-+]?\d+)?|0[xXoObB]\w+", value))


_Dumper.add_representer(str, _text)


def _yaml(document: object) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=10_000)


# ------------------------------------------------------------------------------------------- facts


def _port(plan: Plan) -> int:
    return plan.job.port or PORT


def _name(plan: Plan, run: str = "") -> str:
    """A name that every engine takes: lower-case letters, digits and dashes, dstack's length.

    Runs with folders of their own have names of their own, or one would take the other's place.
    """
    network = _plain(f"batchwright-{plan.network.name}")
    own = run.removeprefix("/runs/")
    if own in ("", Target.run):
        return network[:41].strip("-")
    name = f"{network}-{own}"
    if name != _plain(name) or len(name) > 41:
        name = f"{_plain(name)[:34]}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"
    return name


def _plain(words: str) -> str:
    return "".join(c if c.isascii() and c.isalnum() else "-" for c in words.lower())


def _devices(plan: Plan, target: Target, gpus: str, cores: str) -> dict[str, int]:
    """How many GPUs a host needs, or how many cores: as workers had where they were timed."""
    count = plan.workers // target.hosts
    if plan.job.device == "cuda":
        return {gpus: count}
    server = plan.method_spec.served and target.hosts == 1
    return {cores: count * (plan.worker_cores or 1) + server}


def _look_at_settings(target: Target) -> None:
    """Refuse what is written otherwise than its program takes it."""
    for key, value in target.settings.items():
        pattern, hint = _WRITTEN.get(key, ("", ""))
        if pattern and value and not re.fullmatch(pattern, value, re.ASCII):
            raise ArgumentError(f"--set {key}={value}: {hint}")


def _install(target: Target) -> str:
    return f"pip install {shlex.quote(target.settings['package'])}"


def _accelerator(plan: Plan, target: Target, name: str) -> str:
    """The GPU that a plan for GPUs needs, and that no other plan uses; empty: none."""
    found = target.settings.get("accelerator", "")
    if plan.job.device == "cuda" and not found:
        raise ArgumentError(f"{name} needs --set accelerator=...: a GPU's name, such as H100")
    if plan.job.device != "cuda" and found:
        raise ArgumentError(
            f"--set accelerator={found}: the plan is for device={plan.job.device}, which uses no "
            "GPU: leave it out, or export a plan that was made on a GPU"
        )
    return found


def _time_limit(plan: Plan) -> str:
    """As Slurm writes it: hours, minutes, seconds; empty where no time was predicted."""
    rows = [stage.predicted_epoch_seconds for stage in plan.stages]
    if any(one is None for one in rows):
        return ""
    seconds = sum(
        stage.epochs * one.high for stage, one in zip(plan.stages, rows, strict=True) if one
    )
    epochs, chosen = plan.epochs, plan.chosen
    if chosen and chosen.train_seconds:
        seconds, epochs = chosen.train_seconds.high, chosen.trained_epochs or epochs
    seconds *= (plan.max_epochs or plan.epochs) / epochs  # training may go on for so many
    minutes = max(MIN_MINUTES, round(TIME_MARGIN * seconds / 60))
    return f"{minutes // 60:02d}:{minutes % 60:02d}:00"
