"""What the documents say is so: verbs, options and job keys are there, and what is shown runs."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import json
import os
import pickle
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from pkgutil import resolve_name
from textwrap import dedent

import numpy as np
import pytest
import torch
import typer
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from PIL import Image
from torch import nn
from torch.distributed.run import get_args_parser
from torch.utils.data import DataLoader, TensorDataset

import batchwright as bw
import forked
from batchwright.cli.commands import app
from batchwright.planning.planner import plan_without_profile
from batchwright.planning.simulation import searched
from batchwright.records import Job
from batchwright.records.base import Document
from batchwright.records.documents import change_job, load_job, write_record
from batchwright.records.job import other_keys_come
from batchwright.records.text.job_keys import job_keys
from batchwright.workflows import match_rounds
from samples import make_data, make_network

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]
VERBS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def fences(text: str) -> list[tuple[str, str]]:
    """The label and the text of each block of a page, in order."""
    found = re.findall(r"^( *)```([^\n]*)\n(.*?)^\1```$", text, re.DOTALL | re.MULTILINE)
    return [(label, dedent(block)) for _, label, block in found]


def blocks(text: str, language: str) -> list[str]:
    return [block for label, block in fences(text) if label == language]


def shell_lines(text: str) -> list[str]:
    """Commands of a page, each in a line and without its comment."""
    lines = "".join(blocks(text, "sh")).replace("\\\n", "").splitlines()
    lines = [" ".join(re.sub(r"\s+# .*", "", line).split()) for line in lines]
    return [line for line in lines if line]


def load(path: Path):
    spec = spec_from_file_location(path.stem, path, loader=SourceFileLoader(path.stem, str(path)))
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


JOB_PAGE = load(DOCS / "job_page.py")


def run(command: str, folder: Path) -> str:
    """Run a line of a document; returns what it printed."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],  # noqa: S607 - the documents speak to a shell
        cwd=folder,
        env={
            **os.environ,
            "PATH": path,
            "PYTHONPATH": forked.with_tests(os.environ),
            "OMP_NUM_THREADS": "1",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert not done.returncode, told(command, done)
    return done.stderr + done.stdout


def told(command: str, done: subprocess.CompletedProcess[str]) -> str:
    """How a command ended, for a test that fails; below 0 is the signal that ended it."""
    ends = f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return f"{command} ended with code {done.returncode}\n{ends}"


# ------------------------------------------------------------------------------- nothing is missing


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_is_documented_with_all_its_options(verb):
    sections = re.split(r"^## ", read("docs/verbs.md"), flags=re.MULTILINE)
    (section,) = [text for text in sections if text.startswith(f"{verb}\n")]
    for parameter in VERBS[verb].params:
        for option in parameter.opts:
            if option.startswith("--") and option != "--help":
                assert f"- `{option}" in section, option
                assert option in blocks(section, "text")[0]


def test_every_documented_option_exists():
    known = {option for verb in VERBS.values() for p in verb.params for option in p.opts}
    named = set(re.findall(r"- `(--[a-z-]+)", read("docs/verbs.md")))
    assert named <= known


def test_every_environment_variable_that_a_page_names_has_a_row():
    pages = [page for page in DOCS.glob("*.md") if page.stem != "log"]
    text = README + "".join(page.read_text(encoding="utf-8") for page in pages)
    rows = re.findall(r"^\| (`[A-Z_]+`.*?) \|", read("docs/verbs.md"), re.MULTILINE)
    named = set(re.findall(r"BATCHWRIGHT_[A-Z_]+", text))
    assert len(named) >= 10
    assert named <= set(re.findall(r"\w+", " ".join(rows)))


@pytest.mark.parametrize("key", job_keys(Job))
def test_every_job_key_has_a_row_and_an_example_that_is_accepted(key):
    assert f"\n| `{key}` |" in read("docs/job.md")
    with other_keys_come():  # such as a price
        job = load_job(None, [f"{key}={JOB_PAGE.EXAMPLES[key]}"])
    assert isinstance(job, Job)


def test_the_page_of_job_keys_is_in_step_with_the_record():
    assert read("docs/job.md") == JOB_PAGE.page(), "run python docs/job_page.py"
    told = read("docs/simulate.md")
    assert told == JOB_PAGE.simulate_page(told), "run python docs/job_page.py"
    for table in (JOB_PAGE.SECTIONS, JOB_PAGE.UNITS, JOB_PAGE.EXAMPLES):
        assert set(table) <= set(job_keys(Job))


def test_pre_commit_checks_the_pages_of_keys_when_what_they_are_written_from_changes():
    hooks = yaml.safe_load(read(".pre-commit-config.yaml"))["repos"][0]["hooks"]
    pattern = next(one["files"] for one in hooks if one["id"] == "job-page")
    sources = []
    for node in ast.walk(ast.parse(read("docs/job_page.py"))):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("batchwright."):
            module = f"src/{node.module}".replace(".", "/")
            sources.append(f"{module}/__init__.py" if (ROOT / module).is_dir() else f"{module}.py")
    assert sources
    for name in (*sources, "docs/job_page.py", "docs/job.md", "docs/simulate.md"):
        assert re.search(pattern, name), name


def test_tables_of_figures_are_in_step_with_the_newest_results():
    table = load(ROOT / "benchmarks" / "harness" / "tables.py")
    for name, make in table.DOCUMENTS.items():
        assert table.filled(read(name), make()) == read(name), "python -m benchmarks.harness.tables"


def test_every_figure_of_the_newest_reports_is_in_the_tables():
    table = load(ROOT / "benchmarks" / "harness" / "tables.py")
    of_papers = {name for paper in table.PAPERS for name in paper.benchmarks}
    measured, papers = read("docs/measured.md"), read("docs/papers.md")
    for name in table.ORDER:
        report, _ = table.newest(name) or (None, None)
        declared = {one.name: one for one in table.declared(name).figures}
        for figure in table.of_its_own(report) if report else ():
            value = f"| {table.with_spread(figure, declared.get(figure['name']))} |"
            assert value in measured, (name, figure["name"])
            if name in of_papers:
                row = rf"^\| `{re.escape(figure['name'])}`.* {re.escape(value)}"
                assert re.search(row, papers, re.MULTILINE), (name, figure["name"])


def test_goals_in_the_newest_reports_are_those_that_are_declared():
    table = load(ROOT / "benchmarks" / "harness" / "tables.py")
    for name in table.ORDER:
        report, _ = table.newest(name) or (None, None)
        declared = {one.name: one for one in table.declared(name).figures if one.has_goal}
        for figure in table.of_its_own(report) if report else ():
            if (one := declared.get(figure["name"])) and figure["goal"] is not None:
                near = one.near and one.near[0]
                goals = (one.at_least, one.at_most, one.above, near)
                assert any(goal == pytest.approx(figure["goal"], rel=1e-5) for goal in goals), one


def test_every_claim_is_about_figures_that_are_declared_and_says_how_to_measure_it():
    table = load(ROOT / "benchmarks" / "harness" / "tables.py")
    for paper in table.PAPERS:
        assert set(paper.benchmarks) <= set(table.SCALES) <= set(table.ORDER)
        for claim in paper.claims:
            assert bool(claim.command) is not bool(claim.results), claim.words
            first, *words = claim.command.split() or [""]
            if first == "batchwright":
                before_grid = words[1 : words.index("--grid") if "--grid" in words else None]
                assert words[0] in VERBS
                assert load_job(None, before_grid)
            for word in words:
                assert not word.startswith("tests/") or (ROOT / word).exists(), claim.words
                assert not word.startswith("benchmarks.") or importlib.util.find_spec(word)
            sides = [one for one in claim.over or () if isinstance(one, str)]
            assert set(sides) <= {*claim.results.values(), table.EACH}, claim.words
            for one in claim.results.values():
                name, _, figure = one.partition(".")
                assert table.declared(name)[figure]


def test_a_claim_holds_where_goals_are_met_or_spreads_lie_apart():
    table = load(ROOT / "benchmarks" / "harness" / "tables.py")
    figures = {
        "a.low": {"low": 1.0, "high": 2.0, "judged": "yes"},
        "a.high": {"low": 3.0, "high": 4.0, "judged": "no"},
        "a.wide": {"low": 1.5, "high": 3.5, "judged": ""},
        "a.open": {"low": 1.5, "high": 3.5, "judged": "undecided"},
    }

    def verdict(*names, over=None, told=""):
        results = {name: f"a.{name}" for name in names}
        return table.verdict(table.Claim("", results, over=over, outcome=told), figures)

    assert [verdict("low"), verdict("high"), verdict("low", "high")] == ["yes", "no", "partly"]
    assert [verdict("open"), verdict("open", "low")] == ["not shown", "partly"]
    assert verdict("low", "high", over=("a.high", "a.low")) == "yes"
    assert verdict("low", "high", over=("a.low", "a.high")) == "no"
    assert verdict("wide", "high", over=("a.wide", "a.high")) == "not shown"
    assert verdict("low", over=(0.5, "a.low")) == "no"
    assert verdict("low", "high", over=(5.0, table.EACH)) == "yes"
    assert verdict("low", "high", over=(table.EACH, 2.5)) == "partly"
    assert verdict("high", "wide", over=(table.EACH, 2.5)) == "partly"
    assert verdict("low", "wide", over=(table.EACH, 2.5)) == "no"
    assert verdict("wide", "open", over=(table.EACH, 2.5)) == "not shown"
    assert [verdict("missing"), verdict(), verdict(told="exact")] == ["not run", "not run", "yes"]


def test_a_report_names_the_commits_of_its_runs_where_they_are_others():
    table = load(ROOT / "benchmarks" / "harness" / "tables.py")
    report = {"environment": {"commit": "b"}, "date": "2026-01-02", "measurements": {}}
    assert table.when(report) == "2026-01-02, b"
    report["measurements"] = {table.COMMITS: {"b": 2}}
    assert table.when(report) == "2026-01-02, b"
    report["measurements"] = {table.COMMITS: {"a": 1, "b": 2}}
    assert table.when(report) == "2026-01-02, b (runs of a, b)"
    assert table.when(report, brief=True) == "2026-01-02, b (runs of 2 commits)"
    told = f"commit {table.commits(table.newest('gradient_scaling_long')[0])}."
    assert "f3629d43" in told
    assert told in read("docs/measured.md")


def test_every_figure_of_the_readme_is_one_of_a_benchmark_and_each_benchmark_has_its_table():
    table = load(ROOT / "benchmarks" / "harness" / "tables.py")
    for name, figure, _ in table.HEADLINES:
        assert table.declared(name)[figure].words
    modules = (ROOT / "benchmarks").glob("*/*.py")
    declaring = {one.stem for one in modules if "\nBENCHMARK = " in one.read_text()}
    assert declaring == set(table.ORDER)
    assert all(table.declared(name).name == name for name in declaring)


def test_every_public_name_is_in_the_documents():
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    for name in bw.__all__:
        if not re.search(rf"\bbw\.{name}\b", text):
            one = getattr(bw, name)  # of all names, those of other trainers would take seconds
            assert inspect.isclass(one), name
            assert issubclass(one, Document), name  # which verbs return


def test_every_reason_of_a_plan_has_a_row_with_the_keys_that_change_it():
    rows = re.findall(r"^\| ([A-Za-z ,-]+) \|", read("docs/troubleshooting.md"), re.MULTILINE)
    told = {name.strip() for row in rows for name in row.split(",")}
    made = re.compile(r'(?:\.r|R)eason\(\s*(?:choice=)?"([A-Za-z -]+)"')
    texts = (path.read_text(encoding="utf-8") for path in (SOURCE / "batchwright").rglob("*.py"))
    named = {name for text in texts for name in made.findall(text)}
    named |= {match_rounds.CHOICE, *searched.CHOICES.values()}
    assert len(named) > 40
    assert not named - told


def test_links_between_the_documents_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def headings(page: Path) -> set[str]:
    """Of a page, as links name them."""
    lines = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in lines}


