"""Plans in the words of other programs: each file is what its program reads, and says the plan."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any
from unittest.mock import MagicMock

import pytest
import yaml
from typer.testing import CliRunner

import batchwright as bw
from batchwright.algorithms.learning_rate import rate_factor
from batchwright.cli.commands import app
from batchwright.errors import ArgumentError, JobError, PlanError
from batchwright.planning.planner import plan_without_profile
from batchwright.records import Estimate, Plan
from batchwright.records.documents import read_record, write_record
from batchwright.workflows.engines import with_workers
from batchwright.workflows.exports import EXPORTS, export
from batchwright.workflows.exports.target import Target
from batchwright.workflows.job_changes import refuse_another
from batchwright.workflows.prepare_job import data_facts
from forked_tasks import forking_tasks
from gloo import free_port
from samples import make_cyclic_plan, make_dual_plan, make_job, make_network, make_plan

SETTINGS = {
    "kubernetes": {"image": "registry.local/train:1", "claim": "runs"},
    "skypilot": {"bucket": "s3://runs", "package": "./b.whl"},
    "dstack": {"volume": "runs", "package": "batchwright[data] @ https://host/b.whl"},
}
CLOUDS = ("skypilot", "dstack")
LAUNCHERS = ("torchrun", "sbatch", "ray", "kubernetes", "skypilot", "dstack")
PYTHON = ("lightning", "transformers", "accelerate")
TRAINERS = (*PYTHON, "deepspeed", "timm")


def exported(plan: Plan, name: str, hosts: int = 1, **settings: str) -> str:
    known = SETTINGS.get(name, {})
    if name == "skypilot" and hosts > 1:  # who would each have a copy of the bucket
        known = {"volume": "runs", "package": "./b.whl"}
    if name in CLOUDS and plan.job.device == "cuda":
        known = {**known, "accelerator": "H100"}
    return export(plan, name, Target(hosts, settings=known | settings))


def module(text: str, folder: Path) -> dict[str, Any]:
    """What a Python file defines."""
    path = folder / "plan.py"
    path.write_text(text)
    return runpy.run_path(str(path))


def with_rate(plan: Plan, **rule: Any) -> Plan:
    changed = plan.learning_rate.model_copy(update=rule)
    return plan.model_copy(update={"learning_rate": changed})


def test_there_is_an_export_for_each_program_here() -> None:
    assert tuple(EXPORTS) == (*LAUNCHERS, *TRAINERS)


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("name", ["torchrun", "sbatch"])
def test_scripts_are_scripts(name: str, hosts: int, tmp_path: Path) -> None:
    path = tmp_path / "script"
    path.write_text(exported(make_plan(), name, hosts))
    shell = path.read_text().partition("\n")[0].removeprefix("#!")
    subprocess.run([shell, "-n", str(path)], check=True, timeout=500)


@pytest.mark.parametrize("name", [*LAUNCHERS, *PYTHON])
def test_a_name_in_a_plan_of_others_is_no_code(name: str, tmp_path: Path) -> None:
    plan, done = make_plan(), tmp_path / "done"
    for bad in (
        f"photos\ntouch {done}\n",
        f'x""" ; open({str(done)!r}, "w") ; """',
        "C:\\users\\x",
        f"\r$(touch {done})\u2028",
    ):
        data = plan.data.model_copy(update={"name": bad})
        text = exported(plan.model_copy(update={"data": data}), name)
        if name in PYTHON:
            module(text, tmp_path)
        else:
            assert all(line[0] == "#" for line in text.splitlines()[:3] if "photos" in line)
            assert not any(line.startswith("touch") for line in text.splitlines())
        assert not done.exists()


@pytest.mark.parametrize("name", LAUNCHERS)
def test_engines_run_any_plan(name: str) -> None:
    for plan in (make_plan(), make_dual_plan(), make_cyclic_plan()):
        assert "batchwright train" in exported(plan, name)


def test_a_run_that_is_started_again_goes_on(tmp_path: Path) -> None:
    """The same script trains first, and resumes where the run folder is there."""
    (tmp_path / "batchwright").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "batchwright").chmod(0o755)
    script = tmp_path / "script"
    script.write_text(exported(make_plan(), "torchrun"))
    found = {"env": {"PATH": f"{tmp_path}:{os.environ['PATH']}"}, "cwd": tmp_path}

    def said() -> str:
        return subprocess.check_output(
            ["/bin/sh", str(script)], text=True, timeout=500, **found
        ).strip()

    assert said() == "train plan.json --out run"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "plan.json").touch()
    assert said() == "train plan.json --out run --resume"


def test_hosts_begin_again_where_a_run_has_no_checkpoint_yet(tmp_path: Path) -> None:
    """Its folder holds a run, which only --resume goes on with."""
    (tmp_path / "torchrun").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    script = tmp_path / "script"
    own = make_plan(job=make_job(network="my.networks:small", launch="slurm"))
    script.write_text(exported(own, "torchrun", 2))

    def said() -> str:
        return subprocess.check_output(
            ["/bin/sh", str(script), "head"],
            text=True,
            timeout=500,
            env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
            cwd=tmp_path,
        ).strip()

    words = "-m batchwright train plan.json network=my.networks:small launch=auto --out run"
    assert said().endswith(words)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "plan.json").touch()
    assert said().endswith(f"{words} --resume")


def test_slurm_gets_hosts_cores_and_a_limit() -> None:
    text = exported(make_plan(), "sbatch", 2, partition="long")
    for line in ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", "--partition=long"):
        assert f"#SBATCH {line}\n" in text
    assert "#SBATCH --requeue" in text
    assert "#SBATCH --time=00:10:00" in text  # never less than ten minutes
    assert "#SBATCH --signal=USR1@120\n" in text
    assert "#SBATCH --signal=USR1@15\n" in exported(make_plan(), "sbatch", time="1")
    assert "#SBATCH --partition='a b'\n" in exported(make_plan(), "sbatch", partition="a b")
    assert "--time=04:00:00" in exported(make_plan(), "sbatch", time="04:00:00")
    on_gpus = make_plan(job=make_job(device="cuda"))
    assert "#SBATCH --gpus-per-node=1" in exported(on_gpus, "sbatch", 2)
    both = exported(on_gpus, "sbatch", **{"cpus-per-task": "8"})
    assert "#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=2\n" in both
    assert "#SBATCH --cpus-per-task=8\n" in both
    assert "#SBATCH --cpus-per-task=2\n" in exported(on_gpus, "sbatch")  # two workers in one task


def test_engines_are_asked_for_the_cores_that_workers_were_timed_with() -> None:
    """A worker that was timed with eight threads trained with one."""
    plan = make_plan(threads=8)
    assert "#SBATCH --cpus-per-task=16\n" in exported(plan, "sbatch")  # two workers in one task
    assert "#SBATCH --cpus-per-task=8\n" in exported(plan, "sbatch", 2)
    assert "#SBATCH --cpus-per-task=3\n" in exported(plan, "sbatch", 2, **{"cpus-per-task": "3"})
    on_gpus = make_plan(job=make_job(device="cuda"), threads=8)
    assert "#SBATCH --cpus-per-task=16\n" in exported(on_gpus, "sbatch")
    assert "#SBATCH --cpus-per-task=33\n" in exported(make_dual_plan(threads=8), "sbatch")
    pod = list(yaml.safe_load_all(exported(plan, "kubernetes")))[-1]["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["requests"] == {"cpu": 16}
    assert yaml.safe_load(exported(plan, "dstack"))["resources"]["cpu"] == "16.."
    assert "ray.cpus_per_worker=8 " in exported(plan, "ray")
    assert "ray.cpus_per_worker=2 " in exported(plan, "ray", cpus="2")
    own = make_plan(job=make_job(ray={"cpus_per_worker": 1}), threads=8)
    assert "ray.cpus_per_worker" not in exported(own, "ray")
    assert with_workers(own.job, own).ray.cpus == 1
    assert with_workers(plan.job, plan).ray.cpus == 8
    assert with_workers(plan.job, plan).slurm.lines == ("--cpus-per-task=8",)
    few = make_plan(job=make_job(device="cuda"), threads=208, cores=6)
    assert "#SBATCH --cpus-per-task=12\n" in exported(few, "sbatch")
    assert "ray.cpus_per_worker=6 " in exported(few, "ray")
    assert with_workers(few.job, few).slurm.lines == ("--cpus-per-task=6",)
    own = make_plan(job=make_job(slurm={"lines": ("--cpus-per-gpu=2",)}), threads=8)
    assert with_workers(own.job, own).slurm.lines == ("--cpus-per-gpu=2",)
    assert with_workers(make_job(), make_plan()).slurm.lines == ()


def test_slurm_gets_what_the_job_says_of_it_unless_told_otherwise() -> None:
    slurm = {"partition": "long", "time": "01:00:00", "lines": ("--exclusive",)}
    plan = make_plan(job=make_job(slurm=slurm))
    text = exported(plan, "sbatch")
    for line in ("--partition=long", "--time=01:00:00", "--exclusive"):
        assert f"#SBATCH {line}\n" in text
    assert "#SBATCH --partition=short\n" in exported(plan, "sbatch", partition="short")


def test_slurm_leaves_time_for_the_epochs_that_a_run_may_go_on_for() -> None:
    (stage,) = make_plan().stages
    hour = Estimate(value=3600 / 30, low=100, high=3600 / 30)
    stages = (stage.model_copy(update={"predicted_epoch_seconds": hour}),)
    plan = make_plan(stages=stages, considered=(), max_epochs=90)
    assert "#SBATCH --time=04:30:00" in exported(plan, "sbatch")
    assert "#SBATCH --time=04:30:00" in exported(plan, "sbatch", 2)


def with_a_schedule_longer_than_the_target_takes() -> Plan:
    """Thirty epochs are laid out, of which the training is to take twenty."""
    plan = make_plan()
    whole = Estimate(value=2400, low=2400, high=2400)
    considered = (
        one.model_copy(update={"trained_epochs": 20, "train_seconds": whole})
        for one in plan.considered
    )
    epoch = Estimate(value=120, low=120, high=120)
    stages = (plan.stages[0].model_copy(update={"predicted_epoch_seconds": epoch}),)
    asked = {"considered": tuple(considered), "stages": stages, "target_epochs": 20}
    return plan.model_copy(update=asked)


def test_slurm_leaves_time_for_the_whole_schedule() -> None:
    plan = with_a_schedule_longer_than_the_target_takes()
    assert "#SBATCH --time=01:30:00" in exported(plan, "sbatch")


@pytest.mark.parametrize(
    ("name", "key"),
    [("lightning", "max_epochs"), ("transformers", "num_train_epochs"), ("accelerate", "EPOCHS")],
)
def test_trainers_that_do_not_end_at_a_target_get_the_epochs_it_takes(name: str, key: str) -> None:
    text = exported(with_a_schedule_longer_than_the_target_takes(), name)
    assert re.findall(rf"{key}\W+(\d+)", text) == ["20"]


def test_kubernetes_gets_a_job_that_holds_the_plan() -> None:
    plan = make_plan()
    text = exported(plan, "kubernetes", 2, namespace="team")
    assert "&id" not in text  # what is there twice is written twice: people read the file
    config, service, job = yaml.safe_load_all(text)
    assert Plan.model_validate_json(config["data"]["plan.json"]) == plan
    assert service["spec"]["clusterIP"] == "None"
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    pod = spec["template"]["spec"]
    name = job["metadata"]["name"]
    assert pod["subdomain"] == service["metadata"]["name"] == name
    (container,) = pod["containers"]
    assert container["image"] == "registry.local/train:1"
    assert f"{name}-0.{name}:29400" in container["command"][-1]
    mounts = {one["name"] for one in container["volumeMounts"]}
    assert mounts == {one["name"] for one in pod["volumes"]}
    assert {one["metadata"]["namespace"] for one in (config, service, job)} == {"team"}


def test_torchrun_leaves_the_workers_of_a_pod_the_time_that_the_pod_has() -> None:
    """By itself it kills them 30 s after a stop, in the middle of a checkpoint maybe."""
    pod = list(yaml.safe_load_all(exported(make_plan(), "kubernetes", 2)))[-1]["spec"]["template"]
    (script,) = (one["command"][-1] for one in pod["spec"]["containers"])
    (seconds,) = re.findall(r"^export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=(\d+) .*\nexec", script, re.M)
    assert 60 < int(seconds) < pod["spec"]["terminationGracePeriodSeconds"]


@pytest.mark.slow
def test_runs_in_folders_of_their_own_have_names_of_their_own() -> None:
    """Else a second one would replace the first one's plan on a cluster."""
    folders = (
        "run",
        "a",
        "b",
        "kept/a",
        "Kept/a",
        "a_b",
        "a b",
        "a-",
        "ä",
        *(60 * "x" + c for c in "ab"),
    )
    for engine in ("kubernetes", *CLOUDS):
        names = []
        for run in (*folders, *(f"/runs/{one}" for one in folders)):
            text = export(make_plan(), engine, Target(run=run, settings=SETTINGS[engine]))
            *_, last = yaml.safe_load_all(text)
            names.append(last["name"] if engine in CLOUDS else last["metadata"]["name"])
        assert names[: len(folders)] == names[len(folders) :]
        assert len(set(names)) == len(folders)
        assert all(re.fullmatch("[a-z][a-z0-9-]{0,39}[a-z0-9]", one) for one in names)
        assert names[:2] == ["batchwright-resnet8", "batchwright-resnet8-a"]


