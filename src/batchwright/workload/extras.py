"""Libraries that only some jobs need: imported where they are used, or named with their extra."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from batchwright.errors import JobError, not_installed

EXTRAS = {
    "timm": "vision",
    "torchvision": "vision",
    "transformers": "transformers",
    "huggingface_hub": "data",
    "datasets": "data",
    "fsspec": "data",
    "lmdb": "data",
    "aiohttp": "data",
    "s3fs": "s3",
    "gcsfs": "gs",
    "adlfs": "az",
    "accelerate": "accelerate",
    "lightning": "lightning",
    "safetensors": "delivery",
    "onnx": "delivery",
    "onnxscript": "delivery",
}
"""By library, the extra of this package that installs it."""


def import_library(module: str, extra: str = "") -> Any:
    """Import a library, or a module of it.

    Args:
        module: Full name of the module.
        extra: Our extra that installs the library, where it is not the one in `EXTRAS`.

    Raises:
        JobError: The library is not installed, or cannot be imported.
    """
    name = module.partition(".")[0]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if is_installed(name):
            raise JobError(f"{name} cannot be imported ({in_words(error)})") from error
        raise JobError(missing(name, extra)) from error
    except Exception as error:  # such as versions of libraries that do not fit together
        raise JobError(
            f"{name} cannot be imported ({in_words(error)}): install a version of it that goes "
            "with the others"
        ) from error


def is_installed(name: str) -> bool:
    """Whether Python finds a library."""
    try:
        return find_spec(name) is not None
    except ValueError:  # `sys.modules` marks it as absent
        return False


def missing(name: str, extra: str = "") -> str:
    """A message that a library is missing, and how to install it."""
    return not_installed(name, extra or EXTRAS[name])


def nearest(name: str, names: Iterable[str]) -> str:
    """A suggestion to append to a message: the most similar of ``names``; empty if none is."""
    near = get_close_matches(name, list(names), n=1)
    return f"; did you mean {near[0]}" if near else ""


def some_names(names: Iterable[object], most: int = 5) -> str:
    """The first ``most`` of many names, and dots if there are more."""
    shown = [str(name) for name in names]
    return ", ".join(shown[:most]) + (", ..." if len(shown) > most else "")


def in_words(error: Exception) -> str:
    """Class and first line of the message of an exception, and of its causes, on one line."""
    line = f"{type(error).__name__}: {error}".partition("\n")[0]
    cause = error.__cause__
    return f"{line}: {in_words(cause)}" if isinstance(cause, Exception) else line


@contextmanager
def without_waiting_for_the_hub() -> Iterator[None]:
    """Inside, Hugging Face's libraries use only their cache where the Hub's name has no address.

    Without a network they would retry for half a minute, and print a line each time.
    """
    constants = import_library("huggingface_hub.constants")
    host = urlsplit(constants.ENDPOINT).hostname or ""
    settings = [constants, *filter(None, [sys.modules.get("datasets.config")])]
    before = [one.HF_HUB_OFFLINE for one in settings]
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        if not getproxies():
            for one in settings:
                one.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for one, value in zip(settings, before, strict=True):
            one.HF_HUB_OFFLINE = value