def test_links_to_headings_lead_to_one():
    for page in PAGES:
        for target, heading in re.findall(r"\]\(([^)#]*)#([^)]+)\)", page.read_text("utf-8")):
            if "://" not in target:
                there = page.parent / target if target else page
                assert heading in headings(there), f"{page.name}: {target}#{heading}"


def test_every_option_of_a_session_has_a_row():
    page = read("docs/loop.md")
    for method in (bw.Session.__init__, bw.Session.evaluate):
        for parameter in inspect.signature(method).parameters.values():
            if parameter.kind is parameter.KEYWORD_ONLY:
                name = re.escape(parameter.name)
                assert re.search(rf"^\| `{name}=` \||[(, ]{name}=\.\.\.", page, re.MULTILINE), name


def test_every_module_named_for_contributors_exists_and_every_folder_is_named():
    package = ROOT / "src" / "batchwright"
    page = read("CONTRIBUTING.md")
    table = page[page.index("## What is where") :].splitlines()
    rows = [row.split("|")[1:3] for row in table if row.startswith("| `")]
    modules = {name for first, _ in rows for name in re.findall("`(.+?)`", first)}
    folders = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    files = {path.name for path in package.glob("*.py")} - {"__init__.py"}
    assert folders | files == modules
    for first, rest in rows:
        home = package / first.strip().strip("`")
        assert all((home / inner).exists() for inner in re.findall("`(.+?)`", rest)), first


