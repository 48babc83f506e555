"""Data sets of Hugging Face's ``datasets``: of ``save_to_disk``, a folder, or the Hub."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchwright.errors import DataError
from batchwright.records import Job
from batchwright.workload.data.decoding import UnreadableImageError
from batchwright.workload.data.listing import (
    ImageFile,
    Listing,
    classes_of,
    file_states,
    held_out_name,
    named_classes,
    refuse_unless_text,
    split_parts,
)
from batchwright.workload.data.sources import ImageData, open_listed
from batchwright.workload.data.store import Progress
from batchwright.workload.extras import (
    import_library,
    in_words,
    some_names,
    without_waiting_for_the_hub,
)

_OURS = ("train", "val", "image", "label")  # keys of data_args; others go to `load_dataset`
_SAVED = ("dataset_dict.json", "state.json")  # files that `save_to_disk` writes
_SECRET = ("token", "use_auth_token", "storage_options")  # keys that would hold a secret
_NUMBERS = ("int", "uint", "string", "large_string", "bool")


def open_hugging_face(job: Job, place: str, progress: Progress | None, verify: bool) -> ImageData:
    """A data set by its folder or its name on the Hub.

    ``data_args`` may name the splits (``train``, ``val``) and the columns (``image``, ``label``);
    further keys, such as ``name`` or ``revision``, go to ``datasets.load_dataset``. By default the
    held-out split is the first of validation and test, and the columns are those whose features are
    an image and a class.

    Raises:
        DataError: The data set cannot be opened, has no length, or a column or split is ambiguous.
        JobError: The library is missing.
    """
    if job.data_args.get("streaming"):
        raise DataError(_uncountable(job.data))
    refuse_unless_text(job, _OURS)
    folder = Path(place).expanduser()
    if folder.is_dir():
        identity: dict[str, object] = {"data": "hf", "files": file_states(folder)}

        def listed() -> Listing:
            return _list(_load(job, place), job, [folder])

        return open_listed(listed, identity, job, progress, verify)
    splits = _load(job, place)
    prints = {name: split._fingerprint for name, split in splits.items()}
    identity = {"data": job.data, "fingerprints": prints}
    return open_listed(lambda: _list(splits, job, []), identity, job, progress, verify)


def takes_in(root: Path, folder: Path, job: Job) -> bool:
    """Whether ``load_dataset`` may look for data in a new folder below ``root``: in any but hidden
    ones, unless ``save_to_disk`` has written ``root``.
    """
    del job
    is_hidden = any(name.startswith(".") for name in folder.relative_to(root).parts)
    return not is_hidden and not _is_saved(root)


def _is_saved(folder: Path) -> bool:
    """Whether ``save_to_disk`` has written a folder."""
    return folder.is_dir() and any((folder / name).is_file() for name in _SAVED)


def _load(job: Job, place: str) -> Mapping[str, Any]:
    """The data set's splits, by name."""
    others = {key: value for key, value in job.data_args.items() if key not in _OURS}
    if others.pop("trust_remote_code", False):
        raise DataError(
            f"data={job.data}: trust_remote_code would run code of others: leave it out"
        )
    if secret := others.keys() & {*_SECRET}:
        raise DataError(
            f"data={job.data}: data_args.{min(secret)} would be kept in run folders: set HF_TOKEN, "
            "or log in with `hf auth login`"
        )
    library = import_library("datasets")
    folder = Path(place).expanduser()
    saved = _is_saved(folder)
    if saved and others:  # `load_from_disk` does not take them
        raise DataError(
            f"data={job.data}, which save_to_disk wrote, takes "
            f"{', '.join(f'data_args.{key}' for key in _OURS)}, and no {min(others)}"
        )
    shown = library.are_progress_bars_disabled()
    library.disable_progress_bars()
    try:
        with without_waiting_for_the_hub():
            if saved:
                found = library.load_from_disk(str(folder))
            else:
                found = library.load_dataset(str(folder) if folder.is_dir() else place, **others)
    except Exception as error:  # the library may fail in any way
        raise DataError(
            f"data={job.data} cannot be opened ({in_words(error)}): looked for a folder {folder}, "
            "and for a data set of that name in the library's cache (HF_HOME) and on the Hub"
        ) from error
    finally:
        if not shown:
            library.enable_progress_bars()
    if isinstance(found, library.IterableDataset | library.IterableDatasetDict):
        raise DataError(_uncountable(job.data))
    return found if isinstance(found, Mapping) else {"train": found}


