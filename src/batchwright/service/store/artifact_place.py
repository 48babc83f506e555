"""The place of artifacts: objects in a folder, on S3, or wherever fsspec reaches.

An object is written once, under a name of its own, and never changed; the database says which
objects count. So nothing has to be renamed or locked, which some places cannot.
"""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from batchwright.errors import BatchwrightError, one_line
from batchwright.service.problems import NoRoom, NotFound, ServiceProblem, Unavailable
from batchwright.storage.files import is_folder, make_folder

PIECE = 2**18
"""Bytes that are read or written at a time."""

BLOCK = 8 * 2**20
"""Bytes that are sent to a remote place at a time, and are in memory until then."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class ArtifactPlace:
    """A folder of objects.

    Args:
        url: A local folder, or a URL that fsspec knows, such as ``s3://bucket/folder``; credentials
            come from the environment, in the variables of that system's own tools.

    Raises:
        BatchwrightError: The URL is invalid or needs a package that is not installed, or the folder
            cannot be written.
    """

    def __init__(self, url: str) -> None:
        import fsspec  # a tenth of a second: for a service that keeps artifacts
        from fsspec.implementations.local import LocalFileSystem

        shown = url.partition("?")[0]
        try:
            self._files, self._root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except ImportError as error:
            kind = url.partition(":")[0]
            ours = kind in ("s3", "gs", "az")
            hint = f'pip install "batchwright[{kind}]"' if ours else one_line(error)
            raise BatchwrightError(f"--artifacts {shown} needs another package: {hint}") from None
        except (ValueError, TypeError) as error:
            raise BatchwrightError(f"--artifacts {shown}: {one_line(error)}") from None
        self._is_local = isinstance(self._files, LocalFileSystem)
        if self._is_local and not is_folder(self._root):
            make_folder(Path(self._root))
            with suppress(OSError):  # some disks know no permissions
                Path(self._root).chmod(0o700)  # not one that was there, such as a whole disk's
        try:
            # Tried out now, as an error later would lose the first checkpoint.
            name = str(uuid.uuid4())
            with self.writing(name) as file:
                file.write(b"batchwright")
            with self.reading(name) as file:
                file.read(PIECE)
            self.remove(name)
        except ServiceProblem as problem:
            raise BatchwrightError(f"--artifacts {shown}: {problem.detail}") from None

    @contextmanager
    def writing(self, name: str) -> Iterator[Any]:
        """A binary file that becomes the object when the block ends, synced if it is local.

        If the block fails, what was written is removed, as far as the place allows.

        Raises:
            NoRoom: The place is full.
            Unavailable: The object cannot be written for another reason.
        """
        file = None
        try:
            with _errors_in_a_line("written"):
                file = self._files.open(self._at(name), "wb", block_size=BLOCK)
                if self._is_local:
                    with suppress(OSError):
                        os.fchmod(file.fileno(), 0o600)
                yield file
                file.flush()
                if self._is_local:  # a remote place has no file descriptor to sync
                    os.fsync(file.fileno())
                file.close()
        except BaseException:
            with suppress(Exception):  # the first error counts
                if file is not None:
                    file.close()
            with suppress(Exception):
                self._files.rm_file(self._at(name))
            raise

    @contextmanager
    def reading(self, name: str) -> Iterator[Any]:
        """An object as a binary file.

        Raises:
            NotFound: The object is not there any more.
            Unavailable: The object cannot be read.
        """
        with (
            _errors_in_a_line("read"),
            self._files.open(self._at(name), "rb", block_size=BLOCK) as file,
        ):
            yield file

    def remove(self, name: str) -> None:
        """Remove an object, if it is there.

        Raises:
            Unavailable: The object cannot be removed now.
        """
        with _errors_in_a_line("cleared"), suppress(FileNotFoundError):
            self._files.rm_file(self._at(name))

    def _at(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{uuid.UUID(name)}"  # a UUID leads out of no folder


@contextmanager
def _errors_in_a_line(done: str) -> Iterator[None]:
    """Inside, each exception of a place, which has its own kinds, is raised as a `ServiceProblem`.

    Args:
        done: What could not be done with the place, as a participle.
    """
    try:
        yield
    except ServiceProblem:
        raise
    except FileNotFoundError:
        raise NotFound("this file has gone from where the service keeps artifacts") from None
    except OSError as error:
        why = error.strerror or one_line(error)
        if error.errno in _FULL:
            raise NoRoom(f"the place of artifacts is full ({why}): make room there") from error
        raise Unavailable(f"the place of artifacts cannot be {done}: {why}") from error
    except Exception as error:
        raise Unavailable(f"the place of artifacts cannot be {done}: {one_line(error)}") from error