def test_dstack_finds_the_plan_from_where_its_file_lies(tmp_path: Path) -> None:
    plan, out = tmp_path / "a:b" / "p.json", tmp_path / "deep" / "er" / "task.yaml"
    for one in (plan, out):
        one.parent.mkdir(parents=True)
    plan.write_text(make_plan().model_dump_json())
    given = [word for pair in SETTINGS["dstack"].items() for word in ("--set", "=".join(pair))]
    words = ["export", str(plan), "--as", "dstack", *given, "--out", str(out)]
    assert CliRunner().invoke(app, words).exit_code == 0
    task = yaml.safe_load(out.read_text())
    assert task["files"] == [{"local_path": "../../a:b/p.json", "path": "plan.json"}]
    assert "batchwright train plan.json --out" in task["commands"][-1]


def test_a_run_folder_of_another_plan_is_not_taken_for_the_runs_own(tmp_path: Path) -> None:
    """The file of a second plan says --resume where the first one's run lies."""
    plan = make_plan()
    write_record(plan, tmp_path / "plan.json")
    other = make_plan(job=make_job(seed=5))
    with pytest.raises(PlanError, match=r"a run of another plan \(seed=0, and .* has seed=5\): ch"):
        bw.train(other, run_folder=tmp_path, resume=True)
    data = plan.data.model_copy(update={"digest": 64 * "0", "name": "others"})
    with pytest.raises(PlanError, match=r"holds a run of another plan .* has data=others"):
        refuse_another(plan.model_copy(update={"data": data}), plan, tmp_path)
    job = plan.job.model_copy(update={"launch": "slurm", "timeout": 3.0, "restarts": 1})
    refuse_another(plan.model_copy(update={"job": job, "stages": 2 * plan.stages}), plan, tmp_path)


