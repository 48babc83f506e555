"""Exports for trainers with their own loop: a plan's batch, accumulation, rate and schedule.

Plans that they cannot follow are refused: two batch sizes at once, shares that follow speed,
several resolutions, scaled gradients. Their epochs may have one step more than ours, since each
worker's samples are filled up to whole batches; so the rate is written as a function of epochs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pprint import pformat

import yaml

from batchwright.algorithms.learning_rate import DECAY_FACTOR, ONE_CYCLE_END, drops, start_of
from batchwright.errors import PlanError
from batchwright.records import Job, LearningRateRule, Plan
from batchwright.records.job import as_written
from batchwright.records.registries.data_sources import source_of
from batchwright.workflows.exports.target import Target, headline

_SLOWER = "The plan's times are with CUDA graphs: without, small steps on a GPU take longer."
_OWN_MEAN = (
    "The plan is to normalize by mean and deviation of the training images, which no plan holds:"
)


@dataclass(frozen=True)
class Recipe:
    """A plan for a trainer with one batch size.

    Attributes:
        plan: The plan, with one stage.
        batch: Samples of one forward pass on one worker.
        accumulation: Forward passes per step.
        steps: Steps per epoch.
    """

    plan: Plan
    batch: int
    accumulation: int
    steps: int

    @property
    def job(self) -> Job:
        """The plan's job."""
        return self.plan.job

    @property
    def rule(self) -> LearningRateRule:
        """The plan's learning-rate rule."""
        return self.plan.learning_rate

    @property
    def seed(self) -> int:
        """The job's seed, cut to the 32 bits that NumPy takes, which trainers seed as well."""
        return self.job.seed % 2**32

    @property
    def warmup_steps(self) -> int:
        """Steps until the rate is at its peak."""
        return round(self.rule.warmup_epochs * self.steps)

    @property
    def start(self) -> float:
        """Rate at the first step, as a share of the peak."""
        return start_of(self.rule) if self.rule.warmup_epochs else 1.0


