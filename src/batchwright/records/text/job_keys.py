"""Names of job keys, and hints for names that are not."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from batchwright.records.registries.registry import Named
from batchwright.records.text.problems import first_problem, key_of, shorten

_WORDS = {
    "data=imagefolder:PATH": "dataset dataset_path data_dir data_path data_root root path images "
    "train_dir train_data",
    "val=0.1, the share to hold out": "val_split validation_split val_size val_fraction val_ratio "
    "validation test_size test_split holdout held_out",
    "network=resnet18": "model model_name arch architecture net backbone",
    "network_args.pretrained=true for weights of a library, weights=PATH for a file": (
        "pretrained pretrained_weights"
    ),
    "network_args.drop_path_rate=0.1 for timm's networks": "drop_path drop_path_rate",
    "weights=PATH, to start from": "checkpoint ckpt init init_from initial_checkpoint",
    "frozen=stages.0.*": "freeze freeze_layers frozen_layers",
    "frozen=all-but-head": "freeze_backbone freeze_encoder linear_probe linear_probing head_only",
    "body_rate=0.1, the other layers' rate over the last one's": "backbone_lr lr_backbone "
    "backbone_lr_mult layer_decay lr_mult head_lr discriminative_lr",
    "normalize=data, or three means and three standard deviations": "mean std normalization",
    "loss=cross_entropy": "criterion loss_fn loss_function",
    "label_smoothing=0.1": "smoothing",
    "dropout=0.1": "drop drop_rate dropout_rate",
    "augment=crop-flip": "aug augmentation augmentations data_augmentation transform transforms "
    "hflip",
    "augment=resized-crop": "random_resized_crop rrc",
    "crop_scale=0.08, the least share of the area with augment=resized-crop": "min_crop_scale "
    "crop_area area_range",
    "optimizer=sgd": "optim optimiser opt solver",
    "momentum=0.9": "mom sgd_momentum beta",
    "betas=0.9,0.95, both of AdamW's": "beta1 beta2 adam_beta1 adam_beta2 adam_betas opt_betas",
    "eps=1e-8, that of AdamW": "epsilon adam_eps adam_epsilon opt_eps",
    "weight_decay=0.0005": "wd l2 weightdecay",
    "learning_rate=0.1, the rate at base_batch": "lr lr0 rate alpha base_lr initial_lr init_lr "
    "lr_base max_lr peak_lr learning_rate_init step_size",
    "base_batch=256, the batch at which learning_rate holds": "lr_base_size reference_batch",
    "warmup_epochs=5": "warmup warm_up warmup_steps warmup_iters warmup_ratio lr_warmup",
    "warmup_start=0.01, a share of the peak": "warmup_factor start_factor warmup_start_lr "
    "warmup_init_lr warmup_lr",
    "decay=cosine": "scheduler lr_scheduler lr_schedule schedule sched lr_decay lr_policy "
    "annealing",
    "clip_norm=1.0": "clip clipping clip_grad clip_grad_norm grad_clip gradient_clip "
    "gradient_clip_val max_norm max_grad_norm",
    "average_weights=on": "ema model_ema use_ema ema_decay swa weight_averaging polyak",
    "batch_norm=synchronized": "sync_bn syncbn sync_batchnorm sync_batch_norm",
    "sampling=balanced": "sampler balanced class_weights",
    "seed=1": "random_seed manual_seed rng_seed random_state",
    "epochs=30, passes over the training images": "num_epochs n_epochs max_epochs "
    "num_train_epochs total_epochs steps num_steps max_steps iterations max_iters",
    "precision=bfloat16": "amp use_amp bf16 bfloat16 dtype mixed_precision autocast",
    "precision=float16": "fp16 float16 half",
    "compile=on": "torch_compile torchcompile torch.compile compiled use_compile inductor",
    "cuda_graphs=on": "cuda_graph cudagraph cudagraphs use_cuda_graph use_cuda_graphs "
    "enable_cuda_graph",
    "method=dynamic-batch": "strategy algorithm",
    "device=cuda": "gpu cuda use_gpu use_cuda accelerator",
    "workers=2, the training processes": "gpus n_gpus num_gpus ngpus devices num_devices "
    "world_size nproc nprocs nproc_per_node n_workers num_processes processes ranks",
    "loaders=2 for the loader processes of each worker, workers=2 for training processes": (
        "num_workers data_workers dataloader_workers dataloader_num_workers"
    ),
    "global_batch=128, the samples of a step over all workers": "bs batch batchsize batch_size "
    "train_batch_size global_batch_size total_batch_size local_batch local_batch_size "
    "batch_size_per_gpu per_device_train_batch_size",
    "micro_batch=32, the most samples that go through the network at once": "micro_batch_size "
    "microbatch accumulate accumulation accumulation_steps grad_accum grad_accum_steps "
    "gradient_accumulation gradient_accumulation_steps accumulate_grad_batches",
    "activation_checkpointing=on": "gradient_checkpointing grad_checkpointing recompute "
    "activation_recomputation use_checkpoint",
    "resolutions=224": "resolution res size side img_size imgsz image_size image_resolution "
    "input_size crop_size",
    "evaluate_epochs=1": "eval_every eval_interval eval_freq val_interval validate_every "
    "check_val_every_n_epoch",
    "checkpoint_seconds=60": "save_every save_freq save_steps save_interval checkpoint_every "
    "checkpoint_interval",
    "checkpoint_epochs=10, which keeps every tenth": "save_epochs save_epoch_freq save_every_epoch "
    "checkpoint_hist save_top_k save_total_limit",
    "port=29500": "master_port rdzv_port",
    "probe.budget=10s, or in seconds": "budget probe_budget probe_seconds",
    "goal.memory=8GiB, or in bytes": "memory max_memory memory_limit gpu_memory",
    "goal.deadline=2h, or in seconds": "deadline time_limit max_time max_seconds",
    "goal.accuracy=0.9, where training is to end": "accuracy target target_accuracy",
    "goal.confidence=0.9, of reaching goal.accuracy": "confidence",
    "goal.patience=5, the evaluations without a rise after which training ends": "patience "
    "early_stop early_stopping early_stopping_patience",
    "--out FOLDER on the command line, run_folder=FOLDER in Python": "out output output_dir "
    "out_dir outdir save_dir log_dir logdir run_dir run_folder work_dir",
    "--resume --out FOLDER on the command line, resume=True with run_folder=FOLDER in Python": (
        "resume resume_from resume_from_checkpoint"
    ),
    "--tracker wandb on the command line, trackers=['wandb'] in Python": (
        "log_wandb wandb tensorboard mlflow tracker trackers"
    ),
}
"""Our keys as they are written, and words of other programs and papers for each."""

OTHER_WORDS = {word: form for form, words in _WORDS.items() for word in words.split()}
"""What to write in place of a word of another program."""

_ABSENT = {
    "no key does that: change single images in a data set of yours, data=my_project:images": (
        "aa auto_augment autoaugment rand_augment randaugment trivial_augment color_jitter reprob "
        "random_erasing"
    ),
    "crops are 3/4 to 4/3 times as wide as high with augment=resized-crop": "ratio",
    "crop_scale=0.08 is the least area with augment=resized-crop, scaling=sqrt the rule for the "
    "rate": "scale",
    "no key does that: mix batches in a loop of your own, with bw.Session": (
        "mixup mixup_alpha cutmix cutmix_alpha"
    ),
    "the classes are those of the data: leave it out": "num_classes n_classes classes nb_classes",
}
ABSENT_WORDS = {word: hint for hint, words in _ABSENT.items() for word in words.split()}
"""Hints for words of other programs that no key of ours stands for."""


_FORMS = {form.partition("=")[0]: form for form in reversed(_WORDS)}
"""Example of each key, with the unit of its value."""


def job_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """All keys of a job in order, nested ones with a dot, such as ``probe.budget``."""
    keys = []
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += job_keys(field.annotation, f"{prefix}{name}.")
        else:
            keys.append(prefix + name)
    return keys


def field_of(model: type[BaseModel], key: str) -> FieldInfo:
    """The field of a key from `job_keys`."""
    section, _, name = key.rpartition(".")
    inner: Any = model.model_fields[section].annotation if section else model
    found: FieldInfo = inner.model_fields[name]
    return found


def described_field(field: FieldInfo) -> str:
    """A key's meaning, in Markdown, with the words that it accepts if the meaning lacks some."""
    text = field.description or ""
    words = [word for word in get_args(field.annotation) if isinstance(word, str)]
    words += [word for one in field.metadata if isinstance(one, Named) for word in one.words]
    if all(f"`{word}`" in text for word in words):
        return text
    return f"{text} One of {', '.join(f'`{word}`' for word in words)}."


