"""`predict`: classes of images by a trained network, and its accuracy where they have labels."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from batchwright.errors import ArgumentError, DataError, FileError, PlanError
from batchwright.records import Job, Plan
from batchwright.records.documents import change_job
from batchwright.records.registries.data_sources import is_remote, source_of
from batchwright.records.text.formatting import counted
from batchwright.records.text.problems import printable
from batchwright.storage.files import is_folder, is_there, writing_whole
from batchwright.workflows.delivery.class_counts import TOP, Predicted
from batchwright.workflows.delivery.deliver import trained
from batchwright.workflows.delivery.model_card import RECALIBRATED, recalibrates
from batchwright.workflows.job_changes import refuse_unconfirmed_code

if TYPE_CHECKING:
    from torch import Tensor

    from batchwright.training.batches.feeding import Feed
    from batchwright.workload.data.sources import ImageData
    from batchwright.workload.model_files import TrainedModel

HEAD = ("path", "class", "probability", "second", "label")
"""Columns of the table: the most likely class, its probability, the class that comes second, and
the image's own class where that is known."""

_OF_NETWORK = ("device", "network", "network_args")
_KEYS = ("data", "data_args", "val", "unreadable", "loaders", *_OF_NETWORK)


class _Batch(NamedTuple):
    """Images that were computed at once: names, labels (-1: unknown), logits (n, outputs)."""

    names: Sequence[str]
    labels: list[int]
    logits: Tensor


def predict(
    place: str | Path,
    images: Sequence[str] = (),
    overrides: Sequence[str] = (),
    *,
    out: str | Path | None = None,
    checkpoint: str | None = None,
    tell: Callable[[str], None],
) -> Predicted:
    """Classify images, write a row of each, and count.

    They are prepared as the held-out images of the training were, and computed in float32.

    Args:
        place: Folder of a finished run, or one that `deliver` has written.
        images: Image files and folders of them. An image is labelled by the folder in which it is,
            directly below the given one or that itself, if it is named like a class.
        overrides: Texts such as ``data=imagefolder:PATH``, whose held-out images take the place of
            ``images``. A run without either classifies its own held-out images.
        out: The file to write; ``-`` or `None` is stdout.
        checkpoint: ``best``, ``last`` or ``epoch-10``, of a run; unset: the best.
        tell: Called with a line for each image that cannot be read, and is left out; and with what
            else the user must know of the figures.

    Raises:
        ArgumentError: The words are wrong or contradict each other.
        FileError: There is no such network or image, or the file cannot be written.
        DataError: A folder has no image, or the data cannot be opened.
        JobError: A package is not installed, or the network cannot be built.
        PlanError: The network or the data of a run would run code that is not named again, or the
            run's data have changed.
    """
    given = {text.partition("=")[0].strip() for text in overrides}
    strange = [key for key in given if key.partition(".")[0] not in _KEYS]
    if strange:
        raise ArgumentError(f"predict takes {', '.join(_KEYS)}, and no {min(strange)}")
    if images and (others := {key.partition(".")[0] for key in given}.difference(_OF_NETWORK)):
        raise ArgumentError(f"predict takes images or data=..., not both: leave out {min(others)}=")
    asked = change_job(Job(), {}, overrides)
    from batchwright.workload.host import enter, resolve_device

    model, plan = _opened(place, asked, given, overrides, checkpoint)
    model.to(enter(resolve_device(asked.device)))
    counts = Predicted(model.classes)
    if plan is not None and recalibrates(plan):
        tell(f"note: {RECALIBRATED}")
    if plan is not None and any(_may_be_trained_on(one, plan.job.data) for one in images):
        tell(
            f"note: most images of data={plan.job.data} were trained on, so accuracy on them says "
            "little of new ones; without images, predict takes those that were held out"
        )
    if images:
        batches = _of_files(model, _labelled(images, model.class_numbers, tell), counts, tell)
    elif plan is not None and ("data" not in given or asked.data == plan.job.data):
        refuse_unconfirmed_code(plan.job, ("network", "loss"), overrides)
        batches = _of_data(model, change_job(plan.job, {}, overrides), plan)
    elif "data" in given:
        sized = change_job(Job(), {"resolutions": [model.prepared_side]}, overrides)
        batches = _of_data(model, sized, trained_by=plan, tell=tell)
    else:
        raise ArgumentError(
            f"{place} holds a network and no images: name image files, folders, or data=..."
        )
    with _writer(out) as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(HEAD)
        for batch in batches:
            table.writerows(_rows(model, batch, counts))
    return counts