def recipe(plan: Plan, trainer: str) -> Recipe:
    """The plan for a trainer with one batch size that does not end training at `goal.accuracy`.

    If the plan expects to reach its target before its last epoch, the schedule is laid out over the
    epochs until then.

    Raises:
        PlanError: The trainer cannot follow the plan.
    """
    first, sizes = plan.stages[0], set(plan.stages[0].local_batch_sizes)
    refuse_what_trainers_cannot(
        plan,
        trainer,
        (
            bool(plan.method_spec.balancer),
            f"with method={plan.method} shares follow speed",
            _PLAIN,
        ),
        (
            plan.job.body_rate != 1,
            f"body_rate={plan.job.body_rate:g} gives two rates",
            "probe and plan again without body_rate",
        ),
        (
            len(sizes) > 1,
            f"its local batches differ ({min(sizes)} to {max(sizes)} samples)",
            "plan again with workers of one kind and a global_batch that they share evenly",
        ),
    )
    stage = first.model_copy(update={"epochs": plan.likely_epochs()})
    plan = plan.model_copy(update={"stages": (stage,)})
    (local,) = sizes
    passes = next(
        count for count in range(first.accumulation_steps, local + 1) if local % count == 0
    )
    samples = ceil(plan.data.train_samples / plan.workers)
    return Recipe(plan, local // passes, passes, ceil(samples / local))


_PLAIN = "plan again with method=plain"


def refuse_what_trainers_cannot(plan: Plan, trainer: str, *more: tuple[bool, str, str]) -> None:
    """Refuse a plan that no trainer with a loop of its own can follow.

    Args:
        plan: The plan.
        trainer: Name of the trainer, for the message.
        *more: Further reasons, each as (whether it applies, the reason, what to try), in words.

    Raises:
        PlanError: A reason applies; the message holds the first one.
    """
    job = plan.job
    for found, what, advice in (
        (plan.server is not None, f"method={plan.method} trains two batch sizes at once", _PLAIN),
        (len(plan.stages) > 1, f"the plan has {len(plan.stages)} stages", _PLAIN),
        (
            plan.ags is not None,
            f"ags.mode={plan.ags and plan.ags.mode} scales gradients",
            "plan again with ags.mode=off",
        ),
        (
            plan.learning_rate.scaling == "gain",
            "scaling=gain measures the rate while it trains",
            "plan again with scaling=sqrt",
        ),
        (
            bool(plan.growth),
            "its batch may grow between epochs",
            "plan again with batch_growth=off",
        ),
        (
            job.average_weights == "on",
            "average_weights=on evaluates an average of the weights",
            "plan again with average_weights=off",
        ),
        (
            job.sampling != "shuffle",
            f"sampling={job.sampling} draws images with replacement",
            "plan again with sampling=shuffle",
        ),
        *more,
    ):
        if found:
            raise PlanError(
                f"{trainer} cannot follow this plan: {what}. Train it with batchwright train, in "
                f"a loop of your own with bw.Session, or {advice}"
            )


# ------------------------------------------------------------------------------------------ Python


def lightning(plan: Plan, target: Target) -> str:
    """A module with keyword arguments of the Trainer and the optimizer with its schedule."""
    made = recipe(plan, "lightning")
    plan = made.plan
    _refuse_recomputation(plan.job, "lightning")
    fitted = "torch.compile(module, dynamic=True)" if plan.job.compile == "on" else "module"
    options = {
        "accelerator": "gpu" if plan.job.device == "cuda" else "cpu",
        "devices": plan.workers // target.hosts,
        "num_nodes": target.hosts,
        "default_root_dir": target.run,
        "strategy": "ddp" if plan.workers > 1 else "auto",
        "max_epochs": plan.epochs,
        "precision": {"bfloat16": "bf16-mixed", "float16": "16-mixed"}.get(
            plan.precision, "32-true"
        ),
        "accumulate_grad_batches": made.accumulation,
        "gradient_clip_val": plan.job.clip_norm,
        "sync_batchnorm": plan.job.batch_norm == "synchronized",
        "check_val_every_n_epoch": plan.job.evaluate_epochs,
    }
    return _module(
        made,
        f"""
    lightning.seed_everything(plan.SEED)
    loader = DataLoader(data, batch_size=plan.BATCH, shuffle=True, drop_last=False)
    trainer = lightning.Trainer(**plan.TRAINER)
    trainer.fit({fitted}, loader)

and in the LightningModule

    def configure_optimizers(self):
        optimizer = plan.optimizer(self)
        return [optimizer], [{{"scheduler": plan.schedule(optimizer), "interval": "step"}}]
""",
        f"TRAINER = {_literal(options)}\n",
    )


def transformers(plan: Plan, target: Target) -> str:
    """A module with keyword arguments of `TrainingArguments`, the optimizer and its schedule."""
    made = recipe(plan, "transformers")
    plan = made.plan
    job = plan.job
    _refuse_synchronized(job, "transformers")
    options = {
        "output_dir": target.run,
        "per_device_train_batch_size": made.batch,
        "gradient_accumulation_steps": made.accumulation,
        "num_train_epochs": plan.epochs,
        "learning_rate": plan.stages[0].learning_rate,
        "max_grad_norm": job.clip_norm or 0.0,
        "label_smoothing_factor": job.label_smoothing,
        "bf16": plan.precision == "bfloat16",
        "fp16": plan.precision == "float16",
        "gradient_checkpointing": job.activation_checkpointing == "on",
        "torch_compile": job.compile == "on",
        "eval_strategy": "epoch",
        "seed": made.seed,
    }
    if job.device == "cpu":
        options["use_cpu"] = True
    return _module(
        made,
        """
    arguments = TrainingArguments(**plan.ARGUMENTS)
    optimizer = plan.optimizer(model)
    trainer = Trainer(model, arguments, optimizers=(optimizer, plan.schedule(optimizer)), ...)
"""
        + _started(plan, target),
        f"ARGUMENTS = {_literal(options)}\n",
    )


def accelerate(plan: Plan, target: Target) -> str:
    """A module with keyword arguments of `Accelerator`, the optimizer and its schedule."""
    made = recipe(plan, "accelerate")
    plan = made.plan
    _refuse_synchronized(plan.job, "accelerate")
    _refuse_recomputation(plan.job, "accelerate")
    options = {
        "gradient_accumulation_steps": made.accumulation,
        "mixed_precision": {"bfloat16": "bf16", "float16": "fp16"}.get(plan.precision, "no"),
        "cpu": plan.job.device == "cpu",
        "project_dir": target.run,
        # Otherwise accelerate advances the schedule once for each worker.
        "step_scheduler_with_optimizer": False,
    }
    if plan.job.compile == "on":
        options["dynamo_backend"] = "inductor"
    clip = ""
    if plan.job.clip_norm:
        indented = "\n" + 20 * " "
        clip = f"{indented}accelerator.clip_grad_norm_(model.parameters(), {plan.job.clip_norm:g})"
    return _module(
        made,
        f"""
    set_seed(plan.SEED)
    accelerator = Accelerator(**plan.ACCELERATOR)
    optimizer = plan.optimizer(model)
    schedule = plan.schedule(optimizer)
    loader = DataLoader(data, batch_size=plan.BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(plan.EPOCHS):
        for images, labels in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss(model(images), labels))
                if accelerator.sync_gradients:{clip}
                    ...
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                schedule.step()
"""
        + _started(plan, target),
        f"ACCELERATOR = {_literal(options)}\n",
    )


def _started(plan: Plan, target: Target) -> str:
    words = f"torchrun --nproc-per-node {plan.workers // target.hosts}"
    if target.hosts > 1:
        words += f" --nnodes {target.hosts} --rdzv-backend c10d --rdzv-endpoint HOST:29400"
    return f"\nStart it by: {words} script.py\n"


def _notes(plan: Plan) -> list[str]:
    """What the exported training lacks of the plan's, in sentences."""
    target, found = plan.job.goal.target, []
    if plan.job.cuda_graphs == "on":
        found.append(_SLOWER)
    if target is not None:
        found.append(
            f"Training does not end at goal.accuracy={target:g}, but after the epochs that this is "
            "planned to take."
        )
    if plan.average_epochs is not None:
        found.append("The plan evaluates an average of the weights, which is not computed here.")
    if plan.job.weights or plan.job.network_args.get("pretrained"):
        found.append("The plan starts from trained weights: load the same.")
    if plan.job.frozen:
        found.append("The plan leaves weights frozen: freeze the same before making the optimizer.")
    if plan.job.loss != "cross_entropy":
        found.append("The plan has a loss of your own: take the same.")
    return found


def _module(made: Recipe, usage: str, options: str) -> str:
    plan, job = made.plan, made.job
    samples = made.batch * made.accumulation * plan.workers
    built = _optimizer(made)
    taken = "import batchwright as bw\nimport torch" if "bw." in built else "import torch"
    notes = "".join(f"\n{note}" for note in _notes(plan))
    notes += "\n" if notes else ""
    return f'''"""{headline(plan)}.
{notes}
Save it as plan.py beside the script:

    import plan
{usage[1:]}"""

from math import cos, pi

{taken}

BATCH = {made.batch}  # samples on each of {plan.workers} workers in a forward pass
RESOLUTION = {plan.top_resolution}  # side of a training image, in pixels
EPOCHS = {plan.epochs}
STEPS = {made.steps}  # updates in an epoch, of {samples} samples each
SEED = {made.seed}
LABEL_SMOOTHING = {job.label_smoothing:g}
DROPOUT = {plan.stages[0].dropout:g}
{_inputs(plan)}{options}

def optimizer(model):
    """The plan's optimizer; vectors and scalars (norms, biases) do not decay."""
{_optimizer(made)}

def schedule(optimizer):
    """The plan's rate; take a step of it after each of the optimizer."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_factor(step / STEPS))


def rate_factor(epoch):
    """Share of the peak rate after so many epochs, in fractions too."""
{_factor(made)}'''


def _inputs(plan: Plan) -> str:
    """Resized crops and stated numbers to normalize by, for the script's own data set."""
    lines, normalize = "", plan.job.normalize
    if plan.stages[0].augmentation == "resized-crop":
        made = "v2.RandomResizedCrop(RESOLUTION, scale=CROP_SCALE), then v2.RandomHorizontalFlip()"
        lines += f"CROP_SCALE = {plan.job.crop_scale:g}, 1.0  # {made}\n"
    if _by_own_mean(plan):
        lines += f"# {_OWN_MEAN}\n# give them to v2.Normalize, for pixels from 0 to 1.\n"
    if isinstance(normalize, tuple):
        made = "v2.Normalize(MEAN, STD), for pixels from 0 to 1"
        lines += f"MEAN, STD = {normalize[:3]}, {normalize[3:]}  # {made}\n"
    return lines


def _by_own_mean(plan: Plan) -> bool:
    """Whether the plan normalizes by numbers that are taken from the training images."""
    job = plan.job
    return not (isinstance(job.normalize, tuple) or source_of(job.data).as_they_come)


def _optimizer(made: Recipe) -> str:
    """The body of the exported function `optimizer(model)`."""
    rate, job = made.plan.stages[0].learning_rate, made.job
    momentum, decay = f"momentum={job.momentum!r}", f"{job.weight_decay!r}"
    kinds = {
        "sgd": f"torch.optim.SGD(groups, lr={rate!r}, {momentum}, nesterov={job.looks_ahead})",
        "adamw": f"torch.optim.AdamW(groups, lr={rate!r}, betas={job.betas!r}, eps={job.eps!r})",
        "muon": f"bw.muon(model, lr={rate!r}, {momentum}, weight_decay={decay})",
    }
    if made.plan.update not in kinds:
        raise PlanError(
            f"optimizer={made.plan.update} is not one that other trainers have: plan again with "
            f"optimizer={' or optimizer='.join(kinds)}"
        )
    built = kinds[made.plan.update]
    if "groups" not in built:
        return f"    return {built}\n"
    return f"""    trained = [one for one in model.parameters() if one.requires_grad]
    groups = [
        {{"params": [one for one in trained if one.ndim > 1], "weight_decay": {decay}}},
        {{"params": [one for one in trained if one.ndim <= 1], "weight_decay": 0.0}},
    ]
    return {built}
"""


def _factor(made: Recipe) -> str:
    """The body of the exported function `rate_factor(epoch)`."""
    rule, epochs = made.rule, made.plan.epochs
    lines = [f"    epoch = min(epoch, {epochs})"]
    if rule.warmup_epochs:
        rise = (
            f"1 - {1 - made.start!r} * (1 + cos(pi * epoch / {rule.warmup_epochs!r})) / 2"
            if rule.decay == "one-cycle"
            else f"{made.start!r} + {1 - made.start!r} * epoch / {rule.warmup_epochs!r}"
        )
        lines += [f"    if epoch < {rule.warmup_epochs!r}:", f"        return {rise}"]
    left = epochs - rule.warmup_epochs
    if rule.decay == "steps":
        lines.append(
            f"    return {DECAY_FACTOR!r} ** sum(epoch >= place for place in {drops(rule, epochs)})"
        )
    elif rule.decay == "none" or not left:
        lines.append("    return 1.0")
    else:
        end = ONE_CYCLE_END if rule.decay == "one-cycle" else 0.0
        fall = f"(1 + cos(pi * (epoch - {rule.warmup_epochs!r}) / {left!r})) / 2"
        lines.append(f"    return {f'{end!r} + {1 - end!r} * ' if end else ''}{fall}")
    return "\n".join(lines) + "\n"


def _literal(options: Mapping[str, object]) -> str:
    return pformat(options, sort_dicts=False, width=100)


def _refuse_synchronized(job: Job, trainer: str) -> None:
    if job.batch_norm == "synchronized":
        raise PlanError(
            f"{trainer} has no setting for batch_norm=synchronized: convert the model by "
            "torch.nn.SyncBatchNorm.convert_sync_batchnorm, and plan again with batch_norm=worker"
        )


def _refuse_recomputation(job: Job, trainer: str) -> None:
    if job.activation_checkpointing == "on":
        raise PlanError(
            f"{trainer} has no setting for activation_checkpointing=on, without which this plan's "
            "batch may not fit: plan again with activation_checkpointing=off, or train with "
            "batchwright train"
        )


# ------------------------------------------------------------------------------------------- files


def deepspeed(plan: Plan, target: Target) -> str:
    """The configuration that `deepspeed.initialize` takes."""
    del target
    made = recipe(plan, "deepspeed")
    plan = made.plan
    job, rule, rate = plan.job, plan.learning_rate, plan.stages[0].learning_rate
    _refuse_synchronized(job, "deepspeed")
    _refuse_recomputation(job, "deepspeed")
    if job.compile == "on":
        raise PlanError(
            "deepspeed's configuration has no key for compile=on, with which this plan's times "
            "were measured: plan again with compile=off, or train with batchwright train"
        )
    kinds: dict[str, tuple[str, dict[str, object]]] = {
        "sgd": ("SGD", {"momentum": job.momentum, "nesterov": job.looks_ahead}),
        "adamw": ("AdamW", {"betas": [*job.betas], "eps": job.eps}),
    }
    if plan.update not in kinds:
        raise PlanError(
            f"deepspeed has no optimizer={plan.update}: plan again with optimizer=sgd or adamw"
        )
    if rule.decay != "cosine":
        raise PlanError(f"deepspeed has no decay={rule.decay} like ours: plan with decay=cosine")
    name, more = kinds[plan.update]
    total = made.steps * plan.epochs
    config: dict[str, object] = {
        "train_batch_size": made.batch * made.accumulation * plan.workers,
        "train_micro_batch_size_per_gpu": made.batch,
        "gradient_accumulation_steps": made.accumulation,
        "optimizer": {
            "type": name,
            "params": {"lr": rate, "weight_decay": job.weight_decay, **more},
        },
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {
                "total_num_steps": total,
                "warmup_num_steps": max(1, made.warmup_steps),  # DeepSpeed refuses 0
                "warmup_min_ratio": made.start,
                "warmup_type": "linear",
                "cos_min_ratio": 0.0,
            },
        },
        "bf16": {"enabled": plan.precision == "bfloat16"},
        "fp16": {"enabled": plan.precision == "float16"},
        "gradient_clipping": job.clip_norm or 0.0,
    }
    return json.dumps(config, indent=2) + "\n"