@pytest.mark.parametrize("name", ["kubernetes", *CLOUDS])
def test_a_run_folder_elsewhere_is_on_the_volume(name: str) -> None:
    for run in ("kept/a", "/runs/kept/a"):
        text = export(make_plan(), name, Target(run=run, settings=SETTINGS[name]))
        assert "--out /runs/kept/a $resume" in text
    for run in ("/shared/a", "../a", "/runs"):
        with pytest.raises(ArgumentError, match=f"--run-folder {run}: what is kept is mounted"):
            export(make_plan(), name, Target(run=run, settings=SETTINGS[name]))


def test_go_reads_names_as_texts_too() -> None:
    """Kubernetes' reader takes these for numbers, or for yes and no, where Python's does not."""
    for name in ("y", "n", "08", "1e3", "12e5"):
        text = exported(make_plan(), "kubernetes", namespace=name, claim=name)
        assert text.count(f"namespace: '{name}'\n") == 2
        assert f"claimName: '{name}'\n" in text


def test_a_config_map_holds_so_many_bytes_not_characters() -> None:
    plan = make_plan(network=make_network(name=500_000 * "ü"))
    with pytest.raises(PlanError, match=r"the plan has 1,\d{3},\d{3} bytes"):
        exported(plan, "kubernetes")


