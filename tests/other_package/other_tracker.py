"""A tracker of another package: a file of lines, written at each flush."""

import json
from pathlib import Path


class Written:
    def __init__(self, path, run):
        self.path, self.waiting = path, []
        if run.after < 0:
            self.waiting.append({"facts": run.facts})

    def log(self, step, values):
        self.waiting.append({"step": step, **values})

    def flush(self):
        with self.path.open("a") as file:
            file.writelines(json.dumps(one) + "\n" for one in self.waiting)
        self.waiting = []

    def close(self, outcome):
        self.waiting.append({"outcome": outcome})
        self.flush()


def open_tracker(place, run):
    return Written(Path(place), run)
