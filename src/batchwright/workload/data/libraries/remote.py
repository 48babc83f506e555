"""Data in object stores and on web servers, by fsspec: fetched once as a whole, then read locally.

fsspec's packages, such as s3fs and gcsfs, find credentials in the environment and in the user's
files, as the tools of these stores do.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tarfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from stat import S_ISLNK
from typing import Any
from urllib.parse import unquote, urlsplit

from batchwright.errors import DataError, JobError
from batchwright.records import Job
from batchwright.records.registries.data_sources import DATA, secret_in, source_of
from batchwright.storage.locks import lock_file
from batchwright.workload.data.libraries.web_dataset import (
    CheckedTarInfo,
    expanded,
    refuse_trailing_data,
    sample_of,
)
from batchwright.workload.data.listing import TEST_NAMES, TRAIN_NAMES, VAL_NAMES
from batchwright.workload.data.sources import ImageData
from batchwright.workload.data.store import Progress, cache_folder, free_bytes
from batchwright.workload.data.store_writer import clear_errors
from batchwright.workload.extras import import_library, in_words, missing
from batchwright.workload.task import import_object

_NEEDS = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs", "https": "aiohttp", "http": "aiohttp"}
_MANIFEST = "fetched.json"
_PACKED = re.compile(r"\.(zip|tar\.(gz|bz2|xz)|tgz)$")
_STAMPS = (
    *("ETag", "etag", "md5Hash", "Content-MD5", "Digest"),
    *("LastModified", "Last-Modified", "last_modified", "updated", "mtime", "created"),
)
"""Names that stores have for a file's tag or time; the first that is present counts."""

_TEXTS = frozenset({"", ".txt", ".md", ".rst", ".html", ".pdf"})
"""Endings of files that describe data."""

_BLOCK = 2**20
_LINK = "{} is a link or a device: pack the file itself"
_NOT_A_FILE = "neither a file nor a folder with files"

_File = tuple[str, int, str]  # full path, bytes, time or tag


def open_remote(job: Job, place: str, progress: Progress | None, verify: bool) -> ImageData:
    """A folder, an archive or tar files at a URL; their kind is determined once they are fetched.

    Raises:
        DataError: There is nothing at the URL, it cannot be fetched, or it is no data set.
        JobError: The package for such URLs is missing.
    """
    path = fetch(job.data, f"{job.data.partition(':')[0]}:{place}", progress, verify)
    kind = _kind_of(path)
    if job.data_args and not DATA[kind].takes_args:
        raise DataError(f"data={job.data} takes no data_args, as it is {kind}: leave them out")
    try:
        found: ImageData = import_object(DATA[kind].open, "data")(job, str(path), progress, verify)
    except DataError as error:  # the message should name the user's URL, not our copy
        raise DataError(str(error).replace(str(path), job.data)) from error
    return found


def _kind_of(folder: Path) -> str:
    """The source that reads a fetched folder."""
    if any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return "hf"
    if any(folder.glob("*.parquet")) or any(folder.glob("*/*.parquet")):
        return "hf"
    if any(folder.glob("*.mdb")) or any(folder.glob("*/data.mdb")):
        return "lmdb"
    return "wds" if any(folder.rglob("*.tar")) else "imagefolder"


