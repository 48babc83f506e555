"""Settings of glibc's memory allocator in processes that train.

**Thresholds.** By default the allocator hands large freed blocks back to the kernel, and each
training step faults them in again. With higher mmap and trim thresholds it keeps them. A mmap
threshold of 32 MiB, where glibc's own adaptation ends, is too low for large batches (docs/log.md,
the allocator was half of the large-batch mystery).

**Pieces.** PyTorch aligns tensors. For that, glibc before 2.38 allocates 96 bytes more and frees
the rest as a small piece, which it does not join with its neighbours: after a tensor is freed,
another of the same size does not fit into its place. If pieces are joined at once, the heap grows
less and steps are quicker (docs/decisions/0008 has figures). This setting works only if it is made
before a process starts, so not in processes that the user starts. It is not made on a machine with
a GPU: the tensors are on the GPU, and the host's part of a step takes longer with it.

Nothing is changed where the user has set up the allocator, or preloads another one.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from batchwright.records.profile import JOINED

_TUNABLES = "GLIBC_TUNABLES"
_JOINING = "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"

_GIB = 2**30

# Parameters of glibc's mallopt, from <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4


def joining_pieces(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment variables for a process to be started, with a setting that joins pieces."""
    others, user = environment.get(_TUNABLES, ""), _preloaded(environment) or _set_by(environment)
    if sys.platform != "linux" or user or _JOINING in others:
        return dict(environment)
    return {**environment, _TUNABLES: ":".join(filter(None, [others, _JOINING]))}


def set_up() -> str:
    """Raise the thresholds in this process.

    Returns:
        The state of the allocator, in words; they end in `JOINED` where it joins pieces.
    """
    if other := _preloaded(os.environ):
        return f"{other} preloaded, left as it is"
    try:
        version = os.confstr("CS_GNU_LIBC_VERSION")
    except (AttributeError, ValueError):  # no confstr on Windows; no such name without glibc
        return "not glibc, left as it is"
    if variable := _set_by(os.environ):
        return f"{version}, as set by {variable}"
    mallopt = ctypes.CDLL(None).mallopt
    # Older versions refuse a mmap threshold above 32 MiB; to forbid mapped blocks does the same.
    kept = mallopt(_M_MMAP_THRESHOLD, _GIB) or mallopt(_M_MMAP_MAX, 0)
    if not (kept and mallopt(_M_TRIM_THRESHOLD, 2 * _GIB - 1)):
        return f"{version}, thresholds refused"
    joined = JOINED if _JOINING in os.environ.get(_TUNABLES, "") else ""
    return f"{version}, mmap and trim thresholds raised{joined}"


def _preloaded(environment: Mapping[str, str]) -> str:
    """File name of a preloaded allocator; empty: none."""
    paths = environment.get("LD_PRELOAD", "").replace(":", " ").split()
    return next((Path(one).name for one in paths if "malloc" in Path(one).name), "")


def _set_by(environment: Mapping[str, str]) -> str:
    """Name of the variable by which the user has set up glibc's allocator; empty: none."""
    for variable in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_"):
        if variable in environment:
            return variable
    others = environment.get(_TUNABLES, "").replace(_JOINING, "")
    return _TUNABLES if "glibc.malloc." in others else ""