def default_words(value: Any) -> str:
    """A field's default, in Markdown."""
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if value == {}:
        return "none"
    if isinstance(value, tuple) and value:
        return f"`{','.join(map(str, value))}`"
    return {None: "unset", (): "none", "": "unset"}.get(value) or f"`{value}`"


def meaning(word: str, known: Sequence[str]) -> str:
    """The hint for a word that is no job key; empty if no key is like it."""
    plain = word.strip().lstrip("-").lower().replace("-", "_")
    if plain in OTHER_WORDS:
        return f"write, for instance, {OTHER_WORDS[plain]}"
    if plain in ABSENT_WORDS:
        return ABSENT_WORDS[plain]
    if any(key.startswith(f"{plain}.") for key in known):
        return _keys_of_section(plain, known)
    near = difflib.get_close_matches(plain, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else ""


LONGEST_WORD = 80
"""Characters of an unknown word that a message shows and the search for a near key reads."""


def unknown_key(word: str, known: Sequence[str], place: str = "") -> str:
    """The error message for a word that is no job key, found at ``place``."""
    word = word if len(word) <= LONGEST_WORD else f"{word[: LONGEST_WORD - 3]}..."
    hint = meaning(word, known) or f"known are {', '.join(known)}"
    return f"unknown job key {word!r}{place}: {hint}"


def job_problem(error: ValidationError, known: Sequence[str]) -> str:
    """The error message for a job, in a line."""
    problem = error.errors()[0]
    parts = problem["loc"]
    key = ".".join(map(str, parts))
    if problem["type"] == "model_type":
        return f"job key {key} = {shorten(problem['input'])}: {_keys_of_section(key, known)}"
    if problem["type"] != "extra_forbidden" or any(isinstance(part, int) for part in parts):
        return value_problem(error)
    if key in known:
        section, _, name = key.partition(".")
        return f"job key {key!r}: write {section}={{{name!r}: ...}}"
    return unknown_key(key, known)


def value_problem(error: ValidationError, place: str = "") -> str:
    """The error message for a key's value; for a number it also shows how one is written."""
    message, problem = first_problem(error, "job key ", place), error.errors()[0]
    key, kind = key_of(problem), problem["type"]
    given = problem["input"]
    whole = isinstance(given, list | tuple | dict)  # whose text may be long, and is no word
    meant = "" if whole else OTHER_WORDS.get(str(given).lower(), "")
    if meant.startswith(f"{key}="):  # such as precision=bf16
        return f"{message}; write {meant}"
    example = _FORMS.get(key)
    number = kind.endswith("_parsing") or kind.startswith(("less_than", "greater_than"))
    return f"{message}; write, for instance, {example}" if example and number else message


def _keys_of_section(section: str, known: Sequence[str]) -> str:
    """The hint for a section of the job that was given as a key."""
    own = ", ".join(key for key in known if key.startswith(f"{section}."))
    return f"it has keys of its own: {own}"
