"""Writes weights, settings, model card and optionally ONNX of a finished run into a folder."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from batchwright.errors import ArgumentError, FileError
from batchwright.records import EpochRecord, Plan, RunSummary
from batchwright.records.documents import refuse_no_path
from batchwright.records.registries.data_sources import source_of
from batchwright.records.run_folder import BEST, KEPT, LAST, read_summary
from batchwright.storage.files import is_folder, is_there, make_folder, refusal, write_whole
from batchwright.workflows.delivery.model_card import UNKNOWN, model_card

CARD, ONNX = "README.md", "model.onnx"
_LICENCE = r"[A-Za-z0-9][A-Za-z0-9.+_-]{0,63}"  # it is written into the card's YAML


class Trained(NamedTuple):
    """The trained network of a run.

    Attributes:
        summary: The run's summary.
        evaluated: The epoch at whose end the weights were taken; ``None``: within an epoch, or
            unknown.
        config: What `save_model` writes beside the weights.
        weights: The state_dict.
    """

    summary: RunSummary
    evaluated: EpochRecord | None
    config: dict[str, Any]
    weights: Any


def trained(run: str | Path, checkpoint: str) -> Trained:
    """The network of a finished run in a folder; ``checkpoint`` is as for `deliver`.

    Raises:
        ArgumentError: ``checkpoint`` is wrong.
        FileError: The run has not finished, or its checkpoint is not there or damaged.
        JobError: A network of Transformers has its configuration no more.
    """
    number = re.fullmatch(f"{KEPT}([1-9][0-9]{{0,8}})", str(checkpoint))
    if checkpoint not in (BEST, LAST) and not number:
        raise ArgumentError(
            f'checkpoint={checkpoint!r}: give "best", "last", or "{KEPT}10" for one that '
            "checkpoint_epochs has kept"
        )
    if str(run) != "-" and not is_there(Path(run)):
        raise FileError(f"there is no run folder {run}: look at its spelling")
    summary = read_summary(run)
    from batchwright.training.checkpoints.checkpoint import load_checkpoint
    from batchwright.workload.starting_weights import built_side, trained_weights

    path = Path(summary.run_folder) / "checkpoints" / f"{checkpoint}.pt"
    if checkpoint == BEST and not path.exists():  # the run was never evaluated
        path = path.with_name(f"{LAST}.pt")
    if number and not path.exists():
        kept = sorted(path.parent.glob(f"{KEPT}*.pt"), key=lambda one: (len(one.name), one.name))
        there = ", ".join(one.stem for one in kept) or "none (checkpoint_epochs keeps some)"
        raise FileError(f"there is no checkpoint {path}; of single epochs there are: {there}")
    if not path.exists():
        raise FileError(
            f"there is no checkpoint {path}, which has what was trained: name the whole run folder"
        )
    content = load_checkpoint(path)
    plan = summary.plan
    evaluated = _epoch_of(content, summary, path.stem)
    wanted = content["input"]
    config: dict[str, Any] = {
        "network": plan.network.name,
        "classes": list(content["classes"]),
        "side": plan.top_resolution,
        "prepared_side": _prepared_side(plan),
        "built_side": built_side(plan.network.name, plan.job.network_args, plan.top_resolution),
        "mean": list(wanted.get("mean", ())),
        "std": list(wanted.get("std", ())),
        "dropout": plan.stages[0].dropout,  # some networks have other layers with dropout
        # Without `pretrained`: it would download weights that are then replaced.
        "network_args": {k: v for k, v in plan.job.network_args.items() if k != "pretrained"},
    }
    return Trained(summary, evaluated, config, trained_weights(content))


def _epoch_of(content: dict[str, Any], summary: RunSummary, name: str) -> EpochRecord | None:
    """The epoch at whose end a checkpoint's weights were taken, by the checkpoint itself.

    The summary may be older than the checkpoint, and its best epoch is by accuracy, where a loop of
    one's own may go by another score. Returns `None` for weights from within an epoch.
    """
    at, epochs, served = content["state"], summary.epochs, "server" in content
    if served and name == BEST:  # training went on while it was evaluated, so its score tells it
        score, loss = at["best_score"], at.get("best_loss", inf)
        alike = [one for one in epochs if one.top1 == score]
        with_loss = [one for one in alike if one.val_loss == loss]
        return next(iter(with_loss or alike), None)  # an earlier version kept the first of equals
    if at["step"]:
        return None
    if not served:
        epochs = tuple(map(EpochRecord.model_validate_json, content["run"]["epochs"]))
    number = int(name.removeprefix(KEPT)) if name.startswith(KEPT) else at["epoch"]
    return next((one for one in epochs if one.epoch + 1 == number), None)


def _prepared_side(plan: Plan) -> int:
    """Side of the squares that evaluations resize to the highest resolution, in pixels.

    Images that are stored in their own size are resized as a whole.
    """
    from batchwright.workload.data.pipeline import is_shown_whole

    own, side = plan.data.side, plan.top_resolution
    return own if source_of(plan.job.data).keeps_size and is_shown_whole(own, side) else side


def deliver(
    run: str | Path,
    out: str | Path,
    *,
    checkpoint: str = "best",
    licence: str = UNKNOWN,
    onnx: bool = False,
    network: Any = None,
) -> Path:
    """Write a run's trained network for others: safetensors, a model card, and optionally ONNX.

    Args:
        run: Folder of a finished run.
        out: A new or empty folder.
        checkpoint: ``best``: the weights of the epoch with the highest held-out accuracy; ``last``:
            those of the last epoch; ``epoch-10``: those after 10 epochs, where `checkpoint_epochs`
            has kept them.
        licence: Identifier of the licence for the card, such as ``apache-2.0``.
        onnx: Whether to write the network also as ONNX.
        network: For ONNX, the network if it is your own, as for `load_model`.

    Returns:
        The path of the card.

    Raises:
        ArgumentError: ``checkpoint`` or ``licence`` is wrong.
        JobError: A package that is needed is not installed, or a network of Transformers has its
            configuration no more.
        FileError: The run has not finished, or the folder is not empty or cannot be written.
        PlanError: The network cannot be written as ONNX. Then nothing is written.
    """
    refuse_no_path(run, "run")
    refuse_no_path(out, "out")
    if not re.fullmatch(_LICENCE, licence):
        raise ArgumentError(f"licence={licence!r}: give its identifier, such as apache-2.0")
    target = Path(out)
    if is_there(target) and (not is_folder(target) or any(target.iterdir())):
        raise FileError(f"{target} exists and is not empty: choose another --out")
    summary, evaluated, config, weights = trained(run, checkpoint)
    from batchwright.workload.model_files import load_model, save_model, write_onnx

    new = not is_there(target)
    make_folder(target)
    aside = target / f".{os.urandom(4).hex()}"  # on the same disk, so that all files fit or none
    try:
        aside.mkdir()
        save_model(aside, weights, config)
        if onnx:
            model = load_model(aside, network, config["network_args"])
            write_onnx(model, config["side"], summary.plan.data.channels, aside / ONNX)
        card = model_card(summary, evaluated, config, licence=licence, onnx=onnx)
        write_whole(aside / CARD, card.encode())
        for one in sorted(aside.iterdir()):
            one.replace(target / one.name)
    except OSError as error:
        raise refusal(target, error) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        if new:
            with suppress(OSError):  # fails if the delivery succeeded, as the folder is not empty
                target.rmdir()
    return target / CARD