def test_a_name_is_as_short_as_the_strictest_engine_takes_it() -> None:
    plan = make_plan(network=make_network(name="timm:vit_base_patch16_224.augreg_in21k_ft_in1k"))
    for engine in ("dstack", "skypilot"):
        assert re.fullmatch("[a-z][a-z0-9-]{1,40}", yaml.safe_load(exported(plan, engine))["name"])


def test_clouds_get_a_task() -> None:
    sky = yaml.safe_load(exported(make_plan(job=make_job(device="cuda")), "skypilot", 2))
    assert sky["num_nodes"] == 2
    assert sky["resources"]["accelerators"] == "H100:1"
    assert "SKYPILOT_NODE_IPS" in sky["run"]
    assert sky["volumes"] == {"/runs": "runs"}
    assert "file_mounts" not in sky
    alone = yaml.safe_load(exported(make_plan(), "skypilot"))
    # A run appends and locks, which SkyPilot says of MOUNT that it does not support.
    assert alone["file_mounts"] == {"/runs": {"source": "s3://runs", "mode": "MOUNT_CACHED"}}
    assert "volumes" not in alone
    dstack = yaml.safe_load(exported(make_plan(), "dstack"))
    assert dstack["type"] == "task"
    assert dstack["resources"]["cpu"] == "2.."
    assert "batchwright train" in dstack["commands"][-1]
    assert dstack["commands"][0] == "pip install 'batchwright[data] @ https://host/b.whl'"


RULES = (
    {"decay": "cosine", "warmup_epochs": 0.0},
    {"decay": "cosine", "warmup_epochs": 2.5, "base": 0.02},
    {"decay": "steps", "warmup_epochs": 1.0, "base": 0.02},
    {"decay": "one-cycle", "warmup_epochs": 3.0},
    {"decay": "none", "warmup_epochs": 1.0, "base": 0.02},
    {"decay": "cosine", "warmup_epochs": 2.0, "warmup_start": 0.1},
    {"decay": "one-cycle", "warmup_epochs": 3.0, "warmup_start": 0.1},
)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", PYTHON)
def test_the_rate_is_the_plans(name: str, rule: dict[str, Any], tmp_path: Path) -> None:
    plan = with_rate(make_plan(), **rule)
    factor = module(exported(plan, name), tmp_path)["rate_factor"]
    samples = plan.data.train_samples
    for tenth in range(10 * plan.epochs + 20):
        epoch = tenth / 10
        ours = rate_factor(
            epoch * samples,
            rule=plan.learning_rate,
            samples_per_epoch=samples,
            epochs=plan.epochs,
        )
        assert factor(epoch) == pytest.approx(ours, abs=1e-12)


@pytest.mark.parametrize("name", PYTHON)
def test_the_optimizer_is_the_plans(name: str, tmp_path: Path) -> None:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    plan = make_plan()
    defined = module(exported(plan, name), tmp_path)
    optimizer = defined["optimizer"](model)
    decaying, other = optimizer.param_groups
    assert type(optimizer) is torch.optim.SGD
    assert decaying["nesterov"]
    assert decaying["lr"] == plan.stages[0].learning_rate
    assert [one.ndim for one in decaying["params"]] == [2]
    assert (decaying["weight_decay"], other["weight_decay"]) == (plan.job.weight_decay, 0.0)
    schedule = defined["schedule"](optimizer)
    for _ in range(defined["STEPS"]):
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(
        plan.stages[0].learning_rate * defined["rate_factor"](1)
    )
    with_muon = module(exported(plan.model_copy(update={"update": "muon"}), name), tmp_path)
    assert type(with_muon["optimizer"](model)).__name__ == "Muon"
    with_adamw = module(exported(plan.model_copy(update={"update": "adamw"}), name), tmp_path)
    assert type(with_adamw["optimizer"](model)) is torch.optim.AdamW
    assert with_adamw["optimizer"](model).defaults["betas"] == (0.9, 0.999)
    job = plan.job.model_copy(update={"betas": (0.8, 0.9), "eps": 1e-6})
    own = plan.model_copy(update={"job": job, "update": "adamw"})
    groups = module(exported(own, name), tmp_path)["optimizer"](model).param_groups
    assert [(one["betas"], one["eps"]) for one in groups] == [((0.8, 0.9), 1e-6)] * 2