def test_decisions_are_numbered_without_gaps_and_have_three_parts():
    pages = sorted((DOCS / "decisions").glob("*.md"))
    assert [int(page.name[:4]) for page in pages] == list(range(1, len(pages) + 1))
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert text.startswith(f"# {int(page.name[:4])}. ")
        for part in ("**Context.**", "**Choice.**", "**Consequences.**"):
            assert part in text, page.name


PROJECT = tomllib.loads(read("pyproject.toml"))["project"]


def test_every_dependency_has_its_reason():
    reasons = read("docs/decisions/0002-dependencies.md")
    for requirement in PROJECT["dependencies"]:
        name = re.match(r"[\w-]+", requirement)[0]
        assert re.search(rf"^\| `{name}", reasons, re.MULTILINE), name


def test_the_constraints_name_one_allowed_version_of_each_dependency():
    wanted = [Requirement(one) for one in PROJECT["dependencies"]]
    extras = ("serve", "ray", "lightning", "transformers", "tracking", "delivery", "data", "docs")
    for extra in extras:
        wanted += [Requirement(one) for one in PROJECT["optional-dependencies"][extra]]
    wanted = [one for one in wanted if one.name != PROJECT["name"]]  # which is its other extras
    lines = [line.partition("#")[0].strip() for line in read("constraints.txt").splitlines()]
    versions = dict(line.split("==") for line in lines if line)
    versions = {canonicalize_name(name): version for name, version in versions.items()}
    for one in wanted:
        assert one.specifier.contains(versions[canonicalize_name(one.name)]), one
    named = {canonicalize_name(one.name) for one in wanted}
    assert set(versions) - named == {"psycopg-binary"}  # what the extra of psycopg brings


