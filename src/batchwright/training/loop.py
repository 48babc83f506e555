"""Our training loop, on the same handle that a user's own loop uses.

    python -m batchwright.training.loop RUN_FOLDER [--resume] [--follow-advice]

runs in every worker: the plan is in the run folder, and everything else goes there too.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from batchwright.distributed.processes import worker_main
from batchwright.errors import JobError, PlanError
from batchwright.records import Job, Plan
from batchwright.records.documents import read_record
from batchwright.records.run_folder import has_checkpoint
from batchwright.training.batches.randomness import seed_worker
from batchwright.training.batches.sampler import balancing_weights
from batchwright.training.session import Images, Session
from batchwright.workload.data.image_files import FilePipeline, ImageFiles
from batchwright.workload.data.image_store import ImageStore
from batchwright.workload.data.loading import loader_processes
from batchwright.workload.data.pipeline import ImagePipeline
from batchwright.workload.data.sources import AtResolution, ImageData, open_data, resized
from batchwright.workload.host import dtype_of, enter, resolve_device
from batchwright.workload.loss import Loss, build_loss
from batchwright.workload.starting_weights import freeze, load_weights
from batchwright.workload.task import build_network, build_optimizer, set_training


def train(
    plan: Plan,
    *,
    run_folder: Path,
    resume: bool,
    device: torch.device | None = None,
    follow_advice: bool = False,
) -> None:
    """Train as ``plan`` says, as one of its workers; the records go to the run folder.

    Args:
        plan: The plan to follow; its job names data, network, loss and optimizer.
        run_folder: Where metrics, checkpoints and the summary go.
        resume: Continue from the run folder's last checkpoint.
        device: Device of this worker; unset: that of the first worker on its machine.
        follow_advice: Stop after an epoch where advice for the next is in the run folder.

    Raises:
        PlanError: The data are not those of the plan.
        Interrupted: A stop signal came; a checkpoint was written.
        NewPlan: Advice was taken: the run folder's plan is another now, to be resumed.
    """
    job = plan.job
    # Not only with ``resume``: a launcher that starts workers again leaves their words as they are.
    goes_on = has_checkpoint(run_folder)
    task = open_task(plan, enter(device or resolve_device(job.device)), goes_on=goes_on)
    seed_worker(job.seed, 0, int(os.environ.get("RANK", "0")))  # dropout: each draws its own
    with Session(
        task.network,
        task.optimizer,
        task.training,
        plan=plan,
        run_folder=run_folder,
        resume=resume,
        resize=resized,
        sample_weights=task.sample_weights,
        exit_on_stop=False,
        follow_advice=follow_advice,
        profile_memory=True,
    ) as session:
        for _ in session.epochs():
            for images, labels in session.batches():
                # A function, not a loss: so memory may run out in the forward pass as well, and the
                # step is taken again in smaller micro-batches.
                session.step(partial(task.mean_loss, images, labels))
            if session.evaluation_due:
                session.evaluate(task.held_out, accuracy_and_loss)


@dataclass(frozen=True)
class Task:
    """Network, optimizer, loss and data of a job, on a device.

    Attributes:
        network: The network, in training mode.
        optimizer: The optimizer of its trained parameters.
        loss: f(outputs, labels) -> mean loss.
        training: The training data.
        held_out: The data for evaluations.
        sample_weights: How often each image is drawn, (images,); ``None``: once per epoch.
    """

    network: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Loss
    training: Images
    held_out: Images
    sample_weights: Tensor | None

    def mean_loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Mean loss of a forward pass, a scalar."""
        return self.loss(self.network(images), labels)


