"""Each export is read by its target's own parser, schema or class, where that is installed."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from batchwright.algorithms.learning_rate import rate_factor
from batchwright.records import Plan
from samples import make_job, make_plan
from test_exports import exported, module, with_rate


def package(name: str, install: str) -> Any:
    """The package; skipped with what installs it, also where torchvision beside it is broken."""
    return pytest.importorskip(name, reason=install, exc_type=(ImportError, RuntimeError))


RISING = {"decay": "cosine", "warmup_epochs": 2.0, "warmup_start": 0.25}


def rates(plan: Plan, steps: int) -> list[float]:
    """The plan's own, before each step of an epoch of so many, up to its end."""
    samples = plan.data.train_samples
    return [
        plan.stages[0].learning_rate
        * rate_factor(
            step / steps * samples,
            rule=plan.learning_rate,
            samples_per_epoch=samples,
            epochs=plan.epochs,
        )
        for step in range(steps * plan.epochs)
    ]


# ------------------------------------------------------------------------------------------ engines


@pytest.mark.parametrize("hosts", [1, 2])
def test_torchruns_own_parser_reads_what_the_script_starts(hosts: int, tmp_path: Path) -> None:
    from torch.distributed.run import get_args_parser

    for name in ("torchrun", "batchwright"):
        program = tmp_path / name
        program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
        program.chmod(0o755)
    script = tmp_path / "script"
    script.write_text(exported(make_plan(), "torchrun", hosts))
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    said = subprocess.check_output(
        ["/bin/sh", str(script), "head"], text=True, env=environment, cwd=tmp_path, timeout=60
    ).splitlines()
    if hosts == 1:  # no need of torchrun
        assert said == ["train", "plan.json", "--out", "run"]
        return
    read = get_args_parser().parse_args(said)
    assert (read.nnodes, read.nproc_per_node) == ("2", "1")
    assert (read.rdzv_backend, read.rdzv_endpoint) == ("c10d", "head:29400")
    assert read.max_restarts == make_plan().job.restarts
    assert read.module
    assert read.training_script == "batchwright"
    assert read.training_script_args == ["train", "plan.json", "--out", "run"]


@pytest.mark.parametrize("hosts", [1, 2])
def test_kubernetes_schema_takes_every_document(hosts: int) -> None:
    validate = package("kubernetes_validate", "pip install kubernetes-validate").validate
    for device in ("cpu", "cuda"):
        text = exported(make_plan(job=make_job(device=device)), "kubernetes", hosts, namespace="t")
        documents = list(yaml.safe_load_all(text))
        assert [one["kind"] for one in documents][-1] == "Job"
        for one in documents:
            validate(one, "1.31", strict=True)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("hosts", [1, 2])
def test_skypilot_makes_a_task_of_it(hosts: int, device: str) -> None:
    sky = package("sky", "pip install skypilot")
    text = exported(make_plan(job=make_job(device=device)), "skypilot", hosts)
    task = sky.Task.from_yaml_config(yaml.safe_load(text))
    assert task.num_nodes == hosts
    (asked,) = task.resources
    if device == "cuda":
        assert asked.accelerators == {"H100": 2 // hosts}
    else:
        assert asked.cpus == f"{2 // hosts}+"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("hosts", [1, 2])
def test_dstack_makes_a_task_of_it(hosts: int, device: str) -> None:
    configurations = package("dstack._internal.core.models.configurations", "pip install dstack")
    text = exported(make_plan(job=make_job(device=device)), "dstack", hosts)
    task = configurations.parse_run_configuration(yaml.safe_load(text))
    assert (task.type, task.nodes) == ("task", hosts)
    assert task.commands[-1].endswith("$resume\n")


# ----------------------------------------------------------------------------------------- trainers


@pytest.mark.slow
def test_lightning_builds_its_trainer(tmp_path: Path) -> None:
    lightning = package("lightning", 'pip install "batchwright[lightning]"')
    plan = make_plan(job=make_job(clip_norm=2.0))
    arguments = module(exported(plan, "lightning"), tmp_path)["TRAINER"]
    trainer = lightning.Trainer(**arguments, logger=False, enable_checkpointing=False)
    assert (trainer.num_devices, trainer.max_epochs) == (2, plan.epochs)
    assert (trainer.gradient_clip_val, trainer.precision) == (2.0, "bf16-mixed")


@pytest.mark.slow
def test_transformers_builds_its_arguments(tmp_path: Path) -> None:
    transformers = package("transformers.training_args", 'pip install "batchwright[transformers]"')
    plan = make_plan()
    defined = module(exported(plan, "transformers"), tmp_path)
    made = transformers.TrainingArguments(**defined["ARGUMENTS"])
    assert made.train_batch_size == plan.stages[0].local_batch_sizes[0]
    assert (made.num_train_epochs, made.bf16, made.max_grad_norm) == (plan.epochs, True, 0.0)


def test_accelerate_builds_its_accelerator(tmp_path: Path) -> None:
    accelerate = package("accelerate", 'pip install "batchwright[accelerate]"')
    from accelerate.state import AcceleratorState

    text = exported(make_plan(), "accelerate")
    try:
        made = accelerate.Accelerator(**module(text, tmp_path)["ACCELERATOR"])
        assert (made.mixed_precision, made.gradient_accumulation_steps) == ("bf16", 1)
        assert not made.step_scheduler_with_optimizer
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def test_deepspeed_reads_the_configuration_and_follows_the_rate() -> None:
    package("deepspeed", "pip install deepspeed")
    import torch
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.lr_schedules import WarmupCosineLR

    (stage,) = make_plan().stages  # on one worker: it divides the batch by those that there are
    alone = make_plan(stages=(stage.model_copy(update={"local_batch_sizes": (96,)}),))
    for plan in (with_rate(alone, **RISING), with_rate(alone, warmup_epochs=0.0)):
        written = json.loads(exported(plan, "deepspeed"))
        read: Any = DeepSpeedConfig(written)
        assert read.train_batch_size == 96
        assert read.train_micro_batch_size_per_gpu * read.gradient_accumulation_steps == 96
        assert (read.optimizer_name, read.scheduler_name) == ("SGD", "WarmupCosineLR")
        rate = plan.stages[0].learning_rate
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=rate)
        parameters = written["scheduler"]["params"]
        schedule = WarmupCosineLR(optimizer, **parameters)
        for ours in rates(plan, parameters["total_num_steps"] // plan.epochs):
            schedule.step()  # which is a step ahead after its warm-up
            assert optimizer.param_groups[0]["lr"] == pytest.approx(ours, abs=0.01 * rate)


def test_timms_factories_take_the_arguments_and_follow_the_rate() -> None:
    scheduler = package("timm.scheduler", "pip install --no-deps timm")
    import torch
    from timm.optim import create_optimizer

    plan = with_rate(make_plan(), **RISING)
    arguments = argparse.Namespace(**yaml.safe_load(exported(plan, "timm")))
    optimizer = create_optimizer(arguments, torch.nn.Linear(2, 2))
    steps = 10
    schedule, epochs = scheduler.create_scheduler(arguments, optimizer, updates_per_epoch=steps)
    assert epochs == plan.epochs
    for number, ours in enumerate(rates(plan, steps)):
        schedule.step_update(number)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(ours, rel=1e-6, abs=1e-9)
