"""Versions of the packages that must be the same on all hosts.

Version numbers are not enough. A checkout's changes with a release only, whatever is changed
between two; and builds of one PyTorch for several CUDA versions, or nightly ones, may share a
number too.
"""

from __future__ import annotations

import sys
from functools import cache
from hashlib import sha256
from pathlib import Path

import torch

from batchwright.storage.version import VERSION

_ROOT = Path(__file__).parents[2]


@cache
def versions() -> dict[str, str]:
    """Version by package, with whatever else distinguishes code of the same version."""
    gpus = {"CUDA": torch.version.cuda, "HIP": torch.version.hip}
    built_for = [f"{name} {number}" for name, number in gpus.items() if number]
    commit = (torch.version.git_version or "unknown")[:8]
    # Of this package's modules as they are on the disk, whatever their folder is called.
    digest = sha256()
    for path in sorted(_ROOT.rglob("*.py")):
        code = path.read_bytes()
        digest.update(f"{path.relative_to(_ROOT).as_posix()} {len(code)}\n".encode() + code)
    return {
        "batchwright": f"{VERSION} (source {digest.hexdigest()[:8]})",
        "torch": f"{torch.__version__} (commit {commit}, {', '.join(built_for or ['no GPUs'])})",
        "Python": ".".join(map(str, sys.version_info[:2])),
    }
