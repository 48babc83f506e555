"""The site: every page and every public name is on it, and it builds without a warning."""

from __future__ import annotations

import fnmatch
import json
import re
import subprocess
import sys

import pytest

import batchwright as bw
from test_docs import DOCS, PAGES, ROOT, read, shell_lines

MISSING = "pip install -c constraints.txt '.[docs]'"
NOTEBOOK = DOCS / "first_run.ipynb"
BLOCK = re.DOTALL | re.MULTILINE


@pytest.mark.parametrize("name", bw.__all__)
def test_every_public_name_has_a_docstring_and_an_entry_in_the_reference(name):
    entries = re.findall(
        r"^\.\. auto\w+:: batchwright\.(\w+)$", read("docs/reference.md"), re.MULTILINE
    )
    assert entries.count(name) == 1
    assert getattr(bw, name).__doc__


def test_every_page_is_in_one_table_of_contents():
    names = [str(page.relative_to(ROOT)) for page in PAGES]
    entry, listed = r"^(?:[^:\n].* <)?([^:\s<>]+)>?$", []
    for page in PAGES:
        for block in re.findall(r"^```\{toctree\}\n(.*?)^```$", page.read_text("utf-8"), BLOCK):
            for one in re.findall(entry, block, re.MULTILINE):
                there = (page.parent / f"{one}.md").resolve().relative_to(ROOT)
                listed += fnmatch.filter(names, str(there))
    assert len(listed) == len(set(listed))
    assert set(names) - set(listed) == {"docs/index.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_line_of_a_page_is_a_comment_to_the_site(page):
    """MyST leaves out a line that begins with a percent sign."""
    assert not re.findall("^%.*", page.read_text(encoding="utf-8"), re.MULTILINE)


def test_commands_of_the_example_of_ones_own_loop_are_those_of_its_head():
    head = read("examples/classify.py").split('"""')[1].replace("\\\n", "")
    known = {" ".join(line.split()) for line in head.splitlines() if line.startswith("    ")}
    shown = shell_lines(read("docs/tutorials/own-loop.md"))
    assert len(shown) == 3
    assert set(shown) <= known


def test_every_picture_of_the_tutorials_is_small_and_used():
    pictures = {path.name for path in (DOCS / "pictures").glob("*")}
    text = "".join(
        read(f"docs/tutorials/{path.name}") for path in (DOCS / "tutorials").glob("*.md")
    )
    assert pictures == set(re.findall(r"pictures/([\w-]+\.png)\)", text))
    assert all((DOCS / "pictures" / name).stat().st_size < 100_000 for name in pictures)


def test_the_notebook_shows_a_table_of_profile_plan_and_run_and_names_no_place_of_its_machine():
    text = NOTEBOOK.read_text(encoding="utf-8")
    cells = json.loads(text)["cells"]
    shown = [
        out["data"]["text/html"]
        for cell in cells
        for out in cell.get("outputs", ())
        if "text/html" in out.get("data", {})
    ]
    captions = re.findall("<caption[^>]*>(.*?)</caption>", "".join("".join(one) for one in shown))
    assert {"Profile", "Plan", "RunSummary"} <= set(captions)
    assert not any(
        out["output_type"] == "error" for cell in cells for out in cell.get("outputs", ())
    )
    assert not re.search(r"/(tmp|home|root|opt|mnt)/", text)


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    nbformat = pytest.importorskip("nbformat", reason=MISSING)
    nbclient = pytest.importorskip("nbclient", reason=MISSING)
    pytest.importorskip("ipykernel", reason=MISSING)
    brief = NOTEBOOK.read_text(encoding="utf-8").replace('\\"budget\\": 5', '\\"budget\\": 1')
    told = nbformat.reads(brief.replace("epochs=10", "epochs=2"), as_version=4)
    nbclient.NotebookClient(
        told, timeout=590, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    assert (tmp_path / "runs" / "notebook" / "report.html").exists()


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    for package in ("sphinx", "furo", "myst_nb"):
        pytest.importorskip(package, reason=MISSING)
    words = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-n"]
    done = subprocess.run(
        [*words, "-d", str(tmp_path / "trees"), "-c", "docs", ".", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    pages = {
        str(path.relative_to(tmp_path / "site")) for path in (tmp_path / "site").rglob("*.html")
    }
    made = {f"{path.relative_to(ROOT).with_suffix('')}.html" for path in [*PAGES, NOTEBOOK]}
    assert made <= pages
    reference = (tmp_path / "site" / "docs" / "reference.html").read_text(encoding="utf-8")
    assert all(f'id="batchwright.{name}"' in reference for name in bw.__all__)
    elsewhere = re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="https?://[^"]*"', reference)
    assert not elsewhere
