"""Registries: what they hold, what other packages add, and that names are asked nowhere else."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

import batchwright
import forked
from batchwright.errors import JobError
from batchwright.records import Job, OptimizerName
from batchwright.records.registries.data_sources import DATA, FUNCTION
from batchwright.records.registries.launchers import LAUNCHERS
from batchwright.records.registries.methods import METHODS
from batchwright.records.registries.networks import NETWORKS
from batchwright.records.registries.optimizers import AUTO, OPTIMIZERS
from batchwright.records.registries.trackers import TRACKERS
from batchwright.workflows.exports import EXPORTS
from batchwright.workload.task import import_object
from test_docs import blocks, read

OTHER_PACKAGE = Path(__file__).parent / "other_package"
BRIEFLY = ("precision=float32", "probe.budget=0.3", "probe.learning=0")


def in_other_process(code: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    """Runs code where another package lies on the path beside its entry points."""
    path = os.pathsep.join(map(str, [*paths, *sys.path]))
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def told_by(code: str, *paths: Path) -> str:
    done = in_other_process(code, *(paths or (OTHER_PACKAGE,)))
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def run_beside(package: Path, out: Path, *words: str) -> None:
    """A run that is started where another package lies, and finds it as what stands there."""
    path = os.pathsep.join(map(str, [package, *sys.path]))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    words = ("run", *words, *BRIEFLY, "--out", str(out / "run"))
    done = forked.command(*words, cwd=package, env=env, prints=out)
    assert done.returncode == 0, done.stderr


REGISTRIES = (OPTIMIZERS, NETWORKS, DATA, LAUNCHERS, METHODS, TRACKERS)


@pytest.mark.parametrize("registry", REGISTRIES)
def test_a_member_stands_under_its_own_name(registry):
    assert all(name == member.name for name, member in registry.items())
    assert "auto" not in registry
    assert len(registry) == len({*registry}) == len([*registry])


@pytest.mark.parametrize("registry", [*REGISTRIES, EXPORTS])
def test_the_page_names_the_entry_points_of_a_registry_and_what_its_members_are(registry):
    kind = type(next(iter(registry.own.values())))
    place = f"{kind.__module__}.{kind.__name__}".removeprefix("batchwright.")
    assert f"| `{registry._group}` | `{place}` |\n" in read("docs/extending.md")


def test_what_members_name_is_there_to_call():
    for one in (*OPTIMIZERS.values(), *NETWORKS.values()):
        assert callable(import_object(one.build, one.name))
    for source in (*DATA.values(), FUNCTION):
        assert callable(import_object(source.open, source.name))
    for launcher in LAUNCHERS.values():
        assert callable(import_object(launcher.train, launcher.name))
    for method in METHODS.values():
        for named in (method.plan, method.balancer, method.reason, method.saves):
            assert not named or callable(import_object(named, method.name))
    assert {*AUTO} <= {*OPTIMIZERS}


def test_a_record_takes_a_decided_name_and_a_job_an_open_one():
    with pytest.raises(ValidationError, match="'sgd', 'adamw' or 'muon'"):
        TypeAdapter(OptimizerName).validate_python("auto")
    with pytest.raises(JobError, match=r"should be 'auto', 'sgd', 'adamw' or 'muon'$"):
        Job(optimizer="lion")
    schema = Job.model_json_schema()["properties"]["optimizer"]
    assert schema["enum"] == ["auto", "sgd", "adamw", "muon"]


# ------------------------------------------------------------------------- of another package


@pytest.mark.slow
def test_an_optimizer_of_another_package_is_known_planned_with_and_built():
    found = told_by(
        f"import sys; sys.path.append({str(Path(__file__).parent)!r})\n"
        "from batchwright.records import Job, Plan\n"
        "from batchwright.planning.planner import plan_without_profile\n"
        "from samples import make_data, make_network\n"
        "job = Job(optimizer='lion', workers=1, resolutions=[8], precision='float32')\n"
        "plan = plan_without_profile(job, make_data(), make_network())\n"
        "plan = Plan.model_validate_json(plan.model_dump_json())\n"
        "assert 'torch' not in sys.modules\n"
        "from batchwright.workload.task import build_network, build_optimizer\n"
        "network = build_network('resnet8', classes=10, side=8)\n"
        "made = build_optimizer(network, plan.job, plan.learning_rate.peak, name=plan.update)\n"
        "import json\n"
        "print(json.dumps([plan.update, plan.learning_rate.base, type(made).__name__]))"
    )
    assert json.loads(found) == ["lion", 0.0003, "Lion"]


@pytest.mark.slow
def test_a_network_of_another_package_is_built_and_known_by_its_least_side():
    found = told_by(
        "from batchwright.errors import JobError\n"
        "from batchwright.workload.task import build_network, network_facts\n"
        "network = build_network('tiny', classes=10, side=8)\n"
        "print(network_facts('tiny', network, 8).least_side)\n"
        "for name in ('tiny', 'tinny'):\n"
        "    try: build_network(name, classes=10, side=1)\n"
        "    except JobError as error: print(error)\n"
    )
    assert found.splitlines() == [
        "2",
        "network=tiny: takes images of at least 2 pixels, not 1",
        "network=tinny: unknown; did you mean tiny; one of a library is written timm:tinny or "
        "torchvision:tinny, your own as an import string module:function, such as my_models:small",
    ]


@pytest.mark.slow
def test_data_of_another_package_are_opened_at_their_place_and_name_no_code_to_confirm():
    found = told_by(
        "from batchwright.errors import DataError\n"
        "from batchwright.records import Job\n"
        "from batchwright.records.text.formatting import data_name\n"
        "from batchwright.workload.data.sources import open_data\n"
        "job = Job(data='plates:12')\n"
        "print(open_data(job).facts.train_samples, job.code_keys, data_name(job.data))\n"
        "for name in ('plates', 'plate:12'):\n"
        "    try: open_data(Job(data=name))\n"
        "    except DataError as error: print(error)\n"
    )
    assert found.splitlines() == [
        "12 () plates",
        "data=plates needs the folder: data=plates:PATH",
        "data=plate:12 is unknown; did you mean plates:PATH?",
    ]


def test_a_method_of_another_package_is_planned_measured_or_not_and_explained():
    found = told_by(
        f"import sys; sys.path.append({str(Path(__file__).parent)!r})\n"
        "from batchwright.records import Job, Plan\n"
        "from batchwright.planning.planner import make_plan, plan_without_profile\n"
        "from samples import make_data, make_network, make_profile\n"
        "job = Job(method='growing', workers=2, resolutions=[8], global_batch=64, epochs=5)\n"
        "bare = plan_without_profile(job, make_data(), make_network())\n"
        "profile = make_profile()\n"
        "keys = {'method': 'growing', 'global_batch': 128, 'epochs': 5, 'workers': 2}\n"
        "plan = make_plan(profile, profile.job.model_copy(update=keys))\n"
        "plan = Plan.model_validate_json(plan.model_dump_json())\n"
        "assert 'torch' not in sys.modules\n"
        "rows = [[(s.epochs, s.global_batch_size) for s in p.stages] for p in (bare, plan)]\n"
        "why = next(one for one in plan.reasons if one.choice == 'method')\n"
        "assert 'growing' in plan.explain()\n"
        "import json\n"
        "print(json.dumps([rows, why.why, why.reference]))"
    )
    rows, why, reference = json.loads(found)
    assert rows == [[[2, 64], [3, 128]], [[2, 128], [3, 256]]]
    assert why == "Asked for. A larger batch later does what a lower rate does."
    assert reference == "Smith et al. 2018, arXiv 1711.00489"


def test_methods_and_launchers_of_other_packages_are_known_by_name():
    found = told_by(
        "from batchwright.errors import JobError\n"
        "from batchwright.records import Job\n"
        "for keys in ({'method': 'growin'}, {'launch': 'noted', 'workers': 2}):\n"
        "    try: Job(**keys)\n"
        "    except JobError as error: print(error)\n"
    )
    method, launch = found.splitlines()
    assert method.endswith("'hybrid' or 'growing'")
    assert launch == "workers=2 with launch=noted: that is one worker"


PLATES = """
import torch