def _uncountable(data: str) -> str:
    return (
        f"data={data}: a streamed (iterable) data set has no length, and each sample is to count "
        "once: leave data_args.streaming out"
    )


@dataclass(frozen=True)
class Rows:
    """Reads encoded images of splits, by names such as ``train/12``.

    Attributes:
        splits: The splits by name, with the images' column alone.
        column: Name of the images' column.
        below: Folders in which rows may name files; files elsewhere are refused.
    """

    splits: dict[str, Any]
    column: str
    below: tuple[Path, ...]

    def __call__(self, name: str) -> bytes:
        """The encoded image of a row."""
        split, _, row = name.rpartition("/")
        held = self.splits[split][int(row)][self.column]
        if isinstance(held, dict):
            if held.get("bytes") is None and held.get("path"):
                path = Path(held["path"]).resolve()
                if not any(path.is_relative_to(folder) for folder in self.below):
                    raise UnreadableImageError(f"it names {path}, which is not of the data set")
                return path.read_bytes()
            held = held.get("bytes")
        if not isinstance(held, bytes):
            raise UnreadableImageError("the row has no image")
        return held


def _list(splits: Mapping[str, Any], job: Job, folders: list[Path]) -> Listing:
    """The images; rows may name files below ``folders`` and below the library's caches."""
    where, args = f"data={job.data}", job.data_args
    names = {str(name): split for name, split in splits.items()}
    train = _split(where, names, args.get("train"), "train", "train")
    if train is None:
        train = next(iter(names)) if len(names) == 1 else None
    if train is None:
        raise DataError(
            f"{where} has the splits {', '.join(names)} and none called train: name it with "
            "data_args.train=SPLIT"
        )
    val = _split(where, names, args.get("val"), held_out_name({*names} - {train}), "val")
    if train == val:
        raise DataError(f"{where}: the split {train} cannot be both trained on and held out")
    image = _column(where, names[train], args.get("image"), "image", _holds_images)
    label = _column(where, names[train], args.get("label"), "label", _holds_classes)
    unlabelled = ""
    if val and len(names[val]) and _is_unlabelled(names[val], label):
        if "val" in args or job.val is None:
            raise DataError(
                f"{where}: the split {val} has no labels to evaluate by: name another with "
                "data_args.val=SPLIT, or leave that out and hold out a share of the others with "
                "val=0.1"
            )
        unlabelled, val = val, None
    chosen = [train, *([val] if val else [])]
    raw: dict[str, Any] = {}
    for part in chosen:
        absent = {image, label} - {*names[part].column_names}
        if absent:
            raise DataError(f"{where}: split {part} has no column {', '.join(absent)}")
        raw |= {f"{part}/{row}": one for row, one in enumerate(_labels(names[part], label))}
    classes, numbers = _classes(where, [names[part] for part in chosen], chosen, label, raw)
    files: dict[str, list[ImageFile]] = {part: [] for part in chosen}
    for name, value in raw.items():
        files[name.rpartition("/")[0]].append(ImageFile(name, numbers[value]))
    held_out = (f"the split {val}", files[val]) if val else None
    hint = f", or name one of its splits ({', '.join(names)}) with data_args.val=SPLIT"
    parts, split = split_parts(where, files[train], held_out, classes, job, hint)
    library = import_library("datasets")
    rows = {}
    for part in chosen:
        held = names[part].select_columns([image]).with_format(None)
        if _kind(held.features[image]) == "Image":
            held = held.cast_column(image, library.Image(decode=False))
        rows[part] = held
    caches = library.config.HF_DATASETS_CACHE, library.config.HF_CACHE_HOME
    below = tuple(path.resolve() for path in (*folders, *map(Path, caches)))
    read = Rows(rows, image, below)
    return Listing(Path(where), classes, parts, split, read, kind="hf", unlabelled=unlabelled)