@pytest.mark.parametrize("name", ["deepspeed", "timm"])
def test_adamws_own_settings_are_written(name: str) -> None:
    job = make_plan().job.model_copy(update={"betas": (0.8, 0.9), "eps": 1e-6})
    plan = make_plan(job=job, update="adamw")
    written = yaml.safe_load(exported(plan, name))
    if name == "timm":
        assert (written["opt_betas"], written["opt_eps"]) == ([0.8, 0.9], 1e-6)
        assert "opt_betas" not in yaml.safe_load(exported(make_plan(), name))
    else:
        options = written["optimizer"]["params"]
        assert (options["betas"], float(options["eps"])) == ([0.8, 0.9], 1e-6)
        assert "betas" not in yaml.safe_load(exported(make_plan(), name))["optimizer"]["params"]


def test_batches_are_cut_into_equal_passes(tmp_path: Path) -> None:
    """48 samples in passes of at most 20 are 3 of 16, so that each counts alike."""
    (stage,) = make_plan().stages
    plan = make_plan(stages=(stage.model_copy(update={"micro_batch_size": 20}),))
    defined = module(exported(plan, "lightning"), tmp_path)
    assert defined["BATCH"] == 16
    assert defined["TRAINER"]["accumulate_grad_batches"] == 3
    assert defined["TRAINER"]["precision"] == "bf16-mixed"
    config = json.loads(exported(plan, "deepspeed"))
    assert config["train_batch_size"] == 2 * 3 * 16
    arguments = yaml.safe_load(exported(plan, "timm"))
    assert (arguments["batch_size"], arguments["grad_accum_steps"]) == (16, 3)


def test_every_trainer_computes_in_the_plans_number_format(tmp_path: Path) -> None:
    def told(precision: str) -> list[object]:
        plan = make_plan(precision=precision)
        some = [module(exported(plan, name), tmp_path) for name in ("lightning", "accelerate")]
        arguments = module(exported(plan, "transformers"), tmp_path)["ARGUMENTS"]
        config = json.loads(exported(plan, "deepspeed"))
        timm = yaml.safe_load(exported(plan, "timm"))
        return [
            some[0]["TRAINER"]["precision"],
            next(one["mixed_precision"] for one in some[1].values() if _names_format(one)),
            (arguments["bf16"], arguments["fp16"]),
            (config["bf16"]["enabled"], config["fp16"]["enabled"]),
            timm["amp"] and timm["amp_dtype"],
        ]

    assert told("float16") == ["16-mixed", "fp16", (False, True), (False, True), "float16"]
    assert told("bfloat16") == ["bf16-mixed", "bf16", (True, False), (True, False), "bfloat16"]
    assert told("float32") == ["32-true", "no", (False, False), (False, False), False]


def _names_format(one: object) -> bool:
    return isinstance(one, dict) and "mixed_precision" in one


def test_nothing_is_clipped_unless_the_job_says_so(tmp_path: Path) -> None:
    """Transformers clips at 1 by default."""
    defined = module(exported(make_plan(), "transformers"), tmp_path)
    assert defined["ARGUMENTS"]["max_grad_norm"] == 0.0
    clipped = make_plan(job=make_job(clip_norm=2.0))
    defined = module(exported(clipped, "transformers"), tmp_path)
    assert defined["ARGUMENTS"]["max_grad_norm"] == 2.0
    assert "clip_grad_norm_(model.parameters(), 2)" in exported(clipped, "accelerate")


def test_resized_crops_go_to_timm_and_into_modules(tmp_path: Path) -> None:
    plan = make_plan(job=make_job(augment="resized-crop", crop_scale=0.35))
    stages = tuple(
        stage.model_copy(update={"augmentation": "resized-crop"}) for stage in plan.stages
    )
    plan = plan.model_copy(update={"stages": stages})
    timm = yaml.safe_load(exported(plan, "timm"))
    assert (timm["scale"], timm["ratio"], timm["hflip"]) == ([0.35, 1.0], [0.75, 4 / 3], 0.5)
    assert "scale" not in yaml.safe_load(exported(make_plan(), "timm"))
    for name in PYTHON:
        assert module(exported(plan, name), tmp_path)["CROP_SCALE"] == (0.35, 1.0)
        assert "CROP_SCALE" not in exported(make_plan(), name)


def test_numbers_to_normalize_by_go_to_timm_and_into_modules(tmp_path: Path) -> None:
    given = (0.5, 0.4, 0.3, 0.25, 0.2, 0.1)
    plan = make_plan(job=make_job(normalize=given))
    text = exported(plan, "timm")
    timm = yaml.safe_load(text)
    assert (timm["mean"], timm["std"]) == ([0.5, 0.4, 0.3], [0.25, 0.2, 0.1])
    assert "give mean and std" not in text
    for name in PYTHON:
        defined = module(exported(plan, name), tmp_path)
        assert (*defined["MEAN"], *defined["STD"]) == given
        assert "MEAN" not in exported(make_plan(), name)
        assert "mean and deviation" not in exported(plan, name)
    said = "\n# The plan is to normalize by mean and deviation of the training images"
    for normalize in ("auto", "data"):
        own = make_plan(job=make_job(normalize=normalize))
        text = exported(own, "timm")
        assert "mean" not in yaml.safe_load(text)
        assert said in text
        for name in PYTHON:
            assert said in exported(own, name)
            module(exported(own, name), tmp_path)


