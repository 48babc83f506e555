"""Networks that can be held, for runs that something is to happen to under way.

While a folder's file ``held`` names a path that is there, each step that is trained in that folder
lasts until the file is gone or says otherwise, and so many seconds at most. So a few epochs last
until the test has done what it wants, however quick or busy the machine is, and cost next to
nothing. Each process that is held says for how long in a file ``held-`` and its number.
"""

import os
import time
from pathlib import Path

import torch

import kept_network

_steps = 0  # of this process, since the path is there
_told = ""


def hold(folder, path, seconds=600.0, *, after=0):
    """Hold what is trained in a folder.

    Args:
        folder: Where it runs.
        path: Seen from there; nothing is held before it is there.
        seconds: For which a step is held at most.
        after: So many steps of each process are not.
    """
    coming = Path(folder, "held.part")
    coming.write_text(f"{seconds:g} {after} {path}", encoding="utf-8")
    coming.replace(Path(folder, "held"))  # who looks meanwhile finds the one or the other


def release(folder):
    """Hold nothing any longer."""
    Path(folder, "held").unlink()


def network(num_classes):
    """The smallest; tells in a file ``with-N`` that it was built in a group of N workers."""
    Path(f"with-{os.environ.get('WORLD_SIZE')}").touch()
    return _held(kept_network.network(num_classes))


def resnet(num_classes):
    """One that learns."""
    from batchwright.workload.networks import resnet8

    return _held(resnet8(num_classes))


def _held(made):
    made.register_forward_pre_hook(_wait)
    return made


def _wait(module, _inputs):
    global _steps, _told
    if not (module.training and torch.is_grad_enabled()) or _order() is None:
        return
    _steps += 1
    begun = time.monotonic()
    while (order := _order()) is not None:
        seconds, after = order
        if _steps <= int(after) or time.monotonic() - begun >= float(seconds):
            return
        if seconds != _told:
            Path(f"held-{os.getpid()}").write_text(seconds, encoding="utf-8")
            _told = seconds
        time.sleep(0.02)


def _order():
    """For how long, and after how many steps; ``None``: nothing is held."""
    try:
        seconds, after, path = Path("held").read_text(encoding="utf-8").split(" ", 2)
    except FileNotFoundError:
        return None
    return (seconds, after) if Path(path).exists() else None