def _labels(split: Any, column: str) -> list[Any]:
    return list(split.select_columns([column]).with_format(None)[:][column])


def _is_unlabelled(split: Any, column: str) -> bool:
    """Whether no row has a label, as in tests whose labels are not published."""
    known = column in split.column_names
    labels = split.select_columns([column]).with_format(None).iter(1000) if known else ()
    return all(one in (None, -1) for batch in labels for one in batch[column])


def _split(
    where: str, names: Mapping[str, Any], asked: object, usual: str | None, key: str
) -> str | None:
    if asked is not None and asked not in names:
        raise DataError(
            f"{where} has no split {asked}: data_args.{key} is one of {', '.join(names)}"
        )
    return str(asked) if asked is not None else usual if usual in names else None


def _kind(feature: Any) -> str:
    return type(feature).__name__


def _holds_images(feature: Any) -> int:
    """Whether a column holds images: 2 certainly, 1 possibly, 0 not."""
    if _kind(feature) == "Image":
        return 2
    held = {*feature} if isinstance(feature, dict) else set()
    return int("bytes" in held or getattr(feature, "dtype", "") in ("binary", "large_binary"))


def _holds_classes(feature: Any) -> int:
    """Whether a column holds classes: 2 certainly, 1 possibly, 0 not."""
    if _kind(feature) == "ClassLabel":
        return 2
    return int(_kind(feature) == "Value" and feature.dtype.rstrip("0123456789") in _NUMBERS)


def _column(where: str, split: Any, asked: object, key: str, surely: Any) -> str:
    """The column that the job names, or the only suitable one, or the one with a usual name.

    Args:
        where: The data set, for messages.
        split: A split with its features.
        asked: The column that the job names; `None`: none.
        key: ``image`` or ``label``.
        surely: `_holds_images` or `_holds_classes`.
    """
    features = split.features
    if asked is None:
        by_degree = [[n for n, one in features.items() if surely(one) == sure] for sure in (2, 1)]
        found = next((names for names in by_degree if names), [])
        usual = [name for name in found if name in (key, f"{key}s", "img", "class", "target")]
        if len(found) == 1 and (found is by_degree[0] or key == "image"):
            return str(found[0])
        if len(usual) == 1:
            return str(usual[0])
    elif asked in features:
        return str(asked)
    kinds = {n: one.dtype if _kind(one) == "Value" else _kind(one) for n, one in features.items()}
    columns = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
    must = "images or bytes" if key == "image" else "words or whole numbers"
    what = f"no column {asked}" if asked is not None else f"no single column of {must} for {key}"
    raise DataError(f"{where} has {what}: name it with data_args.{key}=COLUMN; it has {columns}")


def _classes(
    where: str, splits: list[Any], parts: list[str], column: str, raw: dict[str, Any]
) -> tuple[tuple[str, ...], dict[Any, int]]:
    """Class names, and the class number of each label."""
    named = [getattr(split.features[column], "names", None) for split in splits]
    if any(names != named[0] for names in named):
        first, second = ({*map(str, names or ())} for names in named[:2])
        only = [
            f"only in {part}: {some_names(sorted(names))}"
            for part, names in zip(parts, (first - second, second - first), strict=False)
            if names
        ]
        raise DataError(
            f"{where}: the splits number their classes in other ways "
            f"({'; '.join(only) or 'in another order'}): cast them to one ClassLabel"
        )
    if named[0] is None:
        return classes_of(where, raw)
    for name, label in raw.items():
        if label is None or not 0 <= label < len(named[0]):
            raise DataError(
                f"{where}: row {name} has no label ({label}): take such rows out, or name other "
                "splits with data_args.train and data_args.val"
            )
    return named_classes(where, named[0]), {label: label for label in range(len(named[0]))}