def Plates(place, part):
    labels = torch.arange(int(place)) % 2
    return torch.utils.data.TensorDataset(torch.rand(len(labels), 3, 8, 8), labels)
"""


@pytest.mark.slow
def test_the_package_of_the_page_does_all_that_it_says(tmp_path, forks):
    """What the page takes for granted is imported: an optimizer, a data set, torch.nn."""
    page = read("docs/extending.md")
    taken = {
        "lion_in_torch": "from torch.optim import AdamW as Lion\n",
        "tiny_in_torch": "from torch import nn\n",
        "plates_in_torch": PLATES,
    }
    for code in blocks(page, "python"):
        (name,) = re.findall(r"\A# (\w+)\.py\n", code)
        (tmp_path / f"{name}.py").write_text(taken.get(name, "") + code)
    lines = []
    for each in blocks(page, "toml"):
        for group, added in tomllib.loads(each)["project"]["entry-points"].items():
            lines += [f"[{group}]", *(f"{name} = {value}" for name, value in added.items())]
    (tmp_path / "page-1.dist-info").mkdir()
    (tmp_path / "page-1.dist-info" / "METADATA").write_text("Name: page\nVersion: 1\n")
    (tmp_path / "page-1.dist-info" / "entry_points.txt").write_text("\n".join(lines))
    run_beside(
        tmp_path,
        tmp_path,
        *("data=plates:64", "network=tiny", "optimizer=lion", "method=growing", "launch=noted"),
        *("epochs=2", "global_batch=16", "--tracker", f"printed:{tmp_path / 'printed'}"),
    )
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["plan"]["update"], summary["plan"]["job"]["network"]) == ("lion", "tiny")
    assert [one["steps"] for one in summary["epochs"]] == [4, 2]
    assert (tmp_path / "run" / "noted.txt").read_text() == "growing on 1"
    assert (tmp_path / "run" / "report.html").exists()
    assert len((tmp_path / "printed").read_text().splitlines()) > 2


@pytest.mark.slow
def test_a_run_with_nothing_but_members_of_another_package_ends_in_a_report(tmp_path, forks):
    words = ("data=plates:64", "network=tiny", "optimizer=lion", "workers=2", "epochs=1")
    run_beside(OTHER_PACKAGE, tmp_path, *words)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["plan"]["update"] == "lion"
    assert (tmp_path / "run" / "report.html").exists()


def test_a_refused_name_is_answered_with_those_of_other_packages_too():
    done = in_other_process(
        "from batchwright.records import Job; Job(optimizer='lions')", OTHER_PACKAGE
    )
    assert "'auto', 'sgd', 'adamw', 'muon' or 'lion'" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_what_another_package_adds_cannot_stand_for_ours_and_must_be_a_member(tmp_path):
    (tmp_path / "other-1.dist-info").mkdir()
    (tmp_path / "other-1.dist-info" / "entry_points.txt").write_text(
        "[batchwright.optimizers]\nsgd = json:dumps\nbroken = nowhere:SPEC\nodd = json:dumps\n"
    )
    told = told_by(
        "from batchwright.errors import JobError\n"
        "from batchwright.records import Job\n"
        "from batchwright.records.registries.optimizers import OPTIMIZERS, SGD\n"
        "assert OPTIMIZERS['sgd'] is SGD\n"
        "for name in ('broken', 'odd'):\n"
        "    try: Job(optimizer=name)\n"
        "    except JobError as error: print(error)\n",
        tmp_path,
    )
    broken, odd = told.splitlines()
    assert broken == (
        "optimizer=broken: entry point batchwright.optimizers = nowhere:SPEC cannot be loaded "
        "(ModuleNotFoundError: No module named 'nowhere'): mend or remove the package that adds it"
    )
    assert odd == (
        "optimizer=odd: entry point batchwright.optimizers = json:dumps is no OptimizerSpec "
        "called odd"
    )


@pytest.mark.slow
def test_a_broken_package_of_others_stops_nobody_who_does_not_name_it(tmp_path, forks):
    (tmp_path / "other-1.dist-info").mkdir()
    (tmp_path / "other-1.dist-info" / "entry_points.txt").write_text(
        "[batchwright.optimizers]\nbroken = nowhere:SPEC\n[batchwright.data]\nodd = nowhere:SPEC\n"
    )
    words = ("data=digits", "resolutions=8", "workers=1", "launch=in-process", "epochs=1")
    run_beside(tmp_path, tmp_path, *words, "optimizer=sgd", "global_batch=64")
    assert (tmp_path / "run" / "summary.json").exists()
    said = "from batchwright.workload.data.sources import open_data; open_data(Job(data='digts'))"
    refused = in_other_process(f"from batchwright.records import Job; {said}", tmp_path)
    assert "data=digts is unknown; did you mean digits?" in refused.stderr


# ------------------------------------------------------------------------------- names elsewhere

ASKING = ("startswith", "endswith", "match", "fullmatch")
SCHEMES = {name for name, one in DATA.own.items() if one.remote}  # words of URLs wherever they are
NAMES = {name for registry in REGISTRIES for name in registry.own} - SCHEMES


def names_in(node: ast.AST) -> set[str]:
    """Members' names, and what begins with one and a colon, that stand in an expression."""
    words = [one.value for one in ast.walk(node) if isinstance(one, ast.Constant)]
    return {word for word in words if isinstance(word, str) and word.partition(":")[0] in NAMES}


def questions_in(tree: ast.AST) -> Iterator[tuple[int, ast.AST]]:
    """Where something is compared, matched, or asked how it begins or ends."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            yield from ((node.lineno, one) for one in (node.left, *node.comparators))
        elif isinstance(node, ast.MatchValue):
            yield node.lineno, node.value
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ASKING:
            yield from ((node.lineno, one) for one in node.args)


def test_no_member_is_asked_for_by_name():
    source = Path(batchwright.__file__).parent
    named = re.compile("[\"'](?:" + "|".join(NAMES) + ")[\"':]")
    texts = ((path, path.read_text(encoding="utf-8")) for path in source.rglob("*.py"))
    found = {
        f"{path.relative_to(source)}:{line}": names
        for path, text in texts
        if named.search(text)  # to parse all of them takes seconds
        for line, asked in questions_in(ast.parse(text))
        if (names := names_in(asked))
    }
    assert not found


def test_such_questions_are_seen():
    for line in (
        'job.method == "plain"',
        'plan.update not in ("sgd", "muon")',
        'job.data.startswith("imagefolder:")',
        'match job.launch:\n    case "virtual" | "local": pass',
    ):
        assert any(names_in(one) for _, one in questions_in(ast.parse(line))), line
