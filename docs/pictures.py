"""Make the pictures of docs/tutorials and run docs/first_run.ipynb: ``python docs/pictures.py``.

Each picture shows a real run, mostly of the commands in the tutorial. The first run is shown by the
service's demo run (`benchmarks.tools.demo_run` made it on a quiet machine), because beside other
programs epochs take longer than a plan can know. Names of parts as arguments make those parts only.

It takes some five minutes, and needs ``pip install -e ".[test,docs]"`` and Chromium.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

import batchwright as bw
from batchwright.records import Profile, RunSummary
from batchwright.service.pages.demo import DEMO, demo, load_demo

DOCS = Path(__file__).resolve().parent
ROOT, PICTURES, NOTEBOOK = DOCS.parent, DOCS / "pictures", DOCS / "first_run.ipynb"
sys.path.insert(0, str(ROOT / "tests"))


from browsers import browsing, serving  # noqa: E402

COLOURS, WIDTH = 64, 1400  # most colours and pixels: pictures are text and lines


def keep(name: str, picture: Path | bytes) -> None:
    """Write docs/pictures/NAME.png, with few colours."""
    image = Image.open(picture if isinstance(picture, Path) else io.BytesIO(picture))
    image = image.convert("RGB")
    image.thumbnail((WIDTH, image.height))
    few = image.quantize(COLOURS, dither=Image.Dither.NONE)
    few.save(PICTURES / f"{name}.png", optimize=True)
    print(f"{name}.png: {(PICTURES / f'{name}.png').stat().st_size / 1024:.0f} KiB", flush=True)


def commands(tutorial: str) -> list[str]:
    """The lines of a tutorial's shell blocks."""
    text = (DOCS / "tutorials" / f"{tutorial}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines() if line]


def run(command: str, folder: Path) -> None:
    """Run a line of a tutorial."""
    print("+", command, flush=True)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    words = ["bash", "-o", "pipefail", "-c", command]
    subprocess.run(words, cwd=folder, env={**os.environ, "PATH": path}, check=True)


# ---------------------------------------------------------------------------------- one a tutorial


def first_run(folder: Path) -> None:
    """Pictures of the demo run, which stands for the reader's first run."""
    told = demo()
    summary = RunSummary.model_validate(told["end"]["summary"])
    profile = Profile.model_validate(told["introduction"]["profile"])
    page = bw.report(summary.model_copy(update={"profile": profile}), out=folder)
    for name in ("plan", "learning"):
        keep(f"first-run-{name}", folder / "figures" / f"{name}.png")
    keep("first-run-seconds", folder / "figures" / "epoch_seconds.png")
    with browsing(viewport={"width": 900, "height": 700}) as browser:
        browser.goto(Path(page).resolve().as_uri())
        keep("first-run-report", browser.screenshot())


def uneven_workers(folder: Path) -> None:
    """Pictures of the run with a simulated clock, which other programs do not disturb."""
    *_, disturbed = commands("uneven-workers")
    run(disturbed, folder)
    keep("uneven-workers", folder / "runs/disturbed/figures/workers.png")
    keep("uneven-time", folder / "runs/disturbed/figures/time.png")


def large_batch(folder: Path) -> None:
    """Pictures of the tutorial's schedule, and of its sweep with more epochs and seeds."""
    *_, schedule, sweep = commands("large-batch")
    run(schedule, folder)
    keep("large-batch-schedule", folder / "schedule.png")
    run(sweep.replace("epochs=2", "epochs=8").replace("--seeds 1", "--seeds 3"), folder)
    keep("large-batch-sweep", folder / "runs/sweep/figures/curves_optimizer.png")


def own_loop(folder: Path) -> None:
    """A picture of the example program, run as its docstring says, with a run folder."""
    text = (ROOT / "examples" / "classify.py").read_text(encoding="utf-8")
    text = text.replace("plan=plan, loaders=0", 'plan=plan, loaders=0, run_folder="runs/a"')
    (folder / "classify.py").write_text(text, encoding="utf-8")
    for command in [*commands("own-loop")[1:], "batchwright report runs/a"]:
        run(command, folder)
    keep("own-loop-learning", folder / "runs/a/figures/learning.png")


def cluster(folder: Path) -> None:
    """Pictures of the commands that need no other machine, with the demo run's profile."""
    profile = Profile.model_validate(demo()["introduction"]["profile"])
    profile.save(folder / "profile.json")
    for command in commands("cluster")[1:4]:
        run(command, folder)
    keep("cluster-simulated", folder / "simulated.png")
    keep("cluster-rounds", folder / "runs/hybrid/figures/rounds.png")


def service(folder: Path) -> None:
    """Pictures of pages of a service with the demo run and its profile."""
    look = {"viewport": {"width": 1000, "height": 1100}}
    with serving(f"sqlite:///{folder}/service.sqlite") as server, browsing(**look) as browser:
        load_demo(server.store)
        profile = Profile.model_validate(demo()["introduction"]["profile"])
        kept = server.store.profiles.add("digits", profile)
        browser.goto(f"{server.address}/sign-in?link={server.store.sign_in.link(['admin'])}")
        browser.get_by_role("button", name="Sign in").click()
        browser.get_by_role("heading", name="Runs").wait_for()
        pages = {"run": f"runs/{DEMO}", "planner": f"planner?profile={kept}", "jobs": "jobs"}
        for name, path in pages.items():
            browser.goto(f"{server.address}/{path}")
            keep(f"service-{name}", browser.screenshot())


def notebook(folder: Path) -> None:
    """Run docs/first_run.ipynb and keep its outputs."""
    import nbformat  # of .[docs], which pictures can do without
    from nbclient import NotebookClient

    told: Any = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(told, timeout=600, resources={"metadata": {"path": str(folder)}}).execute()
    for cell in told.cells:
        cell.metadata.pop("execution", None)  # times of day
    told.metadata["language_info"] = {"name": "python"}
    nbformat.write(told, NOTEBOOK)


PARTS = (first_run, uneven_workers, large_batch, own_loop, cluster, service, notebook)


def main() -> None:
    """Make all parts, or those that the command line names."""
    PICTURES.mkdir(exist_ok=True)
    for part in PARTS:
        if part.__name__ in (sys.argv[1:] or [part.__name__]):
            folder = Path(tempfile.mkdtemp(prefix="pictures-"))
            part(folder)
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