def _opened(
    place: str | Path,
    asked: Job,
    given: set[str],
    overrides: Sequence[str],
    checkpoint: str | None,
) -> tuple[TrainedModel, Plan | None]:
    """The network, and the plan of its run, if the place is that of a run."""
    from batchwright.workload.model_files import CONFIG, built_model, load_model

    network = asked.network if "network" in given else None
    if is_there(Path(place) / CONFIG):
        if checkpoint is not None:
            raise ArgumentError(
                f"{place} was delivered with the weights of one checkpoint: leave --checkpoint out"
            )
        return load_model(place, network, asked.network_args), None
    summary, _, config, weights = trained(place, checkpoint or "best")
    refuse_unconfirmed_code(summary.plan.job, ("data", "loss"), overrides)
    folder = Path(summary.run_folder)
    model = built_model(folder, config, lambda: weights, network, config["network_args"])
    return model, summary.plan


# -------------------------------------------------------------------------------------- the images


def _may_be_trained_on(images: str, data: str) -> bool:
    """Whether an image or a folder belongs to a run's data, outside a folder held out of them."""
    from batchwright.workload.data.listing import held_out_name

    place = data.partition(":")[2]
    if not place or is_remote(place):
        return False
    with suppress(RuntimeError):  # ~NAME of a user who is gone
        place = str(Path(place).expanduser())
    root, path = Path(place).resolve(), Path(images).resolve()
    if path.is_relative_to(root):
        return held_out_name([name.lower() for name in path.relative_to(root).parts[:1]]) is None
    return root.is_relative_to(path)


def _labelled(
    images: Sequence[str], numbers: Mapping[str, int], tell: Callable[[str], None]
) -> list[tuple[str, int]]:
    """Path and label of each image file; -1: unknown.

    Raises:
        FileError: A path leads to nothing.
        DataError: A folder has no image.
    """
    from batchwright.workload.data.image_folder import images_below

    found: list[tuple[str, int]] = []
    folders: set[str] = set()
    for one in images:
        path = Path(one)
        if is_folder(path):
            folders.add(path.absolute().name)
            mine = numbers.get(path.absolute().name, -1)
            names, outside = images_below(path)
            if outside:
                tell(f"left out {counted(outside, 'link')} out of {one}: name those files too")
            for name in map(Path, names):
                below = name.parts[0] if len(name.parts) > 1 else ""
                folders.add(below)
                found.append((str(path / name), numbers.get(below, mine)))
        elif is_there(path):
            folders.add(path.absolute().parent.name)
            found.append((one, numbers.get(path.absolute().parent.name, -1)))
        else:
            raise FileError(f"there is no image or folder {one}: look at its name")
    for called in sorted(folders):
        if numbers.get(called, 0) < 0:
            tell(
                f"note: several classes are called {called}, so images in a folder of that name "
                "have no label"
            )
    return found