def test_trainers_get_a_seed_that_numpy_takes(tmp_path: Path) -> None:
    plan = make_plan(job=make_job(seed=2**40 + 7))
    for name in PYTHON:
        assert module(exported(plan, name), tmp_path)["SEED"] == 7
    assert module(exported(plan, "transformers"), tmp_path)["ARGUMENTS"]["seed"] == 7
    assert yaml.safe_load(exported(plan, "timm"))["seed"] == 7


def test_timm_counts_warm_up_in_whole_epochs() -> None:
    plan = with_rate(make_plan(), warmup_epochs=1.5, base=0.02)
    arguments = yaml.safe_load(exported(plan, "timm"))
    assert arguments["warmup_epochs"] == 2
    assert arguments["epochs"] == plan.epochs - 2
    assert arguments["warmup_lr"] == pytest.approx(0.02)
    whole = yaml.safe_load(exported(with_rate(plan, warmup_epochs=plan.epochs - 0.5), "timm"))
    assert (whole["epochs"], whole["warmup_epochs"]) == (1, plan.epochs - 1)


@pytest.mark.parametrize("name", ["deepspeed", "timm"])
def test_a_warm_up_begins_where_the_job_says(name: str) -> None:
    plan = with_rate(make_plan(), warmup_epochs=2.0, warmup_start=0.25)
    written = yaml.safe_load(exported(plan, name))
    if name == "timm":
        assert written["warmup_lr"] == 0.25 * plan.stages[0].learning_rate
    else:
        assert written["scheduler"]["params"]["warmup_min_ratio"] == 0.25


@pytest.mark.parametrize("name", TRAINERS)
def test_what_a_trainer_cannot_follow_is_refused(name: str) -> None:
    (stage,) = make_plan().stages
    uneven = make_plan(stages=(stage.model_copy(update={"local_batch_sizes": (64, 32)}),))
    plain = "plan again with method=plain"
    for plan, why, advice in (
        (make_dual_plan(), "two batch sizes", plain),
        (make_cyclic_plan(), "stages", plain),
        (make_plan(method="dynamic-batch"), "shares follow speed", plain),
        (
            uneven,
            "32 to 64 samples",
            "plan again with workers of one kind and a global_batch that they share evenly",
        ),
        (
            make_plan(job=make_job(body_rate=0.1)),
            r"body_rate=0\.1 gives two rates",
            "probe and plan again without body_rate",
        ),
        (
            make_plan(job=make_job(average_weights="on")),
            "average_weights=on evaluates",
            "plan again with average_weights=off",
        ),
        (
            make_plan(job=make_job(sampling="balanced")),
            "sampling=balanced draws",
            "plan again with sampling=shuffle",
        ),
        (
            with_rate(make_plan(), scaling="gain"),
            "scaling=gain measures",
            "plan again with scaling=sqrt",
        ),
    ):
        with pytest.raises(PlanError, match=f"{why}.*batchwright train.*, or {advice}$"):
            exported(plan, name)


@pytest.mark.parametrize("name", ["deepspeed", "timm"])
def test_what_its_words_cannot_say_is_refused(name: str) -> None:
    with pytest.raises(PlanError, match="muon: plan again with optimizer=sgd"):
        exported(make_plan(update="muon"), name)
    with pytest.raises(PlanError, match="decay=steps"):
        exported(with_rate(make_plan(), decay="steps"), name)


def test_a_trainer_that_replays_no_graphs_is_said_to_take_longer() -> None:
    replayed = make_plan(job=make_job(cuda_graphs="on"))
    for name in ("lightning", "transformers", "accelerate", "timm"):
        assert "The plan's times are with CUDA graphs" in exported(replayed, name)
        assert "CUDA graphs" not in exported(make_plan(), name)


@pytest.mark.parametrize(
    ("keys", "said", "refused"),
    [
        ({"frozen": ("stem.*", "stages.0.*")}, "leaves weights frozen", r"frozen=stem\.\*,stages"),
        ({"loss": "my_losses:focal"}, "a loss of your own", "loss=my_losses:focal"),
        ({"weights": "before.pt"}, "starts from trained weights", None),
        ({"network_args": {"pretrained": True}}, "starts from trained weights", None),
    ],
)
def test_what_the_script_must_do_itself_is_said_and_what_timm_cannot_is_refused(
    keys: dict[str, Any], said: str, refused: str | None
) -> None:
    plan = make_plan(job=make_job(**keys))
    for name in PYTHON:
        assert said in exported(plan, name)
        assert said not in exported(make_plan(), name)
    if refused is None:
        assert said in exported(plan, "timm")
        return
    with pytest.raises(PlanError, match=f"timm has no option for {refused}.*batchwright train"):
        exported(plan, "timm")


