"""Libraries that only some jobs need: loaded where they are used, or named with their extra."""

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
"""Extra of ours that installs a library."""


def import_library(module: str, extra: str = "") -> Any:
    """A library, or a module of it.

    Args:
        module: Its full name.
        extra: Of ours that installs it, where it is not the one in `EXTRAS`.

    Raises:
        JobError: It is not installed, or cannot be imported.
    """
    name = module.partition(".")[0]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if is_installed(name):
            raise JobError(f"{name} cannot be imported ({in_words(error)})") from error
        raise JobError(missing(name, extra)) from error
    except Exception as error:  # such as libraries that do not go together
        raise JobError(
            f"{name} cannot be imported ({in_words(error)}): install a version of it that goes "
            "with the others"
        ) from error


def is_installed(name: str) -> bool:
    """Whether Python finds a library."""
    try:
        return find_spec(name) is not None
    except ValueError:  # it stands among the loaded modules as one that is not there
        return False


def missing(name: str, extra: str = "") -> str:
    """What installs a library, in a line."""
    return not_installed(name, extra or EXTRAS[name])


def nearest(name: str, names: Iterable[str]) -> str:
    """A suggestion to put behind a message, empty if nothing is near."""
    near = get_close_matches(name, list(names), n=1)
    return f"; did you mean {near[0]}" if near else ""


def in_words(error: Exception) -> str:
    """An exception's kind and the first line of its message, and those of what caused it."""
    said = f"{type(error).__name__}: {error}".partition("\n")[0]
    cause = error.__cause__
    return f"{said}: {in_words(cause)}" if isinstance(cause, Exception) else said


@contextmanager
def without_waiting_for_the_hub() -> Iterator[None]:
    """Inside, Hugging Face's libraries look into their cache alone where the Hub has no address.

    Without a network they would try again for half a minute, and print each time.
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
