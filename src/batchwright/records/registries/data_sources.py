"""Data sources: job key ``data``, which names a source and, for most, a place such as a folder."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from batchwright.records.base import Augmentation
from batchwright.records.registries.registry import Registry
from batchwright.records.text.problems import printable


@dataclass(frozen=True)
class DataSource:
    """A kind of data.

    Attributes:
        name: Name, as in a job before any colon.
        open: Import string of a function (job, place, progress, verify) -> `ImageData`; the
            arguments are those of `open_data`, and ``place`` is the text after the colon.
        takes_path: Whether a place, such as a folder, follows a colon.
        place: Name of the place in descriptions, in capitals.
        takes_args: Whether it uses job key `data_args`.
        remote: Whether the place is a URL of a remote store.
        augment: Augmentation of `augment=auto`.
        named_by_folder: Whether the folder's name is the name of the data.
        takes_val: Whether job key `val` may hold out some images.
        as_they_come: Whether the source itself augments and normalizes the images.
        reads_tar: Whether it reads tar files directly, so that none has to be unpacked.
        held_out_files: Import string of a function (job, place) -> paths of its held-out images, in
            order; empty: they are not files.
        keeps_size: Whether images are stored in their own size, whatever the resolutions.
        takes_in: Import string of a function (root, folder, job) -> whether what is written into a
            new folder below the data's own, ``root``, would be taken for data; empty: never.
    """

    name: str
    open: str
    takes_path: bool = False
    place: str = "PATH"
    takes_args: bool = False
    remote: bool = False
    augment: Augmentation = "crop-flip"
    named_by_folder: bool = False
    takes_val: bool = False
    as_they_come: bool = False
    reads_tar: bool = False
    held_out_files: str = ""
    keeps_size: bool = False
    takes_in: str = ""

    @property
    def form(self) -> str:
        """How a job writes it."""
        return f"{self.name}:{self.place}" if self.takes_path else self.name


_SOURCES = "batchwright.workload.data.sources"
_ARRAYS = "batchwright.workload.data.arrays"
_LIBRARIES = "batchwright.workload.data.libraries"
FETCH = f"{_LIBRARIES}.remote:fetch"
"""Import string of a function (data, URL, progress, verify) -> path of the local copy."""

DRAWN = "of each class, drawn by their names"
"""End of the description of a split that job key `val` made."""


def _library(
    name: str,
    function: str,
    place: str,
    *,
    args: bool = True,
    remote: bool = False,
    reads_tar: bool = False,
    takes_in: str = "",
) -> DataSource:
    """A source that a library reads; its images are decoded like those of a folder."""
    return DataSource(
        name,
        f"{_LIBRARIES}.{function}",
        takes_path=True,
        place=place,
        takes_args=args,
        named_by_folder=True,
        takes_val=True,
        remote=remote,
        reads_tar=reads_tar,
        takes_in=takes_in,
    )


DATA = Registry(
    "data",
    DataSource("digits", f"{_ARRAYS}:open_digits", augment="crop", keeps_size=True),
    DataSource("cifar10", f"{_ARRAYS}:open_cifar", takes_path=True, keeps_size=True),
    DataSource("cifar100", f"{_ARRAYS}:open_cifar", takes_path=True, keeps_size=True),
    DataSource(
        "imagefolder",
        f"{_SOURCES}:open_image_folder",
        takes_path=True,
        named_by_folder=True,
        takes_val=True,
        held_out_files="batchwright.workload.data.image_folder:held_out_files",
        takes_in="batchwright.workload.data.image_folder:takes_in",
    ),
    _library(
        "hf",
        "hugging_face:open_hugging_face",
        "NAME_OR_FOLDER",
        takes_in=f"{_LIBRARIES}.hugging_face:takes_in",
    ),
    _library("torchvision", "torchvision_data:open_torchvision", "CLASS"),
    _library("wds", "web_dataset:open_web_dataset", "PATTERN", reads_tar=True),
    _library("lmdb", "lmdb_data:open_lmdb", "FOLDER", args=False),
    *(
        _library(scheme, "remote:open_remote", "//PLACE", remote=True)
        for scheme in ("s3", "gs", "az", "https", "http")
    ),
    group="batchwright.data",
)
FUNCTION = DataSource("package.module:function", f"{_SOURCES}:open_function", as_they_come=True)
"""The source of any other ``data``: an import string of a function that returns the data."""

OWN_STEP = "step"
"""Value of ``data`` in the profile of a user's own step; it cannot be opened."""


def is_remote(place: str) -> bool:
    """Whether a place is a URL, such as ``s3://bucket/flowers``."""
    return "://" in place


def source_of(data: str) -> DataSource:
    """The source of a job's ``data``; whether the data exist shows when they are opened."""
    return DATA.get(data.partition(":")[0], FUNCTION)


_SECRET = re.compile(
    r"sig$|signature|token|secret|passw|passphrase|pwd|credential|jwt|auth(?!or)|key(?!w)",
    re.IGNORECASE,
)
"""Names of query parameters whose values are secrets, as in signed addresses, or tokens."""


def secret_in(data: str) -> str:
    """The error message for a secret in the address of a job's ``data``; empty if there is none.

    Jobs are kept in run folders and sent to other machines, so an address must not hold a password
    or a token.
    """
    before, mark, rest = data.partition("://")
    if not mark:
        return ""
    kind, scheme = data.partition(":")[0], re.split(r"[^a-z0-9+.-]", before.lower())[-1]
    try:
        parts = urlsplit(f"//{rest}", scheme)
        password, user = parts.password, parts.username
    except ValueError:  # not an address: opening the data will refuse it
        return ""
    if password is not None or (user and parts.scheme in ("http", "https")):
        return (
            f"data={kind}: a name or password in an address would be kept in files: give it in the "
            "environment or in the files of the store's own tools"
        )
    # A fragment is not sent to the server, and may hold a token, too.
    parameters = parse_qsl(parts.query) + parse_qsl(parts.fragment)
    if signed := [name for name, _ in parameters if _SECRET.search(name)]:
        return (
            f"data={kind}: an address with {printable(signed[0])}= in it lets whoever reads the "
            "run folder in: fetch the files yourself, or give the header that the server wants in "
            f"FSSPEC_{parts.scheme.upper()}, as in "
            """'{"headers": {"Authorization": "Bearer ..."}}'"""
        )
    return ""
