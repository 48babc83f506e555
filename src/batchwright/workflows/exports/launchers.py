"""Exports for engines that start Batchwright's own training on their machines.

Every engine starts the same command, `batchwright train`, on several hosts by torchrun on each. A
run that an engine starts again, after a preemption or a lost machine, continues from its last
checkpoint.
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
from batchwright.records.clusters.sections import SLURM_TIME, SLURM_TIME_HINT
from batchwright.records.documents import change_job
from batchwright.workflows.engines.slurm_script import body, notice
from batchwright.workflows.exports.target import Target, headline

PORT = 29400
"""Port of the hosts' rendezvous, if the job does not set one."""
TIME_MARGIN = 1.5
"""Time limit over the predicted time, to allow for start, checkpoints and a slower machine."""
MIN_MINUTES = 10
"""Shortest time limit."""
POD_SECONDS, STOP_SECONDS = 120, 100
"""Seconds until a pod that is to stop is killed, and until torchrun then kills its workers, by
default after 30: enough for a step and a checkpoint."""
LARGEST_CONFIG_MAP = 900_000
"""Largest plan in a ConfigMap, in bytes; Kubernetes allows 1 MiB for the whole object."""


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
"""Settings whose programs accept one form only: a pattern, and a hint for the error message."""


def torchrun(plan: Plan, target: Target) -> str:
    """A script for each host; its argument is the first host's address, if there are several."""
    head = ["head=${1:?name the first host: sh FILE HOST}"] if target.hosts > 1 else []
    return _shell(plan, [*head, *_train_lines(plan, target, f'"$head:{_port(plan)}"')])


def sbatch(plan: Plan, target: Target) -> str:
    """A batch script of Slurm that stops, is queued again and continues as `launch=slurm` does.

    On several hosts Slurm starts a task for each worker: torchrun would end by a signal that is for
    the workers.
    """
    _check_settings(target)
    slurm = plan.job.slurm  # settings of the job, which those of --set override
    limit = target.settings.get("time") or slurm.time or _time_limit(plan)
    tasks = 1 if target.hosts == 1 else plan.workers // target.hosts
    devices = _devices(plan, target, "gpus-per-node", "cpus-per-task")
    # Also ask for cores on GPUs: without, all workers of a task would share a single core.
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
    """A Job with a pod for each host; several pods find each other by a headless Service."""
    _check_settings(target)
    text = plan.model_dump_json(exclude_defaults=True)
    if (size := len(text.encode())) > LARGEST_CONFIG_MAP:
        raise PlanError(
            f"the plan has {size:,} bytes, and a ConfigMap takes {LARGEST_CONFIG_MAP:,}: "
            "train it by another export, or plan with fewer stages"
        )
    name, settings = _name(plan, _below_runs(target)), target.settings
    namespace = {"namespace": settings["namespace"]} if settings.get("namespace") else {}
    inside = Target(target.hosts, "/plan/plan.json", _below_runs(target), settings)
    lines = _train_lines(plan, inside, f'"{name}-0.{name}:{_port(plan)}"')
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
            {"name": "memory", "mountPath": "/dev/shm"},  # noqa: S108 - shared by a pod's workers
        ],
    }
    pod = {
        "restartPolicy": "OnFailure",
        # Long enough to write a checkpoint before the node goes away.
        "terminationGracePeriodSeconds": POD_SECONDS,
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
                # Pods have to find each other before they are ready.
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
        "run": _script(
            _train_lines(plan, inside, f'"$(echo "$SKYPILOT_NODE_IPS" | head -n 1):{_port(plan)}"')
        ),
    }
    return _comment(plan) + _yaml(task)


def _kept_by_skypilot(target: Target) -> dict[str, object]:
    """The mount of the run folder, whose files are appended to and locked: `MOUNT` cannot do so."""
    _check_settings(target)
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
    """A task that dstack starts again after an interruption."""
    _check_settings(target)
    accelerator = _accelerator(plan, target, "dstack")
    count = _devices(plan, target, "gpu", "cpu")
    resources: dict[str, object] = {"shm_size": "8GB"}
    if "gpu" in count:
        resources["gpu"] = f"{accelerator}:{count['gpu']}"
    else:
        resources["cpu"] = f"{count['cpu']}.."
    inside = Target(target.hosts, "plan.json", _below_runs(target), target.settings)
    script = _script(_train_lines(plan, inside, f'"$DSTACK_MASTER_NODE_IP:{_port(plan)}"'))
    task: dict[str, object] = {
        "type": "task",
        "name": _name(plan, _below_runs(target)),
        "nodes": target.hosts,
        "python": "3.11",
        # dstack resolves paths from its own file's folder, and splits a text at its colon: hence
        # the mapping with two keys.
        "files": [{"local_path": relpath(target.plan, target.beside), "path": "plan.json"}],
        "commands": [_install(target), script],
        "resources": resources,
        "volumes": [f"{target.settings['volume']}:/runs"],
        "retry": {"on_events": ["interruption", "no-capacity"], "duration": "1d"},
    }
    return _comment(plan) + _yaml(task)


# ------------------------------------------------------------------------------------------- lines