def _of_files(
    model: TrainedModel,
    paths: Sequence[tuple[str, int]],
    counts: Predicted,
    tell: Callable[[str], None],
) -> Iterator[_Batch]:
    """Batches of image files, decoded ahead; only some images are in memory at a time."""
    import torch

    from batchwright.workload.data.listing import in_order, without_pillows_warnings
    from batchwright.workload.host import usable_cores
    from batchwright.workload.model_files import AT_ONCE, read_image

    def read(task: tuple[str, int]) -> Any:
        try:
            task[0].encode()
            return read_image(task[0], side=model.prepared_side)
        except UnicodeEncodeError:
            name = printable(task[0])
            return DataError(f"unreadable image {name}: its name is not text in UTF-8; rename it")
        except DataError as error:
            return error

    def computed(waiting: list[tuple[str, int, Any]]) -> _Batch:
        names, labels, pixels = zip(*waiting, strict=True)
        with torch.inference_mode():
            return _Batch(names, list(labels), model.logits_of(pixels))

    waiting: list[tuple[str, int, Any]] = []
    with without_pillows_warnings(), ThreadPoolExecutor(usable_cores()) as pool:
        for (path, label), pixels in in_order(pool, read, paths):
            if isinstance(pixels, DataError):
                counts.unreadable += 1
                tell(str(pixels))
                continue
            waiting.append((path, label, pixels))
            if len(waiting) == AT_ONCE:
                yield computed(waiting)
                waiting = []
        if waiting:
            yield computed(waiting)