def fetch(data: str, url: str, progress: Progress | None, verify: bool) -> Path:
    """A copy of the data at a URL, in our cache; archives are unpacked.

    The copy is made in another folder and renamed, so that it is whole or absent. It is made again
    if the files at the URL have other sizes or times.

    Args:
        data: The data in the job, for messages.
        url: URL of a file or a folder; braces stand for several, as in a shell.
        progress: Called as progress(bytes done, bytes in all, what).
        verify: Whether to check that the files at the URL have not changed.

    Raises:
        DataError: There is nothing at the URL, or it cannot be fetched.
        JobError: The package for such URLs is missing.
    """
    # Other schemes of fsspec could read any local file, and `::` chains several schemes.
    if not source_of(url).remote or "://" not in url or "::" in url:
        schemes = ", ".join(f"{name}://" for name, one in DATA.items() if one.remote)
        raise DataError(
            f"data={data}: places elsewhere begin with {schemes}; what is on a disk here is named "
            "by its path"
        )
    try:
        urlsplit(url)
    except ValueError as error:
        raise DataError(f"data={data} is no address ({error})") from error
    if problem := secret_in(url):
        raise DataError(problem)
    folder = cache_folder() / "fetched" / hashlib.sha256(url.encode()).hexdigest()[:32]
    content = folder / "content"
    if not verify and content.is_dir():
        return _inner(content)
    system, files = _files_at(data, url)
    wanted = json.dumps([[path, size, stamp] for path, (_, size, stamp) in files.items()])
    with clear_errors(folder):
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = lock_file(folder.with_suffix(".lock"), seconds=float("inf"), waiting=lambda _: None)
    with lock:
        if (folder / _MANIFEST).is_file() and (folder / _MANIFEST).read_text() == wanted:
            return _inner(content)
        unfinished = folder.with_suffix(".part")
        shutil.rmtree(unfinished, ignore_errors=True)  # left by a process that was killed
        try:
            with clear_errors(folder):
                (unfinished / "content").mkdir(mode=0o700, parents=True)
            _copy(data, system, files, unfinished / "content", progress)
            with clear_errors(folder):
                (unfinished / _MANIFEST).write_text(wanted)
                shutil.rmtree(folder, ignore_errors=True)
                unfinished.rename(folder)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
    return _inner(content)


def _inner(content: Path) -> Path:
    """The only folder in ``content``, as after unpacking an archive, or ``content`` itself.

    A licence or the like may lie beside a folder of images.
    """
    inside = [path for path in content.iterdir() if not path.name.startswith((".", "__"))]
    folders = [path for path in inside if path.is_dir()]
    if len(folders) != 1:
        return content
    (folder,) = folders
    beside = [path.suffix.lower() for path in inside if path != folder]
    if beside and (
        not _TEXTS.issuperset(beside)
        or folder.name.lower() in (*TRAIN_NAMES, *VAL_NAMES, *TEST_NAMES)
        or DATA[_kind_of(folder)].takes_args  # whose description may be among the texts
    ):
        return content
    return folder


def _files_at(data: str, url: str) -> tuple[Any, dict[str, _File]]:
    """The store's file system, and its files by their paths below their common folder."""
    fsspec = import_library("fsspec")
    scheme = url.partition(":")[0]
    web = scheme in ("http", "https")  # names there are quoted, and may have a query
    found: list[_File] = []
    folders: list[list[str]] = []
    try:
        for one in expanded(url):
            system, path = fsspec.url_to_fs(one)
            top = system.info(path)
            # A web server's folder is a page with links.
            whole = top["type"] == "directory" or top.get("mimetype") == "text/html"
            below = system.find(path, detail=True) if whole else {path: top}
            plain = (path.partition("?")[0] if web else path).rstrip("/")
            folders.append((plain if whole else plain.rpartition("/")[0]).split("/"))
            for full, listed in below.items():
                last = full.rpartition("/")[2]
                if whole and (not last or (web and last[0] in "?#")):
                    continue  # a store's mark of a folder, or a link that sorts a page of links
                about = listed if listed.get("size") is not None else system.info(full)
                stamp = next((str(about[key]) for key in _STAMPS if about.get(key)), "")
                found.append((full, about.get("size") or 0, stamp))
    except (ImportError, ValueError) as error:
        package = _NEEDS.get(scheme, "fsspec")
        if isinstance(error, ImportError):
            raise JobError(f"data={data}: {missing(package)}") from error
        raise DataError(f"data={data} cannot be read ({in_words(error)})") from error
    except (DataError, JobError):
        raise
    except Exception as error:  # a store's package may fail in any way
        if isinstance(error, FileNotFoundError) and error.__cause__ is None:
            raise DataError(f"data={data}: there is {_NOT_A_FILE} at {url}") from error
        raise DataError(
            f"data={data} cannot be reached ({in_words(error)}): see that the address is right and "
            "that this user may read it"
        ) from error
    if not found:
        raise DataError(f"data={data}: there is {_NOT_A_FILE} at {url}")
    alike = takewhile(lambda parts: len({*parts}) == 1, zip(*folders, strict=False))
    above = len([*alike])  # parts that all their paths begin with
    files: dict[str, _File] = {}
    for file in found:
        path = unquote(file[0].partition("?")[0]) if web else file[0]
        name = "/".join(path.split("/")[above:]).strip("/")
        if not name or ".." in name.split("/") or "\0" in name:
            raise DataError(f"data={data}: {name!r} is no name for a file here")
        if name in files and files[name] != file:
            raise DataError(f"data={data}: {files[name][0]} and {file[0]} have one name here")
        files[name] = file
    return system, files


