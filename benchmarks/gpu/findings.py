"""The findings of `benchmarks.gpu`: one file of lines, to which every step adds as it runs."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

NAME = "found.jsonl"

# How the step `tests` and pytest, in a process of its own, understand each other.
TESTS, BEGAN, FAILED = "tests", "began", "failed: "
FOLDER, COMMIT = "BENCHMARKS_GPU_FOLDER", "BENCHMARKS_GPU_COMMIT"
SECONDS = 120  # most time of a test
AGAIN = 75  # exit code: pytest is to be started again


@cache
def machine() -> str:
    """UUIDs of this machine's GPUs, which tell it from others; empty without NVIDIA's driver."""
    words = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    try:
        told = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return " ".join(told.stdout.split())


@dataclass(frozen=True)
class Findings:
    """Lines of JSON in a folder; lines of other commits are kept, but not read.

    Attributes:
        folder: Folder of the file.
        commit: The commit that is measured.
    """

    folder: Path
    commit: str

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The lines of this commit, oldest first; a line that was cut off is left out."""
        found = []
        if (self.folder / NAME).exists():
            for line in (self.folder / NAME).read_text(encoding="utf-8").splitlines():
                try:
                    one = json.loads(line)
                except json.JSONDecodeError:
                    continue
                if one["commit"] == self.commit:
                    found.append(one)
        return found

    def of(self, step: str) -> dict[str, Any]:
        """The findings of a step: by name, the newest value."""
        return {one["what"]: one["value"] for one in self.lines if one["step"] == step}

    def is_of_this_machine(self, step: str, what: str) -> bool:
        """Whether the newest value of a finding was found on this machine's GPUs."""
        found = [one for one in self.lines if (one["step"], one["what"]) == (step, what)]
        return bool(found) and found[-1].get("machine", "") == machine()

    def add(self, step: str, what: str, value: Any) -> None:
        """Append a finding."""
        path = self.folder / NAME
        cut = path.exists() and not path.read_bytes().endswith(b"\n")
        told = {"step": step, "what": what, "value": value, "commit": self.commit}
        told |= {"time": round(time.time()), "machine": machine()}
        with path.open("a", encoding="utf-8") as file:
            file.write("\n" * cut + json.dumps(told) + "\n")

    def go_on_from(self, earlier: Path) -> None:
        """Copy the files of another folder, unless this one has findings already."""
        if not (self.folder / NAME).exists() and (earlier / NAME).exists():
            for path in earlier.iterdir():
                if path.is_file():
                    shutil.copyfile(path, self.folder / path.name)