def test_the_loop_for_accelerate_takes_all_epochs() -> None:
    words = ast.get_docstring(ast.parse(exported(make_plan(), "accelerate"))) or ""
    code = words.partition("import plan\n")[2].partition("Start it by")[0]
    names = {name: MagicMock() for name in ("Accelerator", "set_seed", "data", "model", "loss")}
    names["Accelerator"].return_value.prepare = lambda *given: given
    plan = MagicMock(EPOCHS=3, ACCELERATOR={})
    names |= {"plan": plan, "DataLoader": lambda *_, **__: 5 * [(0, 0)]}
    exec(dedent(code), names)  # noqa: S102 - what a reader would copy
    assert plan.optimizer.return_value.step.call_count == 3 * 5
    assert plan.schedule.return_value.step.call_count == 3 * 5
    names["set_seed"].assert_called_once_with(plan.SEED)


def test_a_trainer_is_said_to_average_no_weights_and_not_to_end_at_the_target() -> None:
    targeted = make_plan(job=make_job(goal={"accuracy": 0.9}), average_epochs=0.5)
    for name in ("lightning", "transformers", "accelerate", "timm"):
        text = exported(targeted, name)
        assert "Training does not end at goal.accuracy=0.9, but after" in text
        assert "evaluates an average of the weights, which is not computed here" in text
        assert "does not" not in exported(make_plan(), name)


def test_compiling_and_recomputing_are_passed_on_or_refused() -> None:
    compiled = make_plan(job=make_job(compile="on"))
    for name, said in (
        ("lightning", "trainer.fit(torch.compile(module, dynamic=True), loader)"),
        ("transformers", "'torch_compile': True"),
        ("accelerate", "'dynamo_backend': 'inductor'"),
        ("timm", "torchcompile: inductor"),
    ):
        assert said in exported(compiled, name)
        assert said not in exported(make_plan(), name)
    with pytest.raises(PlanError, match="no key for compile=on"):
        exported(compiled, "deepspeed")
    recomputed = make_plan(job=make_job(activation_checkpointing="on"))
    for name in ("lightning", "accelerate", "deepspeed"):
        with pytest.raises(PlanError, match="no setting for activation_checkpointing=on"):
            exported(recomputed, name)
    assert "'gradient_checkpointing': True" in exported(recomputed, "transformers")
    assert "grad_checkpointing: true" in exported(recomputed, "timm")


@pytest.mark.parametrize("name", EXPORTS)
def test_the_run_folder_is_the_one_that_is_asked_for(name: str) -> None:
    target = Target(run="kept/here", settings=SETTINGS.get(name, {}))
    if name == "deepspeed":
        with pytest.raises(ArgumentError, match="--run-folder kept/here: deepspeed's file has"):
            export(make_plan(), name, target)
    else:
        assert "kept/here" in export(make_plan(), name, target)


SKY = {"package": "./b.whl", "accelerator": "H100"}


