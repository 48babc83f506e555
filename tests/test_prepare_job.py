"""A job made concrete before anything is measured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import batchwright as bw
from batchwright.errors import BatchwrightError, JobError, PlanError
from batchwright.planning.planner import plan_without_profile
from batchwright.records import Job
from batchwright.records.agent_rules import misfit
from batchwright.records.documents import write_record
from batchwright.training.loop import accuracy_and_loss
from batchwright.workflows.prepare_job import check_training, check_workload, ready, resolve
from batchwright.workload import host
from batchwright.workload.data.sources import open_data
from samples import make_data, make_job, make_network, make_plan, make_server


def test_what_needs_no_measuring_is_settled_and_the_worker_count_left_to_the_plan():
    job = resolve(Job(device="cpu"), make_data(side=8))
    assert (job.device, job.augment, job.resolutions) == ("cpu", "crop", (8,))
    assert (job.workers, job.precision, job.global_batch) == ("auto", "auto", "auto")


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_a_worker_count_that_was_asked_for_stays(workers):
    assert resolve(Job(device="cpu", workers=workers), make_data()).workers == workers


def test_more_workers_than_a_machine_can_have_are_refused_before_data_are_opened():
    with pytest.raises(JobError, match=r"workers=9999 on this machine, which has \d+ core"):
        ready(Job(device="cpu", data="imagefolder:nowhere", workers=9999))
    many = Job(device="cpu", data="digits", launch="virtual", workers=9999)
    assert resolve(many, make_data()).workers == 9999


def test_more_workers_than_gpus_are_refused_before_one_is_started(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve(Job(device="cuda", workers=2), make_data()).device == "cuda"
    with pytest.raises(JobError, match=r"worker 2 has no GPU of its own, 2 visible; try workers=2"):
        resolve(Job(device="cuda", workers=3), make_data())
    virtual = Job(device="cuda", workers=3, launch="virtual")
    assert resolve(virtual, make_data()).workers == 3


@pytest.mark.parametrize(
    ("keys", "server", "said"),
    [
        (
            {},
            None,
            "runs/a b has 2 workers, and here 1 GPU is visible: to continue with 1, start "
            "`torchrun --standalone --nproc-per-node 1 -m batchwright run --resume "
            "--out 'runs/a b'`",
        ),
        ({"network": "mine:net"}, None, "--out 'runs/a b' network=mine:net`"),
        ({"launch": "local"}, None, "--out 'runs/a b' launch=auto`"),
        ({}, make_server(), "1 GPU is visible: start it when 2 are there"),
    ],
    ids=["plain", "own network", "own processes", "server"],
)
def test_a_run_that_goes_on_with_fewer_gpus_is_told_how(monkeypatch, keys, server, said):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    plan = make_plan(job=make_job(device="cuda", **keys), server=server)
    with pytest.raises(PlanError, match=f"{re.escape(said)}$"):
        check_training(plan, resumed=Path("runs/a b"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(BatchwrightError) as other:  # the made-up plan is for no data here
        check_training(plan, resumed=Path("runs/a b"))
    assert "visible" not in str(other.value)


@pytest.mark.parametrize("workers", ["auto", 1])
def test_one_process_is_one_worker(workers):
    job = Job(device="cpu", workers=workers, launch="in-process")
    assert resolve(job, make_data()).workers == 1


def test_a_cycle_gets_resolutions_below_the_datas_own_that_the_network_takes():
    def sides(side, **keys):
        return resolve(Job(device="cpu", method="cyclic", **keys), make_data(side=side)).resolutions

    assert sides(32) == (24, 32)
    assert sides(160) == (88, 124, 160)
    assert sides(8) == (6, 8)  # resnet8 takes 4 px
    with pytest.raises(JobError, match="one resolution, 8 px"):
        sides(8, network="vgg8")  # which takes no less
    assert sides(32, resolutions=(16, 32)) == (16, 32)


def test_a_preset_settles_epochs_and_resolutions_before_anything_is_measured():
    job = resolve(Job(device="cpu", method="hybrid", cycle={"preset": "cifar100"}), make_data())
    assert (job.epochs, job.resolutions) == (140, (24, 32))


def test_a_preset_brings_its_recipe_where_the_job_says_nothing_else():
    preset = {"preset": "cifar100"}
    job = resolve(Job(device="cpu", method="hybrid", cycle=preset), make_data())
    assert (job.augment, job.rotation, job.zoom) == ("flip", 0.05, 0.25)
    assert (job.nesterov, job.looks_ahead, job.weight_decay) == (False, False, 1e-4)
    assert resolve(job, make_data()) == job
    assert not misfit(Job(device="cpu", method="hybrid", cycle=preset), job)
    given = {"augment": "crop", "rotation": 0.1, "weight_decay": 2e-4}
    asked = resolve(Job(device="cpu", method="hybrid", cycle=preset, **given), make_data())
    assert {key: getattr(asked, key) for key in given} == given
    usual = Job(device="cpu", method="hybrid", cycle=preset | {"keep": ("epochs", "weight_decay")})
    kept = resolve(usual, make_data())
    assert (kept.epochs, kept.weight_decay, kept.rotation) == (30, 5e-4, 0.05)
    assert not misfit(usual, kept)
    assert "weight_decay" in misfit(usual, kept.model_copy(update={"weight_decay": 1e-4}))
    plain = resolve(Job(device="cpu", cycle=preset), make_data())  # which has no cycle
    assert (plain.augment, plain.rotation, plain.weight_decay) == ("crop", 0.0, 5e-4)


def test_a_virtual_cluster_has_as_many_workers_as_asked_or_as_the_plan_chooses():
    assert resolve(Job(device="cpu", launch="virtual", workers=8), make_data()).workers == 8
    open_ = Job(device="cpu", launch="virtual", goal={"max_workers": 8})
    assert resolve(open_, make_data()).workers == "auto"


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"method": "dual-batch", "dual": {"large_batches": (8, 4)}}, "2 values for 1 resolution"),
        ({"method": "cyclic", "cycle": {"batches": (8, 4, 2)}}, "3 values for 2 resolution"),
    ],
)
def test_what_does_not_go_with_the_datas_resolutions_is_refused_before_measuring(keys, named):
    with pytest.raises(JobError, match=named):
        resolve(Job(device="cpu", **keys), make_data())


def test_of_stated_step_times_the_largest_extra_time_is_told_and_more_refused():
    def served(extra, **virtual):
        return Job(
            device="cpu",
            method="dual-batch",
            launch="virtual",
            workers=4,
            dual={"small_workers": 1, "extra_time": extra, "large_batches": (100,)},
            virtual={"sample_seconds": 0.001, "step_seconds": 0.01, **virtual},
        )

    for extra in (1.4, 1.3):  # 1.333 would leave no samples
        with pytest.raises(JobError, match=r"a local batch below 2 .*: give at most 1\.2565,"):
            ready(served(extra))
    data = make_data(train_samples=1437, side=8)
    with pytest.raises(PlanError, match=r"give at most 1\.2565,"):
        plan_without_profile(served(1.3), data, make_network())
    assert ready(served(1.25)).dual.extra_time == 1.25
    assert ready(served(1.3, speeds=(1, 1, 1, 2))).workers == 4  # left to the plan


def flat(num_classes):
    """Takes images of 8 px only: its features have a fixed grid."""
    return nn.Sequential(nn.Flatten(), nn.Linear(192, num_classes))


def test_a_network_that_cannot_change_resolution_is_refused_before_measuring():
    name = f"{flat.__module__}:{flat.__name__}"
    for method in ("cyclic", "hybrid"):
        with pytest.raises(JobError, match=r"takes images of 8 pixels only, not 6 .*cannot change"):
            ready(Job(device="cpu", method=method, network=name, workers=1))
    assert ready(Job(device="cpu", network=name, workers=1)).resolutions == (8,)


def test_resolutions_too_small_for_the_network_are_refused_with_the_least():
    with pytest.raises(JobError, match="resnet8: takes images of at least 4 pixels, not 2: give"):
        ready(Job(device="cpu", method="cyclic", resolutions=(2, 8), workers=1))


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"global_batch": 4, "workers": 4}, "too small for 4 worker.* give at least 8"),
        ({"micro_batch": 1}, "micro_batch=1 cuts a local batch of 2"),
        (
            {"ags": {"mode": "norm"}, "global_batch": 3, "base_batch": 1, "workers": 1},
            "3 samples cannot be cut into 2 of at least 2: give global_batch=4 or more",
        ),
        ({"scaling": "gain", "global_batch": 3, "base_batch": 1}, "3 samples cannot be cut"),
        (
            {"ags": {"mode": "norm", "least": 5}, "global_batch": 512},
            "ags.least=5 is more than the largest factor at a batch of 512, 2",
        ),
        ({"micro_batch": 1, "global_batch": 64, "workers": 2}, "a local batch of 32 into parts"),
    ],
)
def test_what_needs_no_measuring_is_refused_before_it(keys, named):
    with pytest.raises(BatchwrightError, match=named):
        ready(Job(device="cpu", network="resnet8", **keys))


@pytest.mark.parametrize(
    "keys",
    [
        {"goal": {"objective": "cost", "price": 1}},
        {"goal": {"max_cost": 1, "kinds": [{"kind": "a", "count": 2, "price": 1}]}},
        {"global_batch": 4, "workers": 4, "goal": {"max_workers": 2}},
        {"global_batch": 4, "workers": 2},
        {"micro_batch": 3, "global_batch": 64},
        {"ags": {"mode": "norm"}, "global_batch": 4, "base_batch": 1, "workers": 2},
    ],
)
def test_what_may_come_to_a_plan_is_measured(keys):
    assert ready(Job(device="cpu", network="resnet8", **keys)).device == "cpu"


def test_a_preset_that_does_not_suit_the_data_is_a_warning(capsys):
    job = ready(Job(device="cpu", method="cyclic", workers=1, cycle={"preset": "cifar100"}))
    assert job.resolutions == (24, 32)
    told = capsys.readouterr().err.splitlines()
    assert told == [
        "warning: cycle.preset=cifar100 was made for 100 classes, digits has 10",
        "warning: cycle.preset=cifar100 was made for images of 32 px, digits has 8 px",
    ]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"cycle": {"preset": "cifar100"}},
            ["cycle.preset=cifar100 does nothing with method=plain"],
        ),
        ({"cycle": {"recalibrate": 2}}, []),
        ({"dual": {"extra_time": 1.1}}, ["dual.extra_time=1.1 does nothing with method=plain: it"]),
        (
            {"method": "hybrid", "workers": 2, "cycle": {"batches": (64, 32)}},
            ["cycle.batches=64,32 does nothing with method=hybrid: it is for cyclic"],
        ),
        (
            {"method": "dual-batch", "workers": 2, "cycle": {"dropouts": (0, 0.1, 0.2)}},
            ["cycle.dropouts=0.0,0.1,0.2 does nothing with method=dual-batch: it is for"],
        ),
        ({"val": 0.2}, ["val=0.2 does nothing: digits has held-out images of its own (36 images"]),
        ({"resolutions": (8, 136)}, ["resolutions=136 for images of digits, which have 8 px"]),
        ({"resolutions": (8, 128)}, []),
        ({"method": "hybrid", "workers": 1}, ["method=hybrid with workers=1 has one group"]),
        ({"rebalance_steps": 5, "server": {"merge": "compsac"}}, ["server.merge=", "rebalance_"]),
        (
            {"goal": {"objective": "time", "accuracy": 0.9}},
            ["goal.accuracy=0.9 does not end the training with goal.objective=time: auto and"],
        ),
        ({"goal": {"accuracy": 0.1}}, ["goal.accuracy=0.1 is reached by guessing, which is right"]),
        ({"goal": {"accuracy": 0.11}}, []),
        (
            {"betas": (0.8, 0.9)},
            ["betas=0.8,0.9 does nothing with optimizer=auto: it is for adamw"],
        ),
        ({"eps": 0.1, "optimizer": "muon"}, ["eps=0.1 does nothing with optimizer=muon"]),
        ({"betas": (0.8, 0.9), "eps": 0.1, "optimizer": "adamw"}, []),
        (
            {"epochs": 9, "evaluate_epochs": 2, "goal": {"patience": 5}},
            ["goal.patience=5 does nothing with 5 evaluations: give at most 4"],
        ),
        (
            {"epochs": 2, "evaluate_epochs": 2, "goal": {"patience": 5}},
            ["goal.patience=5 does nothing with 1 evaluation: leave it out"],
        ),
        ({"epochs": 9, "evaluate_epochs": 2, "goal": {"patience": 4}}, []),
        (
            {"method": "cyclic", "epochs": 28, "goal": {"patience": 2}},
            ["goal.patience=2 does nothing with 2 evaluations at the last resolution and rate"],
        ),
        ({"method": "cyclic", "epochs": 28, "goal": {"patience": 1}}, []),
        (
            {"method": "cyclic", "epochs": 28, "evaluate_epochs": 5, "goal": {"patience": 1}},
            ["goal.patience=1 does nothing with 1 evaluation at the last resolution and rate"],
        ),
        (
            {"epochs": 9, "checkpoint_epochs": 10},
            ["checkpoint_epochs=10 does nothing with epochs=9: give at most 9"],
        ),
        ({"epochs": 9, "checkpoint_epochs": 9}, []),
        ({"method": "cyclic", "cycle": {"batches": (64, 32)}}, []),
        ({"method": "hybrid", "workers": 2, "dual": {"extra_time": 1.1}}, []),
        ({}, []),
    ],
)
def test_keys_that_do_nothing_with_the_method_or_the_data_are_warnings(keys, said, capsys):
    ready(Job(device="cpu", **({"workers": 1} | keys)))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(said)
    assert all(line.startswith(f"warning: {one}") for one, line in zip(said, lines, strict=True))


class Pictures(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.full((3, 8, 8), float(index % 2)), index % 2


def pictures():
    return Pictures(), Pictures(), ("dark", "light")


@pytest.mark.parametrize("augment", ["flip", "crop-flip", "none", "auto"])
def test_augmenting_images_that_stay_as_they_come_is_a_warning(augment, capsys):
    job = Job(device="cpu", data=f"{__name__}:pictures", augment=augment, workers=1)
    ready(job)
    lines = [one for one in capsys.readouterr().err.splitlines() if "augment" in one]
    said = f"warning: augment={augment} does nothing: images of data={job.data} stay as they come"
    assert [one.partition(", so")[0] for one in lines] == [said] * (augment not in ("none", "auto"))


@pytest.mark.parametrize("precision", ["auto", "float32", "bfloat16", "float16"])
def test_a_number_format_that_the_processor_lacks_is_a_warning(
    precision, cache, monkeypatch, capsys
):
    """A step took eight times as long as in float32, and nothing said so."""
    monkeypatch.setattr(host, "_processor_flags", lambda: {"avx2", "avx512_bf16"})
    settled = ready(Job(device="cpu", workers=1, precision=precision))
    check_workload(plan_without_profile(settled, open_data(settled).facts, make_network()))
    said = f"warning: precision={precision}: this processor has no instructions for it, so steps"
    lines = capsys.readouterr().err.splitlines()
    assert [line[: len(said)] for line in lines] == [said] * 2 * (precision == "float16")


class Narrow(nn.Module):
    """Has two outputs, whatever it is asked for."""

    def __init__(self, num_classes):
        super().__init__()
        self.layers = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))

    def forward(self, images):
        return self.layers(images)


def averaged(outputs, labels):
    return outputs.mean()


def test_a_network_with_fewer_outputs_than_classes_is_refused_before_anything_is_measured(cache):
    job = Job(data="digits", network=f"{__name__}:Narrow", workers=1)
    said = r"Narrow: gives 2 outputs for an image, and data=digits has 10 classes: have it give"
    with pytest.raises(JobError, match=said):
        ready(job)
    settled = ready(job.model_copy(update={"loss": f"{__name__}:averaged"}))  # wants none of them
    plan = plan_without_profile(settled, open_data(settled).facts, make_network(name=job.network))
    check_workload(plan)
    with pytest.raises(JobError, match=said):
        check_workload(plan.model_copy(update={"job": job}))


class Unused(nn.Module):
    """Its last layer takes no part in the answers."""

    def __init__(self, num_classes):
        super().__init__()
        self.layers = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, num_classes)
        )
        self.spare = nn.Linear(5, 5)

    def forward(self, images):
        return self.layers(images)


def test_a_network_that_nothing_is_left_to_learn_for_is_refused_before_anything_is_measured(cache):
    """The probe's first step ended with PyTorch's own error, of a tensor without a grad_fn."""
    job = Job(data="digits", network=f"{__name__}:Unused", workers=1, frozen=["all-but-head"])
    said = r"^frozen=all-but-head: leaves spare\.weight, spare\.bias to train, on which the answers"
    with pytest.raises(JobError, match=said):
        ready(job)
    assert ready(job.model_copy(update={"frozen": ("spare.*",)})).frozen == ("spare.*",)


def test_a_training_without_accuracy_is_refused_before_it_starts(cache, tmp_path):
    """Its first evaluation refused it, after an epoch."""
    keys = {"network": f"{__name__}:Narrow", "loss": f"{__name__}:averaged"}
    job = Job(data="digits", workers=1, device="cpu", **keys)
    folder, said = tmp_path / "run", "no held-out accuracy, which takes two classes or more"
    with pytest.raises(JobError, match=said):
        bw.run(job, run_folder=folder)
    settled = ready(job)  # a probe's and a plan's may be for another loop
    plan = plan_without_profile(settled, open_data(settled).facts, make_network(name=job.network))
    write_record(plan, tmp_path / "plan.json")
    with pytest.raises(JobError, match=said):
        bw.train(tmp_path / "plan.json", run_folder=folder, **keys)
    assert not folder.exists()


def test_an_evaluation_says_that_outputs_are_fewer_than_classes():
    with pytest.raises(JobError, match="gives 2 outputs for an image, and there is a label 3"):
        accuracy_and_loss(torch.zeros(4, 2), torch.tensor([0, 1, 2, 3]))