def open_task(plan: Plan, device: torch.device, *, goes_on: bool = False) -> Task:
    """Open the data of a plan's job, and build its network, loss and optimizer.

    Args:
        plan: The plan that will be followed.
        device: Where the network computes and batches arrive.
        goes_on: Whether a checkpoint replaces the weights, whose file need not be there any more.

    Raises:
        PlanError: The data are not those of the plan.
    """
    job = plan.job
    data = open_data(job, verify=False)  # the launcher has just verified it
    if data.facts.digest != plan.data.digest:
        raise PlanError(
            f"the plan was made for other data than {plan.job.data}: {plan.data.train_samples} "
            f"images with digest {plan.data.digest[:12]}, here {data.facts.train_samples} with "
            f"{data.facts.digest[:12]}; probe and plan again"
        )
    training, held_out = (_fed(part, plan, data, device) for part in (data.train, data.val))
    if not isinstance(held_out, ImagePipeline | FilePipeline):
        held_out = AtResolution(held_out, plan.top_resolution)  # as our own images are evaluated
    network = build_network(
        job.network,
        classes=len(plan.data.classes),
        side=plan.top_resolution,
        dropout=plan.stages[0].dropout,
        seed=job.seed,
        arguments=job.network_args,
    ).to(device)
    if job.weights is not None and not goes_on:
        load_weights(network, job.weights)
    freeze(network, job.frozen)
    if job.batch_norm == "synchronized":
        network = nn.SyncBatchNorm.convert_sync_batchnorm(network)
    set_training(network)
    return Task(
        network,
        build_optimizer(network, job, plan.learning_rate.base, name=plan.update),
        build_loss(job, device),
        training,
        held_out,
        _sample_weights(job, data.train),
    )


def accuracy_and_loss(outputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Whether each sample's first guess is right, and its cross entropy: two tensors (n,).

    Raises:
        JobError: The outputs are no number for each class.
    """
    if outputs.ndim != 2 or outputs.shape[1] < 2:
        raise JobError(
            f"the network gives outputs of shape {tuple(outputs.shape)}, which have no held-out "
            "accuracy: give a tensor (n, classes), or train in a loop of your own, which evaluates "
            "by its own measures"
        )
    try:
        loss = functional.cross_entropy(outputs.float(), labels, reduction="none")
    except IndexError:  # with a loss of the user's own nothing has looked at the outputs before
        raise JobError(
            f"the network gives {outputs.shape[1]} outputs for an image, and there is a label "
            f"{int(labels.max())}: give an output for each class, or train in a loop of your own, "
            "which evaluates by its own measures"
        ) from None
    # Outputs of a diverged network are NaN, of which `argmax` would make the first class.
    has_guess = ~outputs.isnan().any(dim=1)
    return {"top1": (outputs.argmax(dim=1) == labels) & has_guess, "loss": loss}


def _fed(
    part: ImageStore | Dataset[Any], plan: Plan, data: ImageData, device: torch.device
) -> Images:
    """What a session reads: our pipeline over our store or files, or the user's own data set."""
    if not isinstance(part, ImageStore | ImageFiles):
        return part
    job = plan.job
    how: dict[str, Any] = {
        "device": device,
        "augmentation": plan.stages[0].augmentation,
        "rotation": job.rotation,
        "zoom": job.zoom,
        "crop_scale": job.crop_scale,
        "seed": job.seed,
        "dtype": dtype_of(plan.precision),
    }
    if isinstance(part, ImageFiles):
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return FilePipeline(part, loaders=loader_processes(job, local, files=True), **how)
    side, limit = plan.top_resolution, job.goal.memory
    pipeline = ImagePipeline(part, side=side, mean=data.mean, std=data.std, limit=limit, **how)
    if part is data.train:
        pipeline.prepare({stage.resolution for stage in plan.stages})
    return pipeline


def _sample_weights(job: Job, part: ImageStore | Dataset[Any]) -> Tensor | None:
    """How often each image is drawn, (images,); ``None``: once per epoch."""
    if job.sampling == "shuffle":
        return None
    if not isinstance(part, ImageStore | ImageFiles):
        raise JobError(
            f"sampling=balanced needs all labels beforehand, and data={job.data} tells each with "
            "its image: try sampling=shuffle, or sample_weights= in a loop of your own"
        )
    return balancing_weights(part.labels)


def _main() -> None:
    folder = Path(sys.argv[1])
    plan = read_record(folder / "plan.json", Plan)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    options = sys.argv[2:]
    train(
        plan,
        run_folder=folder,
        resume="--resume" in options,
        device=resolve_device(plan.job.device, local_rank),
        follow_advice="--follow-advice" in options,
    )


if __name__ == "__main__":
    worker_main(_main)