def _copy(
    data: str,
    system: Any,
    files: dict[str, _File],
    aside: Path,
    progress: Progress | None,
) -> None:
    total = sum(size for _, size, _ in files.values())
    if total > free_bytes():
        raise DataError(
            f"data={data} has {total / 1e9:.1f} GB, and the disk of the cache "
            f"{free_bytes() / 1e9:.1f} GB left: set BATCHWRIGHT_CACHE to a folder with room"
        )
    done = 0
    for name, (full, size, _) in files.items():
        target = aside / name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.exists():
                raise FileExistsError(f"an archive beside it holds {name} too")
            system.get_file(full, str(target))
        except Exception as error:  # a store's package may fail in any way
            raise DataError(f"data={data}: {full} cannot be fetched ({in_words(error)})") from error
        if size and target.stat().st_size != size:
            raise DataError(
                f"data={data}: {full} came with {target.stat().st_size:,} of its {size:,} bytes: "
                "try again"
            )
        plain = name.endswith(".tar") and not source_of(data).reads_tar
        if _PACKED.search(name) or (plain and _holds_folders(target)):
            _unpack(data, target, aside)
        done += size
        if progress:
            progress(done, max(total, 1), "fetching the data")


def _holds_folders(path: Path) -> bool:
    """Whether a tar file is a packed folder of images, and not a WebDataset's.

    In that, a text is of a sample, and has its name; a text about all images has a name of its own.
    """
    try:
        with tarfile.open(path) as tar:
            first = list(islice((member.name for member in tar if member.isreg()), 9))
    except (tarfile.TarError, EOFError, OSError):
        return False  # reading it will raise the error
    members = Counter(sample_of(name)[0] for name in first)
    return not any(
        name.endswith(".cls")
        or (name.endswith((".json", ".txt")) and members[sample_of(name)[0]] > 1)
        for name in first
    )


def _unpack(data: str, archive: Path, target: Path) -> None:
    """Unpack an archive into the folder ``target``, and remove it.

    Members that would leave the folder, replace another file or are links are refused. Unpacking
    ends before the disk is full, as a small archive may unpack to any size.
    """
    room = free_bytes()
    try:
        for name, size, opened in _contents(archive):
            parts = [part for part in name.split("/") if part not in ("", ".")]
            if ".." in parts or not parts:
                raise ValueError(f"{name} leads out of the folder")
            room -= size
            if room < 0:
                raise DataError(
                    f"data={data}: {archive.name} unpacks to more than the disk of the cache has "
                    "left: set BATCHWRIGHT_CACHE to a folder with room"
                )
            path = target.joinpath(*parts)
            path.parent.mkdir(parents=True, exist_ok=True)
            with opened() as source, path.open("xb") as stream:
                shutil.copyfileobj(source, stream, _BLOCK)
    except DataError:
        raise
    except FileExistsError as error:
        raise DataError(
            f"data={data}: {archive.name} holds {name}, and so does another file or archive there: "
            "give each image a name of its own"
        ) from error
    except Exception as error:  # damaged archives raise many kinds of errors
        raise DataError(f"data={data}: {archive.name} is damaged ({in_words(error)})") from error
    archive.unlink()


def _contents(archive: Path) -> Iterator[tuple[str, int, Callable[[], Any]]]:
    """Name, number of bytes and a function that opens each file in an archive."""
    if archive.name.endswith(".zip"):
        with zipfile.ZipFile(archive) as packed:
            for one in packed.infolist():
                if S_ISLNK(one.external_attr >> 16):  # the mode, where Unix has packed it
                    raise ValueError(_LINK.format(one.filename))
                if not one.is_dir():
                    yield one.filename, one.file_size, partial(packed.open, one)
        return
    with tarfile.open(archive, tarinfo=CheckedTarInfo) as packed_tar:
        for member in packed_tar:
            if member.isdir():
                continue
            if not member.isreg():
                raise ValueError(_LINK.format(member.name))
            yield member.name, member.size, partial(packed_tar.extractfile, member)
        assert packed_tar.fileobj is not None  # noqa: S101 - it was opened for reading
        packed_tar.fileobj.seek(packed_tar.offset)
        refuse_trailing_data(packed_tar.fileobj)