def test_bad_words_are_refused() -> None:
    for name, settings, said in (
        ("pbs", {}, "'pbs': known are torchrun, sbatch"),
        ("slurm", {}, "'slurm': sbatch is a batch script of Slurm; known are torchrun"),
        ("kubernetes", {"image": "x"}, "--set claim="),
        ("sbatch", {"qos": "high"}, "it takes partition, account, time"),
        ("sbatch", {"time": "soon"}, "--set time=soon: Slurm takes minutes"),
        ("sbatch", {"cpus-per-task": "abc"}, "--set cpus-per-task=abc: give a whole number of c"),
        ("sbatch", {"cpus-per-task": "0"}, "--set cpus-per-task=0: give a whole number of cores"),
        ("kubernetes", {"image": "x", "claim": "c", "namespace": "Bad_Name"}, "e=Bad_Name: Kub"),
        ("kubernetes", {"image": "x", "claim": "c", "namespace": 64 * "a"}, "63 at most"),
        ("kubernetes", {"image": "x", "claim": "-c"}, "--set claim=-c: Kubernetes takes small"),
        ("sbatch", {"time": "2-12:30\n"}, "in one line"),
        ("sbatch", {"partition": "a\n#SBATCH --exclusive"}, "in one line"),
        ("torchrun", {"image": "x"}, "it takes none"),
        ("skypilot", {"bucket": "s3://x"}, "skypilot needs --set package=...: what pip installs"),
        ("skypilot", {"bucket": "s3://x", "package": "./b.whl"}, "accelerator"),
        ("kubernetes", {"image": "my image", "claim": "c"}, "image=my image: an image's name has"),
        ("skypilot", SKY | {"volume": "runs:/runs"}, "volume=runs:/runs: give a volume's name"),
        ("dstack", {"package": "b", "volume": "runs:/runs"}, "volume=runs:/runs: give a volume's"),
        ("skypilot", SKY | {"bucket": "runs"}, "bucket=runs: give a whole bucket with where it is"),
        ("skypilot", SKY | {"bucket": "s3://a/b"}, "SkyPilot mounts no folder of one"),
        ("ray", {"gpus": "8"}, "it takes cpus, min_workers"),
    ):
        device = "cuda" if name == "skypilot" else "cpu"
        with pytest.raises(ArgumentError, match=said):
            export(make_plan(job=make_job(device=device)), name, Target(settings=settings))
    keeping = {"bucket": "s3://x", "volume": "x"}
    for hosts, given, said in (
        (1, (), "needs --set bucket=..., on one host, or --set volume=...:"),
        (1, ("bucket", "volume"), "give one of them"),
        (2, ("bucket",), "2 hosts need a run folder that they share .* --set volume=NAME"),
    ):
        settings = {"package": "./b.whl"} | {key: keeping[key] for key in given}
        with pytest.raises(ArgumentError, match=said):
            export(make_plan(), "skypilot", Target(hosts, settings=settings))
    for name in CLOUDS:  # make_plan() is for device=cpu
        with pytest.raises(ArgumentError, match="accelerator=H100: the plan is for device=cpu"):
            exported(make_plan(), name, accelerator="H100")
    on_nodes = make_plan(job=make_job(launch="slurm", nodes=2))
    assert "launch=auto nodes=1 --out" in exported(on_nodes, "sbatch", 2)
    assert "launch=ray ray.gpus_per_worker=0 nodes=1 --out" in exported(on_nodes, "ray")
    for limit in ("90", "90:00", "04:00:00", "2-12", "2-12:30", "2-12:30:00", "UNLIMITED"):
        assert f"#SBATCH --time={limit}\n" in exported(make_plan(), "sbatch", time=limit)
    simulated = make_plan(job=make_job(launch="virtual"))
    for name in LAUNCHERS:
        with pytest.raises(PlanError, match="launch=virtual, whose workers and times are simul"):
            exported(simulated, name)
    for name in EXPORTS:
        with pytest.raises(ArgumentError, match="--run-folder is empty: name the run folder"):
            export(make_plan(), name, Target(run="", settings=SETTINGS.get(name, {})))
    with pytest.raises(PlanError, match="--hosts that divides 2"):
        exported(make_plan(), "torchrun", 3)
    for path in ("/home/plan.json", "../plan.json"):
        with pytest.raises(ArgumentError, match=f"and {path} is not below it"):
            export(make_plan(), "skypilot", Target(plan=path, settings=SETTINGS["skypilot"]))
    with pytest.raises(ArgumentError, match="ray places the workers"):
        exported(make_plan(), "ray", 2)
    with pytest.raises(JobError, match=r"ray.min_workers=3 of workers=2: give at most"):
        exported(make_plan(), "ray", min_workers="3")


def test_the_command_writes_the_file(tmp_path: Path) -> None:
    plan, out = tmp_path / "plan.json", tmp_path / "job.sbatch"
    plan.write_text(make_plan().model_dump_json())
    run = CliRunner().invoke
    made = run(
        app, ["export", str(plan), "--as", "sbatch", "--set", "account=a", "--out", str(out)]
    )
    assert made.exit_code == 0
    assert f"batchwright train {plan}" in out.read_text()
    assert "#SBATCH --account=a" in out.read_text()
    words = ["export", str(plan), "--as", "sbatch"]
    twice = run(app, [*words, "--set", "account=a", "--set", "account=b"])
    assert str(twice.exception) == (
        "--set account=b: account=a is given as well; leave one of the two out"
    )
    for words in ([str(plan)], []):
        listed = run(app, ["export", *words, "--as", "list"])
        assert all(name in listed.stdout for name in EXPORTS)
        assert "--set claim=  PersistentVolumeClaim" in listed.stdout
        assert listed.stdout.count("(needed)") == 5
        assert not any(line.endswith("=  ") for line in listed.stdout.splitlines())
    nothing = run(app, ["export", "--as", "sbatch"])
    assert isinstance(nothing.exception, ArgumentError)
    wrong = run(app, ["export", str(plan), "--as", "sbatch", "--set", "account"])
    assert isinstance(wrong.exception, ArgumentError)


@pytest.mark.slow
def test_two_hosts_train_by_the_script_of_torchrun(tmp_path: Path, forks: None) -> None:
    """Two agents of torchrun on this machine, started by the same script."""
    keys = {"data": "digits", "network": "resnet8", "epochs": 1, "global_batch": 128}
    job = bw.Job(**keys, workers=2, port=free_port(), device="cpu")
    plan, script = tmp_path / "plan.json", tmp_path / "train.sh"
    made = plan_without_profile(job, data_facts(job), make_network(name=job.network))
    plan.write_text(made.model_dump_json())
    script.write_text(
        export(read_record(plan, Plan), "torchrun", Target(2, str(plan), str(tmp_path / "run")))
    )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with forking_tasks(tmp_path / "log") as more:
        paths = os.pathsep.join([more["PYTHONPATH"], *sys.path])
        own = {**more, "PATH": path, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        started = {"env": os.environ | own, "cwd": tmp_path}
        agents = [
            subprocess.Popen(["/bin/sh", str(script), "127.0.0.1"], **started) for _ in range(2)
        ]
        assert [agent.wait(timeout=600) for agent in agents] == [0, 0]
    summary = read_record(tmp_path / "run" / "summary.json", bw.RunSummary)
    assert len(summary.epochs) == 1
    assert {worker.samples for worker in summary.epochs[0].workers} != {0}
    assert len(summary.epochs[0].workers) == 2
