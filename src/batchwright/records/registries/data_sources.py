"""Data sources: job key ``data``, which names one, and a folder if it takes one."""

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
        name: As in a job, before any colon.
        open: Import string of a function: (job, place, progress, verify) -> `ImageData`, as
            `open_data` has them; the place is what stands behind the colon.
        takes_path: Whether a place, such as a folder, is named behind a colon.
        place: What to call that, in capitals.
        takes_args: Whether job key `data_args` says more.
        remote: Whether the place is in a store elsewhere, as its name says.
        augment: What `augment=auto` comes to.
        named_by_folder: Whether its folder's name says which data they are.
        takes_val: Whether job key `val` may hold some images out.
        as_they_come: Whether images are augmented and normalized before we get them.
        reads_tar: Whether it reads tar files as they are, so that none is unpacked for it.
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

    @property
    def form(self) -> str:
        """How a job writes it."""
        return f"{self.name}:{self.place}" if self.takes_path else self.name


_SOURCES = "batchwright.workload.data.sources"
_LIBRARIES = "batchwright.workload.data.libraries"
FETCH = f"{_LIBRARIES}.remote:fetch"
"""Import string of a function: (data, URL, progress, verify) -> path of its copy here."""

DRAWN = "of each class, drawn by their names"
"""Ends the words for a split that job key `val` made."""


def _library(
    name: str,
    function: str,
    place: str,
    *,
    args: bool = True,
    remote: bool = False,
    reads_tar: bool = False,
) -> DataSource:
    """A source that a library reads; its images are decoded as those of a folder are."""
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
    )


DATA = Registry(
    "data",
    DataSource("digits", f"{_SOURCES}:open_digits", augment="crop"),
    DataSource("cifar10", f"{_SOURCES}:open_cifar", takes_path=True),
    DataSource("cifar100", f"{_SOURCES}:open_cifar", takes_path=True),
    DataSource(
        "imagefolder",
        f"{_SOURCES}:open_image_folder",
        takes_path=True,
        named_by_folder=True,
        takes_val=True,
    ),
    _library("hf", "hugging_face:open_hugging_face", "NAME_OR_FOLDER"),
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
"""Any other import string: what the function that it names returns."""

OWN_STEP = "step"
"""What the job of a profile of a user's own step has as ``data``; nothing that can be opened."""


def is_remote(place: str) -> bool:
    """Whether a place is a URL, such as ``s3://bucket/flowers``."""
    return "://" in place


def source_of(data: str) -> DataSource:
    """The source of a job's ``data``, which may yet be refused when it is opened."""
    return DATA.get(data.partition(":")[0], FUNCTION)


_SECRET = re.compile(
    r"sig$|signature|token|secret|passw|passphrase|pwd|credential|jwt|auth(?!or)|key(?!w)",
    re.IGNORECASE,
)
"""In the name of what an address's query tells, where it is a secret: signed addresses, tokens."""


def secret_in(data: str) -> str:
    """What in the address of a job's ``data`` lets its readers in, in a line; empty: nothing.

    Jobs are kept in run folders, and sent to other machines.
    """
    before, mark, rest = data.partition("://")
    if not mark:
        return ""
    kind, scheme = data.partition(":")[0], re.split(r"[^a-z0-9+.-]", before.lower())[-1]
    try:
        parts = urlsplit(f"//{rest}", scheme)
        password, user = parts.password, parts.username
    except ValueError:  # it is no address, as whoever opens it will say
        return ""
    if password is not None or (user and parts.scheme in ("http", "https")):
        return (
            f"data={kind}: a name or password in an address would be kept in files: give it in the "
            "environment or in the files of the store's own tools"
        )
    # A fragment is no part of what is asked for, and may hold the same.
    told = parse_qsl(parts.query) + parse_qsl(parts.fragment)
    if signed := [name for name, _ in told if _SECRET.search(name)]:
        return (
            f"data={kind}: an address with {printable(signed[0])}= in it lets whoever reads the "
            "run folder in: fetch the files yourself, or give the header that the server wants in "
            f"FSSPEC_{parts.scheme.upper()}, as in "
            """'{"headers": {"Authorization": "Bearer ..."}}'"""
        )
    return ""