def _train_lines(plan: Plan, target: Target, rendezvous: str) -> list[str]:
    """Shell lines that train on one host, or on each of several that meet at ``rendezvous``."""
    if target.hosts == 1:
        return [*_resume(target), f"exec {_train(plan, target)}"]
    return [
        *_resume(target),
        "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # without it, a host that comes back is lost",
        f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={STOP_SECONDS}  # for a checkpoint after a stop",
        f"exec torchrun --nnodes {target.hosts} "
        f"--nproc-per-node {plan.workers // target.hosts} --max-restarts {plan.job.restarts} \\",
        f"  --rdzv-backend c10d --rdzv-endpoint {rendezvous} \\",
        f"  -m {_train(plan, target)}",
    ]


def _resume(target: Target) -> list[str]:
    """Lines that set ``$resume`` if the run folder has a plan already.

    All hosts agree on it, since nothing is written there before all of them have joined.
    """
    return ["resume=", f"[ ! -e {shlex.quote(target.run)}/plan.json ] || resume=--resume"]


def _below_runs(target: Target) -> str:
    """The run folder's path on the volume /runs; the target may name it with /runs or without.

    Raises:
        ArgumentError: The folder is not on the volume, and would be lost with the machine.
    """
    path = PurePosixPath("/runs", target.run)
    if path.parts[:2] != ("/", "runs") or ".." in path.parts or len(path.parts) < 3:
        raise ArgumentError(
            f"--run-folder {target.run}: what is kept is mounted at /runs there: name a folder in "
            "it, such as mine/a"
        )
    return str(path)


def _train(plan: Plan, target: Target, *keys: str) -> str:
    """The command that trains the plan; it confirms the import strings that the plan names.

    Without ``keys`` the plan trains where the command is started, whatever its ``launch``. Keys,
    such as ``launch=ray``, choose another launcher.

    Raises:
        PlanError: The plan's workers are simulated.
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
    """The key that resets ``nodes``, which only `launch=slurm` accepts."""
    return ["nodes=1"] * (plan.job.nodes > 1)


def _script(lines: list[str]) -> str:
    return "\n".join(["set -eu", *lines]) + "\n"


def _shell(plan: Plan, lines: list[str]) -> str:
    return f"#!/bin/sh\n{_comment(plan)}{_script(lines)}"


def _comment(plan: Plan) -> str:
    return f"# {headline(plan)}.\n"


class _Dumper(yaml.SafeDumper):
    """A dumper that writes scripts as block literals, and repeats values instead of aliases."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - the same for all values
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    # Other YAML readers, such as Go's, would read such a plain word as a number or boolean.
    other = re.fullmatch(r"[yYnN]|[-+.]?\d[\d_.]*([eE][-+]?\d+)?|0[xXoObB]\w+", value)
    style = "|" if "\n" in value else "'" if other else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def _yaml(document: object) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=10_000)


# ------------------------------------------------------------------------------------------- facts


def _port(plan: Plan) -> int:
    return plan.job.port or PORT


def _name(plan: Plan, run: str = "") -> str:
    """A name that every engine accepts: lower-case letters, digits and dashes, short as dstack's.

    It depends on the run folder: a second run with the same name would replace the first.
    """
    network = _plain(f"batchwright-{plan.network.name}")
    own = run.removeprefix("/runs/")
    if own in ("", Target.run):
        return network[:41].strip("-")
    name = f"{network}-{own}"
    if name != _plain(name) or name.endswith("-") or len(name) > 41:
        name = f"{_plain(name)[:34]}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"
    return name


def _plain(words: str) -> str:
    return "".join(c if c.isascii() and c.isalnum() else "-" for c in words.lower())


def _devices(plan: Plan, target: Target, gpus: str, cores: str) -> dict[str, int]:
    """The GPUs of a host, or its cores: as many for each worker as when its steps were timed.

    ``gpus`` and ``cores`` are the engine's names for them.
    """
    count = plan.workers // target.hosts
    if plan.job.device == "cuda":
        return {gpus: count}
    server = plan.method_spec.served and target.hosts == 1  # its process needs a core, too
    return {cores: count * (plan.worker_cores or 1) + server}


def _check_settings(target: Target) -> None:
    """Refuse settings in a form that their program does not accept."""
    for key, value in target.settings.items():
        pattern, hint = _WRITTEN.get(key, ("", ""))
        if pattern and value and not re.fullmatch(pattern, value, re.ASCII):
            raise ArgumentError(f"--set {key}={value}: {hint}")


def _install(target: Target) -> str:
    return f"pip install {shlex.quote(target.settings['package'])}"


def _accelerator(plan: Plan, target: Target, name: str) -> str:
    """The model of GPU to ask for, which a plan for GPUs must name; empty for other plans."""
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
    """The time limit as HH:MM:SS from the predicted time; empty if no time was predicted."""
    if (whole := plan.whole_seconds) is None:
        return ""
    most = plan.max_epochs or plan.epochs  # a run may go on for as many
    seconds = whole.high * most / plan.likely_epochs()
    minutes = max(MIN_MINUTES, round(TIME_MARGIN * seconds / 60))
    return f"{minutes // 60:02d}:{minutes % 60:02d}:00"