def _timm_inputs(plan: Plan) -> dict[str, object]:
    """Arguments of timm for resized crops and for stated numbers to normalize by."""
    arguments: dict[str, object] = {}
    if plan.stages[0].augmentation == "resized-crop":
        arguments = {"scale": [plan.job.crop_scale, 1.0], "ratio": [0.75, 4 / 3], "hflip": 0.5}
    if isinstance(normalize := plan.job.normalize, tuple):
        arguments |= {"mean": [*normalize[:3]], "std": [*normalize[3:]]}
    return arguments


def timm(plan: Plan, target: Target) -> str:
    """Arguments of timm's `train.py --config FILE`, which torchrun starts for each worker."""
    made = recipe(plan, "timm")
    plan = made.plan
    job, rule = plan.job, plan.learning_rate
    kinds: dict[str, dict[str, object]] = {
        "sgd": {"opt": "sgd" if job.looks_ahead else "momentum"},
        "adamw": {"opt": "adamw", "opt_betas": [*job.betas], "opt_eps": job.eps},
    }
    if plan.update not in kinds:
        raise PlanError(
            f"timm gets optimizer=sgd or adamw from us, not {plan.update}: plan again with "
            "optimizer=sgd"
        )
    if rule.decay != "cosine":
        raise PlanError(f"timm has no decay={rule.decay} like ours: plan again with decay=cosine")
    for key, value, usual in (
        ("frozen", job.frozen, ()),
        ("loss", job.loss, "cross_entropy"),
    ):
        if value != usual:
            raise PlanError(
                f"timm has no option for {key}={as_written(value)}: train this plan with "
                f"batchwright train, or probe and plan again without {key}"
            )
    # timm counts the warm-up in whole epochs, and refuses a cosine over no epochs.
    warm = min(ceil(made.warmup_steps / made.steps), plan.epochs - 1)
    rate = plan.stages[0].learning_rate
    arguments = {
        "batch_size": made.batch,
        "grad_accum_steps": made.accumulation,
        "input_size": [3, plan.top_resolution, plan.top_resolution],
        **kinds[plan.update],
        "momentum": job.momentum,
        "weight_decay": job.weight_decay,
        "lr": rate,
        "sched": "cosine",
        "sched_on_updates": True,
        "epochs": plan.epochs - warm,
        "warmup_epochs": warm,
        "warmup_prefix": True,  # the cosine is over the epochs after the warm-up
        "warmup_lr": rate * made.start,
        "min_lr": 0.0,
        "cooldown_epochs": 0,
        "smoothing": job.label_smoothing,
        "drop": plan.stages[0].dropout,
        **_timm_inputs(plan),
        "amp": plan.precision != "float32",
        "amp_dtype": "bfloat16" if plan.precision == "bfloat16" else "float16",
        "grad_checkpointing": job.activation_checkpointing == "on",
        "torchcompile": "inductor" if job.compile == "on" else None,
        "sync_bn": job.batch_norm == "synchronized",
        "clip_grad": job.clip_norm,
        "seed": made.seed,
        "output": target.run,
    }
    text = yaml.safe_dump(arguments, sort_keys=False)
    started = _started(plan, target).strip().replace("script.py", "train.py --config FILE DATA")
    notes = "".join(f"# {note}\n" for note in _notes(plan))
    if _by_own_mean(plan):
        notes += f"# {_OWN_MEAN} give mean and std, else timm takes those of its model.\n"
    return f"# {headline(plan)}.\n{notes}# {started}\n{text}"