def _of_data(
    model: TrainedModel,
    job: Job,
    plan: Plan | None = None,
    *,
    trained_by: Plan | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Iterator[_Batch]:
    """Batches of the held-out images of a job's data.

    Args:
        model: The network.
        job: Names the data.
        plan: The plan whose own data they are to be; unset: they may be any.
        trained_by: The plan of the network's training, if it is known.
        tell: Called with a line if the training may have had images that are held out here.
    """
    from batchwright.reporting.render.progress import steps
    from batchwright.workload.data.sources import open_data

    with steps() as show:
        data = open_data(job, progress=show)
    if plan is not None and data.facts.digest != plan.data.digest:
        raise PlanError(
            f"data={job.data} has changed since the training: {plan.data.train_samples} training "
            f"and {plan.data.val_samples} held-out images with digest {plan.data.digest[:12]} "
            f"then, {data.facts.train_samples} and {data.facts.val_samples} with "
            f"{data.facts.digest[:12]} now; name image files or folders instead"
        )
    if trained_by is not None and _held_out_otherwise(job, data, trained_by):
        tell(
            f"note: images that are held out of data={job.data} may have been trained on, as they "
            f"are of data={trained_by.job.data} and held out otherwise: their accuracy says little "
            "of new ones"
        )
    if not model.class_numbers.keys() & set(data.facts.classes):
        raise DataError(
            f"data={job.data} has none of the network's classes: name its images without data="
        )
    return _computed(model, job, data, _feed(model, job, data))


def _held_out_otherwise(job: Job, data: ImageData, training: Plan) -> bool:
    """Whether a training may have trained on images that a job holds out."""
    if data.facts.digest == training.data.digest or not source_of(job.data).takes_path:
        return False
    # They lie in one part of a folder, so that any of them tells; images that are no files, where
    # all images are.
    places = (*_names(job, data)[:1], str(Path(job.data.partition(":")[2]).expanduser()))
    place = next((one for one in places if is_there(one)), None)
    return place is not None and _may_be_trained_on(place, training.job.data)


def _computed(model: TrainedModel, job: Job, data: ImageData, feed: Feed) -> Iterator[_Batch]:
    import torch

    from batchwright.workload.model_files import AT_ONCE
    from batchwright.workload.task import logits_in

    names = _names(job, data)
    numbers = [model.class_numbers.get(name, -1) for name in data.facts.classes]
    if data.facts.classes == model.classes:  # as ImageNet's, of which two are called crane
        numbers = [*range(len(model.classes))]
    indices = torch.arange(len(feed)).split(AT_ONCE)
    try:
        batches = feed.evaluation(indices, model.side)
        for some, (images, labels) in zip(indices, batches, strict=True):
            with torch.inference_mode():
                logits = logits_in(model.network(images))
            named = [names[index] for index in some.tolist()]
            yield _Batch(named, [numbers[label] for label in labels.tolist()], logits)
    except OSError as error:  # else the table would be said not to be written
        raise DataError(f"data={job.data}: an image cannot be read ({error})") from error
    finally:
        feed.close()


def _feed(model: TrainedModel, job: Job, data: ImageData) -> Feed:
    """What an evaluation of the training reads, with the network's own normalization."""
    from batchwright.training.batches.feeding import feed_of
    from batchwright.workload.data.image_files import FilePipeline, ImageFiles
    from batchwright.workload.data.image_store import ImageStore
    from batchwright.workload.data.loading import loader_processes
    from batchwright.workload.data.sources import AtResolution

    part, device = data.val, model.mean.device
    loaders = loader_processes(job, 1, files=isinstance(part, ImageFiles))
    if isinstance(part, ImageStore):
        return feed_of(model.pipeline(part), device)
    if isinstance(part, ImageFiles):
        part.mean, part.std = model.normalization
        pipeline = FilePipeline(part, device=device, augmentation="none", seed=0, loaders=loaders)
        return feed_of(pipeline, device)
    if model.normalizes:
        raise ArgumentError(
            f"data={job.data} prepares its images itself, and this network was trained on RGB "
            "images that Batchwright prepared: name image files, folders or other data"
        )
    return feed_of(AtResolution(part, model.side), device, seed=job.seed, loaders=loaders)


def _names(job: Job, data: ImageData) -> Sequence[str]:
    """Paths of the held-out images, where they are files; of other data their numbers."""
    from batchwright.workload.data.image_files import ImageFiles
    from batchwright.workload.task import import_object

    part, (_, _, place) = data.val, job.data.partition(":")
    named = source_of(job.data).held_out_files
    names: list[str] = []
    if isinstance(part, ImageFiles):
        names = part.places
    elif named and not is_remote(place):
        names = import_object(named, "data")(job, place)
    if len(names) == data.facts.val_samples:  # else some were unreadable, and left out
        return [name.encode(errors="backslashreplace").decode() for name in names]
    return [f"{job.data}#{index}" for index in range(data.facts.val_samples)]


# --------------------------------------------------------------------------------------- the table


def _rows(model: TrainedModel, batch: _Batch, counts: Predicted) -> Iterator[tuple[str, ...]]:
    """The rows of a batch, which is counted."""
    import torch

    logits = batch.logits.float().cpu()
    labels = torch.tensor(batch.labels)
    # Outputs of a diverged network are NaN, of which `argmax` would make the first class.
    has_guess = ~logits.isnan().any(dim=1)
    first = logits.argmax(dim=1)
    second = logits.scatter(1, first[:, None], -torch.inf).argmax(dim=1).tolist()
    shares = logits.softmax(dim=1).gather(1, first[:, None]).squeeze(1).tolist()
    right = logits.gather(1, labels.clamp(min=0)[:, None])
    # Of equal outputs the first count, or all classes of a dead network would be most likely ones.
    earlier = torch.arange(logits.shape[1]) < labels[:, None]
    before = ((logits > right) | ((logits == right) & earlier)).sum(dim=1)
    guesses = torch.where(has_guess, first, -1)
    counts.images += len(labels)
    counts.in_top += int(((before < TOP) & has_guess & (labels >= 0)).sum())
    for name, label, guess, share, other in zip(
        batch.names, batch.labels, guesses.tolist(), shares, second, strict=True
    ):
        if label >= 0:
            counts.confusion[label, guess] += 1
        own = model.class_name(label) if label >= 0 else ""
        if guess < 0:
            yield name, "", "nan", "", own
        else:
            yield name, model.class_name(guess), f"{share:.4f}", model.class_name(other), own


@contextmanager
def _writer(out: str | Path | None) -> Iterator[TextIO]:
    """The file to write, which is there once it is whole; or stdout."""
    if out is None or str(out) == "-":
        yield sys.stdout
        return
    with writing_whole(Path(out)) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        yield text
        text.flush()
        text.detach()
