"""What surrounds the steps, on a device that is played: its tensors never meet those of the CPU.

`test_host_waits` has the steps themselves.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from batchwright import Session
from batchwright.probing.commands import RunTrial
from batchwright.probing.measure.evaluation import evaluate
from batchwright.probing.measure.gradient_noise import measure_noise
from batchwright.probing.measure.trials import run_trial
from batchwright.probing.measure.update_time import update_times
from batchwright.training.loop import accuracy_and_loss
from batchwright.training.simulated.simulated_training import train_task
from batchwright.workload.task import build_optimizer
from far import FAR, far_device
from samples import make_job
from simulated_tasks import (
    HELD_OUT,
    RULE,
    SAMPLES,
    Net,
    make_pipeline,
    make_task,
    make_virtual_plan,
)
from test_host_waits import BATCH, SIDE, bench_of, by_sgd, network_on, pipeline, plan_for

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
BOTH = ("gradient-norm", "hessian")


def judged(device):
    """What evaluations found, and the weights at the end."""
    plan, found = plan_for(track=BOTH, cycle={"recalibrate": 2}), []
    with far_device():
        network = network_on(device)
        with Session(network, by_sgd(network), pipeline(device), plan=plan) as session:
            for _ in session.epochs():
                for images, labels in session.batches():
                    session.step(functional.cross_entropy(network(images), labels))
                found.append(session.evaluate(pipeline(device), accuracy_and_loss))
        return found, [p.detach().cpu() for p in network.parameters()]


def test_an_evaluation_finds_what_it_finds_on_the_cpu():
    """With statistics of batch normalization that are measured anew, and the curvature."""
    (there, learnt), (here, expected) = judged(FAR), judged(CPU)
    assert {"track/gradient_norm", "track/hessian"} < {*here[0]}
    assert there == [pytest.approx(one, rel=0.01) for one in here]
    torch.testing.assert_close(learnt, expected)


def in_rounds(device, **plan):
    torch.manual_seed(0)
    with far_device():
        network = Net(0.3).to(device)
        task = replace(
            make_task(),
            network=network,
            optimizer=build_optimizer(network, make_job(), RULE.base),
            training=make_pipeline(SAMPLES, 1, device),
            held_out=make_pipeline(HELD_OUT, 2, device),
        )
        train_task(make_virtual_plan(**plan), task, device, None)
        return [p.detach().cpu() for p in network.parameters()]


@pytest.mark.parametrize("plan", [{"consistency": "asp"}, {"method": "dynamic-batch"}], ids=str)
def test_simulated_workers_learn_what_they_learn_on_the_cpu(plan):
    """By a parameter server, whose models go to the host and back, and by the sum of gradients."""
    torch.testing.assert_close(in_rounds(FAR, **plan), in_rounds(CPU, **plan))


def test_a_probe_measures_beside_steps_without_mixing():
    with far_device():
        bench = bench_of(ags={"mode": "norm"})
        bench.batches.hold_images()
        command = RunTrial(
            workers=1, resolution=SIDE, optimizer="adamw", global_batch_size=4, samples=8,
            held_out=4, micro_batch=2, rate_scale=1.0, most_seconds=None,
        )  # fmt: skip
        assert run_trial(bench, command) is not None
        noise = measure_noise(bench, SIDE, 2, seconds=60.0)
        assert noise is not None
        assert noise.parts == 2
        assert evaluate(bench, BATCH, 1).first_answers.images == 2 * BATCH
        assert update_times(bench, seconds=1e-3)
        bench.close()
