"""A checkout that was never installed does what an installed one does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import batchwright

SCRIPT = """
from importlib import metadata

found = metadata.distribution

def distribution(name):
    if name == "batchwright":
        raise metadata.PackageNotFoundError(name)
    return found(name)

metadata.distribution = distribution
from batchwright.storage.version import VERSION
from batchwright.distributed.joining.versions import versions
from batchwright.reporting.pages.markup import document
from batchwright.service.pages.rendering import digest_of

assert VERSION in versions()["batchwright"]
assert VERSION in document("report", "title", "", "")
assert digest_of(1)
"""


@pytest.mark.slow
def test_nothing_asks_for_the_installed_package():
    words = [sys.executable, "-c", SCRIPT]
    env = {"PYTHONPATH": str(Path(batchwright.__file__).parents[1])}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert not done.returncode, done.stderr
