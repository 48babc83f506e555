"""Where artifacts lie: objects in a folder, on S3, or wherever fsspec reaches.

An object is written once, under a name of its own, and never changed; which of them count, the
database says. So nothing has to be renamed or locked, which not every place can.
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
from batchwright.storage.files import make_folder

PIECE = 2**18
"""Bytes that are read or written at a time."""

BLOCK = 8 * 2**20
"""Bytes that a remote place is sent at a time, and that are in memory for that."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class ArtifactPlace:
    """A folder of objects.

    Args:
        url: A local folder, or what fsspec knows, such as ``s3://bucket/folder``; credentials come
            from the environment, as that system's own tools have them.

    Raises:
        BatchwrightError: It is no such URL, needs a package that is not there, or cannot be
            written.
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
        if self._is_local:
            make_folder(Path(self._root))
            with suppress(OSError):  # not ours to change, but ours to use
                Path(self._root).chmod(0o700)
        try:
            # Better tried now than when the first checkpoint comes.
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
        """A binary file that becomes the object when the block ends, safely on its disk.

        Where the block fails, so does the object: nothing of it stays, as far as can be seen to.

        Raises:
            NoRoom: The place is full.
            Unavailable: It cannot be written otherwise.
        """
        file = None
        try:
            with _telling("written"):
                file = self._files.open(self._at(name), "wb", block_size=BLOCK)
                yield file
                file.flush()
                if self._is_local:  # a remote place has no file descriptor to sync
                    os.fsync(file.fileno())
                file.close()
        except BaseException:
            with suppress(Exception):  # what matters is told already
                if file is not None:
                    file.close()
            with suppress(Exception):
                self._files.rm_file(self._at(name))
            raise

    @contextmanager
    def reading(self, name: str) -> Iterator[Any]:
        """The object as a binary file.

        Raises:
            NotFound: It is not there any more.
            Unavailable: It cannot be read.
        """
        with _telling("read"), self._files.open(self._at(name), "rb", block_size=BLOCK) as file:
            yield file

    def remove(self, name: str) -> None:
        """Remove an object, if it is there.

        Raises:
            Unavailable: It cannot be removed now.
        """
        with _telling("cleared"), suppress(FileNotFoundError):
            self._files.rm_file(self._at(name))

    def _at(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{uuid.UUID(name)}"  # one of ours, and no path


@contextmanager
def _telling(done: str) -> Iterator[None]:
    """Whatever a place raises becomes one line; each has exceptions of its own."""
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
