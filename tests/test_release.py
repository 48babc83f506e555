"""What a release is made of says the same everywhere."""

from __future__ import annotations

import fnmatch
import re
import shutil
import subprocess
import sys
import tomllib
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
import yaml
from benchmarks.harness.claims import PAPERS
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import batchwright as bw
from batchwright.cli.service_commands import PACKAGES
from batchwright.records.registries.trackers import TRACKERS
from batchwright.workload.extras import EXTRAS
from test_docs import PROJECT, ROOT, load, read

CITATION = yaml.safe_load(read("CITATION.cff"))
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
CONDA_NAMES = {"torch": "pytorch", "matplotlib": "matplotlib-base"}


def test_the_version_stands_in_one_place_and_is_that_of_the_newest_changes():
    build = tomllib.loads(read("pyproject.toml"))["tool"]["hatch"]
    assert PROJECT["dynamic"] == ["version"]
    assert build["version"]["path"] == "src/batchwright/storage/version.py"
    released = re.findall(
        r"^## ([\d.]+) \((\d{4}-\d\d-\d\d)\)$", read("CHANGELOG.md"), re.MULTILINE
    )
    assert released[0] == (bw.__version__, CITATION["date-released"])
    assert CITATION["version"] == bw.__version__


def test_the_citation_names_the_papers_with_their_authors_and_numbers():
    assert [one["title"] for one in CITATION["references"]] == [paper.title for paper in PAPERS]
    for one, paper in zip(CITATION["references"], PAPERS, strict=True):
        for author in one["authors"]:
            name = f"{author.get('given-names', '')} {author['family-names']}".strip()
            assert name in paper.source
        for number in (each["value"] for each in one.get("identifiers", ())):
            assert number.removeprefix("arXiv:") in paper.source


def test_the_recipe_wants_what_the_package_wants():
    text = read("recipe/meta.yaml")
    recipe = yaml.safe_load(re.sub(r"^\{%.*%\}$", "", text, flags=re.MULTILINE))
    assert re.search(
        re.search(r"regex_pattern='(.+?)'", text)[1], read("src/batchwright/storage/version.py")
    )
    wanted = {f"python {PROJECT['requires-python']}"}
    for line in PROJECT["dependencies"]:
        one = Requirement(line)
        limits = line.removeprefix(one.name)
        wanted.add(f"{CONDA_NAMES.get(one.name, one.name)} {limits}")
    assert set(recipe["requirements"]["run"]) == wanted
    (backend,) = tomllib.loads(read("pyproject.toml"))["build-system"]["requires"]
    assert backend.replace(">=", " >=") in recipe["requirements"]["host"]
    (entry,) = recipe["build"]["entry_points"]
    assert entry == f"batchwright = {PROJECT['scripts']['batchwright']}"
    assert recipe["about"]["summary"] == PROJECT["description"]


def test_the_workflow_has_the_versions_of_the_matrix_and_calls_what_everybody_calls():
    matrix = load(ROOT / "tools" / "matrix")
    jobs = yaml.safe_load(read(".github/workflows/ci.yml"))["jobs"]
    asked = jobs["versions"]["strategy"]["matrix"]
    assert (tuple(asked["python"]), tuple(asked["torch"])) == (matrix.PYTHONS, matrix.TORCHES)
    assert {"run": ".ci/run"} in jobs["check"]["steps"]
    (tested,) = re.findall(
        r"on Python (3\.\d+) with `constraints.txt`", read("docs/where-it-runs.md")
    )
    assert jobs["check"]["container"]["image"] == f"python:{tested}-bookworm"


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_an_issue_template_is_a_form(path):
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    if path.stem == "config":
        assert form == {"blank_issues_enabled": True}
        return
    assert form["name"]
    assert form["description"]
    names = [field["id"] for field in form["body"]]
    assert len(names) == len(set(names))
    for field in form["body"]:
        assert field["type"] == "textarea"
        assert field["attributes"]["label"]
    assert any(field.get("validations", {}).get("required") for field in form["body"])


