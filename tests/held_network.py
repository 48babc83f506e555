"""A small network that can be held back, for runs that something is to happen to under way.

Where the folder has a file ``held`` with a path and seconds, each step of training takes so many
seconds longer once that path is there. So a few epochs last until the test has done what it wants,
however busy the machine is, and cost next to nothing. Each process that is held says for how long
in a file ``held-`` and its number.
"""

import os
import time
from contextlib import suppress
from pathlib import Path

import torch

import kept_network


def network(num_classes):
    """Tells in a file ``with-N`` that it was built in a group of N workers."""
    Path(f"with-{os.environ.get('WORLD_SIZE')}").touch()
    made = kept_network.network(num_classes)
    made.register_forward_pre_hook(_wait)
    return made


def _wait(module, _inputs):
    if not (module.training and torch.is_grad_enabled()):
        return
    with suppress(FileNotFoundError):  # it is not held, or no longer
        path, _, seconds = Path("held").read_text(encoding="utf-8").partition(" ")
        if path and Path(path).exists():
            Path(f"held-{os.getpid()}").write_text(seconds, encoding="utf-8")
            time.sleep(float(seconds))