def test_the_table_of_versions_is_in_step_with_the_results():
    matrix = load(ROOT / "tools" / "matrix")
    page = read("docs/where-it-runs.md")
    assert matrix.filled(page, matrix.read()) == page, "run tools/matrix --page"


def test_every_python_that_the_package_names_and_its_oldest_pytorch_have_passed():
    results = load(ROOT / "tools" / "matrix").read()
    passed = [one for one in results if one.get("failed") == 0]
    named = re.findall(r":: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    assert named
    assert set(named) <= {one["python"] for one in passed}
    (oldest,) = (one for one in PROJECT["dependencies"] if one.startswith("torch"))
    assert oldest.removeprefix("torch>=") in {one["torch"] for one in passed}


def test_functions_named_in_the_equations_exist():
    named = set(re.findall(r"`([a-z]\w+(?:\.\w+)+)`", read("docs/methods.md")))
    others = {*Job.model_fields, "benchmarks", "plan", "torch"}  # keys, and what is not of ours
    ours = [name for name in named if name.partition(".")[0] not in others]
    assert len(ours) > 100
    for name in ours:
        assert resolve_name(f"batchwright.{name}")


def test_the_checks_take_the_test_command_from_the_readme():
    (line,) = [line for line in shell_lines(README) if line.endswith("pytest")]
    assert (
        re.search(r"grep -E '(.*)' README.md", read(".ci/run"))[1] == "^python3 -m venv .*pytest$"
    )
    assert re.fullmatch("python3 -m venv .*pytest", line)


# ------------------------------------------------------------------------- what is shown, runs

# What no test runs as it is shown: its pages, a part of it, and why. Words are read all the same.
NOT_RUN = (
    ("CONTRIBUTING.md", "", "what .ci/run does, or takes minutes, or is done once a release"),
    ("docs/testing.md", "", "takes hours"),
    ("*.md", "pip install", "an installation, as .ci/run makes"),
    ("*.md", "sky ", "needs a cloud"),
    ("*.md", "kubectl ", "needs a cluster"),
    ("*.md", "srun ", "needs Slurm, on which tests/test_slurm.py trains"),
    ("*.md", "batchwright run job.yaml launch=slurm", "the same"),
    ("docs/slurm.md", "batchwright run --resume", "the same"),
    ("*.md", "batchwright run job.yaml launch=ray", "needs Ray; tests/test_ray.py trains on it"),
    ("docs/ray.md", "batchwright run --resume", "the same"),
    ("docs/hosts.md", "torchrun --nnodes", "needs two hosts; tests/test_hosts.py has two of one"),
    ("docs/hosts.md", "BATCHWRIGHT_KIND=a100 torchrun --nnodes", "the same"),
    ("docs/tutorials/cluster.md", "torchrun --nnodes", "the same"),
    ("docs/data.md", "batchwright run data=hf:uoft-cs/", "data from the Hub"),
    ("docs/data.md", "batchwright run data=torchvision:SVHN", "data from the web"),
    ("docs/data.md", "batchwright run data=s3:", "a bucket; tests/test_library_data.py has one"),
    ("docs/data.md", 'batchwright run "data=wds:https:', "a web server; the same"),
    ("docs/data.md", "batchwright run network=torchvision:resnet18", "weights from the web"),
    ("docs/data.md", "batchwright run network=transformers:microsoft", "weights from the Hub"),
    ("docs/data.md", "network=timm:resnet50", "the same"),
    ("docs/data.md", "batchwright deliver", "of the run before it"),
    ("docs/verbs.md", "batchwright train plan.json network=", "a plan of that network, for GPUs"),
    ("docs/service.md", "BATCHWRIGHT_DATABASE=postgresql:", "PostgreSQL elsewhere"),
    ("docs/ray.md", "TorchTrainer(", "needs Ray; tests/test_ray.py trains such a loop"),
)
# Commands that tests of other files run, and all code: their pages, a part of each, and the test.
_SERVED = "test_service_serving::test_the_commands_of_the_pages_run_at_a_service"
_DATA = "test_library_data::test_the_commands_of_the_page_run"
RUN_BY = (
    ("docs/tutorials/own-loop.md", "classify", "test_examples::test_an_example_of_ones_own_loop"),
    ("docs/data.md", "batchwright ", _DATA),
    ("*.md", "127.0.0.1:8400", _SERVED),
    ("docs/service.md", "batchwright ", _SERVED),
    ("docs/tutorials/service.md", "batchwright ", _SERVED),
)
CODE = (
    ("docs/tutorials/first-run.md", "", "test_docs::test_the_verbs_from_python_are_those_of"),
    ("docs/extending.md", "", "test_registries::test_the_package_of_the_page_does_all"),
    ("docs/loop.md", "", "test_docs::test_the_session_in_the_documents_runs"),
    ("docs/ray.md", "tune.Tuner(", "test_ray::test_the_pages_example_of_tune_finds_the_best"),
    ("docs/run-folder.md", "", "test_docs::test_a_checkpoint_opens_without_this_package"),
    ("docs/service.md", "hmac.new(", "test_service_webhook::test_a_notice_is_signed"),
    ("docs/trainers.md", "Trainer(", "test_examples::test_the_trainers_of_the_page_run"),
    ("docs/trainers.md", "bw.ForTransformers(", "test_examples::test_the_trainers_of_the_page_run"),
    ("docs/trainers.md", "feed", "test_examples::test_the_loops_and_the_probe_of_the_page"),
    ("docs/trainers.md", "sampler", "test_examples::test_the_loops_and_the_probe_of_the_page"),
    ("docs/trainers.md", "step=step", "test_examples::test_the_loops_and_the_probe_of_the_page"),
    ("docs/tutorials/own-loop.md", "", "test_docs::test_the_session_in_the_documents_runs"),
    ("docs/verbs.md", "", "test_docs::test_the_python_of_the_verbs_runs"),
)


OTHER_PAGES = ("job", "loop", "exports", "kubernetes", "hosts", "simulate", "verbs")
OTHER_PAGES += ("run-folder", "trackers")


def found_in(table: Sequence[tuple[str, str, str]], page: str, text: str) -> list[str]:
    """What a table says of a command, or of a block of code."""
    return [says for pages, part, says in table if fnmatch(page, pages) and part in text]


def shown_for(test: str) -> list[tuple[str, str]]:
    """Page and command of all that another test is to run."""
    return [
        (page, line)
        for page in map(named, PAGES)
        for line in shell_lines(read(page))
        if any(one.startswith(test) for one in found_in(RUN_BY, page, line))
        and not found_in(NOT_RUN, page, line)
    ]


def run_here(page: str) -> list[str]:
    """Commands of a page that are run in this file: all that no table has."""
    lines = shell_lines(read(page))
    return [one for one in lines if not found_in(NOT_RUN, page, one) + found_in(RUN_BY, page, one)]


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def members(code: str) -> Iterator[tuple[object, str]]:
    """What code takes of this package: the module and the name in it."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("batchwright"):
            yield from ((importlib.import_module(node.module), one.name) for one in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "bw":
            yield bw, node.attr


def read_words(command: str) -> None:
    """Have a command's words read as they would be, and its job's keys; nothing else is done."""
    for part in re.split(r" (?:&&|\|) ", command):
        words = shlex.split(part.partition(" > ")[0])
        while "=" in words[0]:  # a variable before it
            del words[0]
        if words[0] == "torchrun":
            told = get_args_parser().parse_args(words[1:])
            words = [told.training_script, *told.training_script_args]
        if words[0] == "srun":
            del words[: words.index("batchwright")]
        for one in words:
            assert not re.match(r"(docs|tools|\.ci)/", one) or (ROOT / one).exists(), one
            assert not one.startswith("benchmarks.") or importlib.util.find_spec(one), one
            extras = re.findall(r"^(?:\.|batchwright)\[(.+)\]$", one)
            assert {*",".join(extras).split(",")} <= {"", *PROJECT["optional-dependencies"]}, one
        if Path(words[0]).name != "batchwright" or len(words) == 1 or words[1].startswith("--"):
            continue
        verb = VERBS[words[1]]
        context = verb.make_context(words[1], words[2:])
        given = [
            context.params[one.name] for one in verb.params if one.param_type_name == "argument"
        ]
        keys = [one for each in given if isinstance(each, list) for one in map(str, each)]
        if words[1] != "simulate":  # which has keys of its own
            with other_keys_come():
                load_job(None, [one for one in keys if "=" in one])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_of_a_page_is_run_by_a_test_or_it_is_said_why_not(page):
    name, text = named(page), page.read_text(encoding="utf-8")
    bare = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.DOTALL | re.MULTILINE)
    assert not re.search(r"\n\n {4}\S.*", bare), "indented code has no label"
    for label, block in fences(text):
        assert re.fullmatch(r"sh|python|toml|yaml|text|\{(toctree|eval-rst)\}", label), block
        if label == "text":  # what is printed, or how a verb is called
            commands = re.findall("^(?:batchwright|pip|python|torchrun) .*", block, re.MULTILINE)
            assert not commands or "[" in block, commands
        if label in ("python", "toml"):
            assert len(found_in((*CODE, *NOT_RUN), name, block)) == 1, block
        if label == "python":
            for module, member in members(block):
                assert member in dir(module), member
        if label == "yaml":
            change_job(Job(), yaml.safe_load(block))
    for line in shell_lines(text):
        read_words(line)
    here = {f"docs/{one}.md" for one in OTHER_PAGES}
    assert not run_here(name) or name in here or re.match("docs/(methods|tutorials)/", name)


def test_the_tables_of_what_is_not_run_here_name_what_is_there():
    texts = {named(page): page.read_text(encoding="utf-8") for page in PAGES}
    shown = {page: [*shell_lines(one), *blocks(one, "python")] for page, one in texts.items()}
    for row in (*NOT_RUN, *RUN_BY, *CODE):
        assert any(found_in([row], page, one) for page in shown for one in shown[page]), row
    for _, _, test in (*RUN_BY, *CODE):
        file, _, name = test.partition("::")
        assert f"\ndef {name}" in read(f"tests/{file}.py"), test


@pytest.fixture
def loop_of_ones_own(tmp_path, monkeypatch):
    """What the documents take for granted around a session."""
    images = torch.rand(96, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(images, (images.mean(dim=(1, 2, 3)) > 0.5).long())
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
    data = make_data(train_samples=96, val_samples=96, classes=("dark", "light"), side=8)
    job = Job(workers=1, epochs=2, global_batch=32, timeout=20)
    plan = plan_without_profile(job, data, make_network(batch_norm=False, least_side=1))
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    write_record(plan, "plan.json")
    yield {
        "__name__": "__main__",
        "bw": bw,
        "model": model,
        "criterion": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        **dict.fromkeys(("dataset", "train_set", "test_set"), dataset),
    }
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["docs/loop.md", "docs/tutorials/own-loop.md"])
def test_the_session_in_the_documents_runs(page, loop_of_ones_own):
    before, *_, definition, on_gpus, muon = blocks(read("docs/loop.md"), "python")
    (loop,) = [code for code in blocks(read(page), "python") if "bw.Session(" in code]
    exec(f"{definition}\n{loop}", loop_of_ones_own)  # noqa: S102 - our own document
    assert loop_of_ones_own["epoch"] == 1
    assert Path("runs/a/summary.json").exists()
    if page == "docs/loop.md":
        model, optimizer = (loop_of_ones_own[one] for one in ("model", "optimizer"))
        loop_of_ones_own |= {
            "DataLoader": DataLoader,
            "accuracy_over": lambda model, dataset: len(dataset),
            "make_model": lambda: model,
            "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
            "torch": torch,
        }
        for code in (before.replace("range(30)", "range(2)"), on_gpus, muon):
            exec(code, loop_of_ones_own)  # noqa: S102 - as above
        assert loop_of_ones_own["epoch"] == 1
        assert Path("model.pt").exists()


SOURCE = ROOT / "src"
SHOWING = sorted(path for path in SOURCE.rglob("*.py") if ">>>" in path.read_text("utf-8"))


@pytest.mark.parametrize("path", SHOWING, ids=lambda path: path.stem)
def test_examples_in_docstrings_give_what_they_say(path):
    name = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def script_of_the_docstring() -> str:
    """What `help(batchwright)` shows."""
    lines = [line for line in inspect.getdoc(bw).splitlines() if line.startswith("    ")]
    return inspect.cleandoc("\n".join(lines))


@pytest.mark.slow
def test_the_example_in_the_packages_docstring_runs(tmp_path, forks):
    """With little measuring, a small network in float32, no trials and one epoch."""
    script = script_of_the_docstring()
    assert all(f"bw.{verb}(" in script for verb in ("probe", "plan", "check", "schedule", "train"))
    probe = ('{"budget": 5}', '{"budget": 0.3, "learning": 0}, precision="float32"')
    small = ("data=", 'network="kept_network:network", data=')
    for shown, short in (probe, small, ("epochs=3", "epochs=1")):
        assert shown in script
        script = script.replace(shown, short)
    (tmp_path / "script.py").write_text(script)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = forked.command(program="script.py", cwd=tmp_path, env=env, prints=tmp_path)
    assert not done.returncode, told(script, done)
    (page,) = tmp_path.glob("runs/*/report.html")
    assert isinstance(bw.load(page.parent), bw.RunSummary)


def test_the_verbs_from_python_are_those_of_the_docstring():
    """Which runs, above; but for the folder."""
    (code,) = blocks(read("docs/tutorials/first-run.md"), "python")
    folder = ', run_folder="runs/python"'
    assert folder in code
    shown = map(ast.dump, ast.parse(code.replace(folder, "")).body)
    begin, guarded = ast.parse(script_of_the_docstring()).body
    run = iter([ast.dump(one) for one in (begin, *guarded.body)])
    assert all(line in run for line in shown), "a line that does not run, or another order"


def write_cifar(folder: Path) -> None:
    """A hundredth of CIFAR-100, in its own format."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    for name, count in (("train", 500), ("test", 100)):
        pixels = generator.integers(0, 256, (count, 3072), dtype=np.uint8)
        labels = [index % 100 for index in range(count)]
        content = {b"data": pixels, b"fine_labels": labels}
        (folder / name).write_bytes(pickle.dumps(content, protocol=4))
    names = {b"fine_label_names": [b"%d" % index for index in range(100)]}
    (folder / "meta").write_bytes(pickle.dumps(names, protocol=4))


def write_flowers(folder: Path) -> None:
    """Sixty small photographs in two classes."""
    generator = np.random.default_rng(0)
    for index in range(60):
        place = folder / ("daisy", "tulip")[index % 2]
        place.mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(0, 256, (40, 48, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"{index}.jpg")


def lines_of_pages() -> list[str]:
    """Commands of tutorials and of the methods' cards, each once."""
    pages = [*sorted((DOCS / "tutorials").glob("*.md")), *sorted((DOCS / "methods").glob("*.md"))]
    return [*dict.fromkeys(line for page in pages for line in run_here(named(page)))]


@pytest.fixture(scope="module")
def followed(tmp_path_factory, forks):
    """A folder in which all commands of these were run, in order; and what each printed."""
    folder = tmp_path_factory.mktemp("readme")
    write_cifar(folder / "PATH" / "cifar-100-python")
    write_flowers(folder / "PATH" / "flowers")
    first = shell_lines(README)[0].rpartition("&& .venv/bin/")[2]  # behind the installation
    commands = [first, *lines_of_pages()]
    prints = tmp_path_factory.mktemp("prints")
    return folder, {one: entered(briefly(one), folder, prints) for one in commands}


def entered(command: str, folder: Path, prints: Path) -> str:
    """As `run`, without a shell where none is needed: a program started by it imports all anew."""
    if " && " in command:
        return "".join(entered(one, folder, prints) for one in command.split(" && "))
    parts = [shlex.split(part) for part in command.split(" | ")]
    ours = all(first in ("batchwright", "python", "torchrun") for first, *_ in parts)
    # What is installed is tried once.
    unquoted = re.sub("'[^']*'", "", command)
    if command == "batchwright doctor" or not ours or {*unquoted} & {*"$<>&;`*?~"}:
        return run(command, folder)
    whole = re.search(r"--figure| sweep | report \S+ \S+|--out runs/dual$", command)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "FORKED_BRIEFLY": "" if whole else "1"}
    said = read = ""
    for program, *words in parts:
        if program == "python":
            program, *words = words
        program = forked.TORCHRUN if program == "torchrun" else program
        how = {"cwd": folder, "env": env, "prints": prints, "program": program, "stdin": read}
        done = forked.command(*words, **how)
        assert not done.returncode, told(command, done)
        said, read = said + done.stderr, done.stdout
    return said + read


def shortened(command: str) -> str:
    """A little measuring does to see that a command runs; two batch sizes ask for seconds of it.

    They are solved for along measured times, which fall from batch to batch where a machine is busy
    and there was time for few visits.
    """
    seconds = 4 if "dual-batch" in command else 1 if "hybrid" in command else 0.3
    return re.sub("probe.budget=[0-9]+", f"probe.budget={seconds}", command)


def quickly(command: str) -> str:
    """Hardly measured, and without trials."""
    return asked(command, "probe.budget=0.3 probe.learning=0")


def asked(command: str, keys: str) -> str:
    """With these keys, where its job stands in its words."""
    verb = r"batchwright (run|probe|sweep|submit)( job\.yaml)?\b(?!.*(job.yaml|--resume))"
    return re.sub(verb, rf"\g<0> {keys}", command)


SMALL = "network=kept_network:network"


def briefly(command: str) -> str:
    """Two epochs do as well, where no schedule needs more; one run is trained until it has learnt.

    That one has the batch it is given: a plan's own, and so the accuracy, follows the machine's
    speed at the moment. A large network becomes a small one. The others have no trials, which may
    take ten seconds, and beside the very first command no number formats to compare; data of other
    kinds are measured with one number of workers; and where no network is named it is a small one:
    what all of these do is tested where they are made.
    """
    if command == "batchwright run":
        return shortened(f"{command} probe.learning=0 probe.budget=5 epochs=2")
    if command.endswith("--out runs/digits --explain"):
        return shortened(f"{command} global_batch=128 workers=2 epochs=15")
    command = command.replace("network=resnet18", SMALL)
    if "method=hybrid" not in command:
        command = re.sub("epochs=[0-9]+", "epochs=2", command)
    if re.search("batchwright (run|sweep) ", command) and not re.search("network=|--rep", command):
        command = asked(command, SMALL)
    if "--grid" in command and "--seeds" not in command:
        command += " --seeds 1"
    command = re.sub("(probe.budget=)", r"probe.learning=0 \1", command)
    files = '("?data=(cifar100|imagefolder|torchvision|hf|wds|lmdb):)'
    command = re.sub(files, r"workers=1 \1", command)
    return asked(shortened(command), "precision=float32")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_commands_of_readme_tutorials_and_cards_run_in_order(followed):
    folder, printed = followed
    assert len(printed) > 10
    assert next(iter(printed)) == "batchwright run"
    for name in ("digits", "cifar", "flowers", "b64", "piped", "uneven", "dual", "hybrid"):
        assert (folder / "runs" / name / "summary.json").exists()
    for name in ("schedule.png", "runs/sweep/sweep.html", "runs/compared/comparison.html"):
        assert (folder / name).stat().st_size
    for name in ("simulated.png", "train.sbatch", "cyclic.png"):  # of tutorials and cards
        assert (folder / name).stat().st_size
    accuracy = json.loads((folder / "runs/digits/summary.json").read_text())["epochs"][-1]
    assert accuracy["val_correct"] >= 0.97 * accuracy["val_count"]  # 99.2 % with this batch
    assert "accuracy" in printed["batchwright run"]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, forks):
    """A folder with what the other pages speak of: a profile, a plan, a run and a loop."""
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "job.yaml").write_text(
        "{data: digits, epochs: 2, precision: float32, "
        "probe: {kind: cpu, budget: 0.3, learning: 0}}"
    )
    (folder / "prices.csv").write_text("kind,price,spot_price,count\ncpu,0.4,0.1,2\n")
    loop = read("examples/classify.py").partition("\nif __name__ ==")[0]
    loop += "\nif __name__ == '__main__':\n    train_as_planned('plan.json')\n"
    (folder / "my_project.py").write_text(loop)
    network = "link.latency=5e-5 link.bandwidth=1.1e9"
    entered("batchwright probe job.yaml probe.kind=a100 --out a100.json", folder, folder)
    (folder / "t4.json").write_text((folder / "a100.json").read_text().replace('"a100"', '"t4"'))
    entered(f"batchwright probe job.yaml workers=2 {network} --out profile.json", folder, folder)
    entered("batchwright plan profile.json --out plan.json", folder, folder)
    entered("batchwright train plan.json --out runs/a", folder, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("page", OTHER_PAGES)
def test_the_commands_of_another_page_run_in_order(page, prepared, tmp_path):
    if page == "trackers":
        pytest.importorskip("tensorboard", reason="pip install 'batchwright[tracking]'")
        pytest.importorskip("mlflow", reason="pip install 'batchwright[tracking]'")
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    for command in run_here(f"docs/{page}.md"):
        command = re.sub("(workers=|nproc-per-node )7", r"\g<1>2", briefly(command))
        command = re.sub(" --set accelerator=[^ ]+", "", command)  # the plan is for processors
        entered(quickly(command), tmp_path, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_file_and_metric_of_a_run_is_documented(followed):
    folder, _ = followed
    page = read("docs/run-folder.md")
    for path in (folder / "runs" / "digits").iterdir():
        assert f"`{path.name}" in page, path.name
    for line in bw.metrics(folder / "runs/digits"):
        for name in line:
            name = re.sub(r"(rank|local/)1", r"\g<1>0", name)
            shown = name.partition("_s")[0] if name.startswith("time/rank") else name
            group, _, last = name.rpartition("/")
            assert f"`{name}`" in page or (f"`{group}/" in page and f"`{last}`" in page), shown


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_checkpoint_opens_without_this_package_as_shown(followed):
    folder, _ = followed
    page = read("docs/run-folder.md")
    (code,) = [code for code in blocks(page, "python") if "torch.load(" in code]
    script = "import sys\nsys.modules['batchwright'] = None\n" + code
    script += """
from sklearn.datasets import load_digits
digits = load_digits()
grey = torch.tensor(digits.images * 255 / 16).round()
names = classify(grey[:, None].expand(-1, 3, -1, -1).to(torch.uint8))
right = sum(name == str(label) for name, label in zip(names, digits.target))
assert right > 0.97 * len(names), right
assert checkpoint["input"]["side"] == 8
print(*checkpoint)
"""
    (folder / "open.py").write_text(script)
    for key in run(f"{sys.executable} open.py", folder).split():
        assert re.search(rf"^\| .*`{key}`.* \|", page, re.MULTILINE), key


@pytest.mark.slow
def test_the_python_of_the_verbs_runs(prepared, tmp_path, monkeypatch):
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    (tmp_path / "runs" / "a").rename(tmp_path / "runs" / "digits")
    bw.deliver(tmp_path / "runs" / "digits", tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    Image.new("L", (9, 12)).save("digit.png")
    scope = {"bw": bw, "images": torch.rand(2, 3, 8, 8)}
    for code in blocks(read("docs/verbs.md"), "python"):
        exec(code, scope)  # noqa: S102 - our own document
    assert scope["summary"].plan.job.data == "digits"
    assert len(scope["names"]) == 2
    assert scope["shares"].shape == (1, 10)