def test_the_training_image_starts_the_command_as_nobody_special_on_a_torch_that_is_allowed():
    lines = read("deploy/train.Dockerfile").splitlines()
    words = [line.split(" ", 1) for line in lines if re.match("[A-Z]+ ", line)]
    user = [rest for word, rest in words if word == "USER"][-1]
    assert user not in ("root", "0")
    assert ["ENTRYPOINT", '["batchwright"]'] in words
    (tag,) = [rest.removeprefix("PYTORCH=") for word, rest in words if word == "ARG"]
    (torch,) = [one for one in map(Requirement, PROJECT["dependencies"]) if one.name == "torch"]
    assert torch.specifier.contains(Version(tag.partition("-")[0]))
    (extras,) = re.findall(r"/source\[(.+?)\]", read("deploy/train.Dockerfile"))
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])


BRINGS = {
    "aiohttp": "fsspec",
    "huggingface-hub": "datasets",
    "multipart": "python-multipart",
    "starlette": "fastapi",
}  # what is imported, and what of an extra brings it


def test_messages_name_extras_that_bring_what_is_missing():
    extras = {
        name: {canonicalize_name(Requirement(one).name) for one in wanted}
        for name, wanted in PROJECT["optional-dependencies"].items()
    }
    named = [*EXTRAS.items(), *((one, "serve") for one in PACKAGES)]
    named += [(TRACKERS[one].package, TRACKERS[one].extra) for one in TRACKERS.own]
    for module, extra in named:
        package = canonicalize_name(module)
        brought = extras[extra] if extra else {package}
        assert BRINGS.get(package, package) in brought, module
    for path in (ROOT / "src").rglob("*.py"):
        told = re.findall(r"pip install \W*(\w*)\[(\w+)\]", path.read_text(encoding="utf-8"))
        for name, extra in told:
            assert (name, extra in extras) == ("batchwright", True), path


WITHOUT = """
import os, runpy, sys
sys.modules.update(dict.fromkeys({missing}))
import batchwright
for name in batchwright.__all__:
    assert name.startswith("For") or getattr(batchwright, name)
for words in sys.argv[1:]:  # each in a process of its own, which imports nothing of this anew
    if os.fork():
        if os.wait()[1]:
            sys.exit(1)
        continue
    sys.argv = ["batchwright", *words.split()]
    runpy.run_module("batchwright", run_name="__main__", alter_sys=True)
    sys.exit()
"""


def required(name: str) -> set[str]:
    """A distribution and all that it requires here, without extras."""
    found, ahead = set(), [name]
    while ahead:
        one = canonicalize_name(ahead.pop())
        if one not in found:
            found.add(one)
            with suppress(PackageNotFoundError):
                needs = map(Requirement, requires(one) or ())
                ahead += [r.name for r in needs if not r.marker or r.marker.evaluate({"extra": ""})]
    return found


@pytest.mark.slow
def test_the_package_trains_without_any_extra(tmp_path):
    there = {canonicalize_name(Requirement(one).name) for one in PROJECT["dependencies"]}
    kept = set().union(*map(required, there), {"batchwright"})
    missing = [
        module
        for module, owners in packages_distributions().items()
        if not kept & set(map(canonicalize_name, owners)) and not module.startswith("_")
    ]
    assert {"pytest", "fastapi"} <= set(missing)
    shutil.copy(Path(__file__).parent / "kept_network.py", tmp_path)
    words = "run epochs=1 workers=1 launch=in-process network=kept_network:network "
    words += "precision=float32 probe.budget=0.3 probe.learning=0 --out run"
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(missing=missing), "--help", words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "batchwright" in done.stdout
    assert (tmp_path / "run" / "report.html").exists()


def test_the_source_distribution_holds_all_that_the_repository_holds():
    if not (ROOT / ".git").exists():
        pytest.skip("needs a clone, to ask git what there is")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],  # noqa: S607
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    build = tomllib.loads(read("pyproject.toml"))["tool"]["hatch"]["build"]
    kept = [*build["targets"]["sdist"]["include"], "pyproject.toml", ".gitignore"]
    for name in {path.partition("/")[0] for path in listed}:
        assert any(fnmatch.fnmatch(name, pattern) for pattern in kept), name
