"""Which module may import which, and who starts without torch."""

from __future__ import annotations

import ast
import functools
import json
import subprocess
import sys
from collections.abc import Container, Iterator
from pathlib import Path

import pytest

import batchwright

ROOT = Path(batchwright.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))

# What each module or folder may import of ours, besides itself.
ARROWS = {
    "errors": set(),
    "files": {"errors"},
    "records": {"errors", "files"},
    "locks": {"errors", "files"},
    "documents": {"records", "errors", "files"},
    "reports": set(),
    "processes": {"documents", "errors", "locks", "reports"},
    "roll_call": set(),
    "meeting": {"errors", "processes", "workload.host"},
    "group": {"errors", "meeting", "processes", "roll_call"},
    "stopwatch": {"records"},
    "fork_server": {"processes"},
    "children": {"fork_server", "processes", "reports"},
    "launch": {"children", "errors", "locks", "processes", "reports"},
    "server_child": {"locks", "processes", "reports"},
    "supervision": {
        "children",
        "errors",
        "launch",
        "locks",
        "processes",
        "reports",
        "server_child",
    },
    "buckets": {"errors", "group"},
    "reduction": {"buckets", "errors", "group"},
    "prediction": {"records", "errors"},
    "planning": {"records", "errors", "prediction"},
    "simulation": {"records", "errors"},
    "workload": {"records", "errors", "documents", "files", "locks"},
    "probing": {
        "records",
        "errors",
        "documents",
        "fork_server",
        "group",
        "processes",
        "reports",
        "workload",
        "launch",
        "planning.learning_rate",
        "planning.learnt",
        "planning.optimizer",
        "planning.partition",
        "planning.planner",
        "planning.trial_choice",
        "prediction",
        "reduction",
        "training.evaluation",
        "training.sampler",
    },
    "training": {
        "client.companion",
        "planning.continuing",
        "planning.rebalancing",
        "planning.splicing",
        "records",
        "errors",
        "documents",
        "files",
        "group",
        "locks",
        "meeting",
        "processes",
        "server_child",
        "workload",
        "planning.partition",
        "planning.learning_rate",
        "prediction.noise_scale",
        "prediction.straying",
        "reduction",
        "simulation.clock",
    },
    "reporting": {"records", "errors", "files"},
    "service": {
        "records",
        "errors",
        "files",
        "documents",
        "prediction",
        "planning",
        "reporting",
        "checking",
        "deciding",
        "preparing",
        "refitting",
        "verbs",
    },
    "client": {
        "records",
        "errors",
        "files",
        "documents",
        "locks",
        "processes",
        "reports",
        "run_folder",
        "reporting.following",
    },
}
ASSEMBLY = {  # put everything together
    *(
        "__init__",
        "__main__",
        "cli",
        "cli_client",
        "cli_service",
        "cli_words",
        "conducting",
        "verb_child",
    ),
    *("verbs", "doctor"),
    *("checking", "preparing", "refitting", "run_folder", "scheduling", "settling", "sweeping"),
    "deciding",
}
WITHOUT_TORCH = {
    *(
        "__init__",
        "__main__",
        "cli",
        "cli_client",
        "cli_service",
        "cli_words",
        "conducting",
        "verbs",
    ),
    *("children", "documents", "files", "fork_server", "launch", "locks", "processes", "stopwatch"),
    *("checking", "preparing", "refitting", "run_folder", "scheduling", "settling", "sweeping"),
    *("deciding", "server_child", "supervision"),
    *("records", "errors", "prediction", "planning", "reporting"),
    *("simulation", "service", "client"),
}


def name_of(path: Path) -> str:
    """``training/session.py`` is ``training.session``."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def home_of(path: Path) -> str:
    return name_of(path).partition(".")[0]


def imports_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and full name of everything imported, wherever the import stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: relative import"
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def within(name: str, allowed: str) -> bool:
    return name == allowed or name.startswith(f"{allowed}.")


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_of_ours_follow_the_arrows(path):
    home = home_of(path)
    if home in ASSEMBLY:
        return
    allowed = ARROWS[home] | {home}
    strays = [
        f"line {line}: {name}"
        for line, name in imports_in(parse(path))
        if name.startswith("batchwright.")
        and not any(within(name.removeprefix("batchwright."), one) for one in allowed)
    ]
    assert not strays


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_torchvision_and_timm_are_imported_nowhere(path):
    packages = {name.partition(".")[0] for _, name in imports_in(parse(path))}
    assert not packages & {"torchvision", "timm"}


@pytest.mark.parametrize("path", [p for p in MODULES if home_of(p) in WITHOUT_TORCH], ids=name_of)
def test_modules_that_start_without_torch_import_it_inside_functions_only(path):
    at_start = ast.Module([n for n in parse(path).body if not is_block(n)], [])
    assert "torch" not in {name.partition(".")[0] for _, name in imports_in(at_start)}


def is_block(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef | ast.ClassDef | ast.If)


@pytest.mark.parametrize(
    "code",
    [
        "import batchwright; dir(batchwright); batchwright.Job; batchwright.plan",
        "import sys; sys.argv = ['batchwright', '--help']\n"
        "from batchwright.cli import main\n"
        "try: main()\nexcept SystemExit: pass",
        "import io, sys; sys.path.insert(0, TESTS); sys.argv = ['batchwright', 'plan', '-']\n"
        "from samples import make_profile\n"
        "sys.stdin = io.StringIO(make_profile().model_dump_json())\n"
        "from batchwright.cli import main\n"
        "try: main()\nexcept SystemExit as end: assert not end.code, end.code",
        "import sys; sys.path.insert(0, TESTS)\n"
        "from samples import make_plan; make_plan().explain()\n"
        "import batchwright.reporting.page, batchwright.reporting.figures\n"
        "import batchwright.reporting.tables, batchwright.reporting.progress",
    ],
    ids=["import", "help", "plan", "reporting"],
)
def test_torch_is_not_loaded_by(code):
    tests = str(Path(__file__).parent)
    script = (
        f"import sys, io, json, contextlib\nTESTS = {tests!r}\n"
        f"with contextlib.redirect_stdout(io.StringIO()):\n"
        + "".join(f"    {line}\n" for line in code.split("\n"))
        + "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    loaded = set(json.loads(done.stdout))
    assert "batchwright" in loaded
    assert not loaded & {"torch", "torchvision", "timm"}


def test_no_files_import_each_other_in_a_circle():
    files = {name_of(path).removesuffix(".__init__"): path for path in MODULES}
    ahead = {
        name: {
            found
            for _, imported in imports_in(parse(path))
            for found in [file_of(imported.removeprefix("batchwright."), files)]
            if imported.startswith("batchwright.") and found not in {None, name}
        }
        for name, path in files.items()
    }
    while ends := {
        name
        for name, others in ahead.items()
        if not others & ahead.keys() or not any(name in others for others in ahead.values())
    }:
        ahead = {name: others for name, others in ahead.items() if name not in ends}
    assert not ahead


def file_of(imported: str, files: Container[str]) -> str | None:
    """The file of a module or of what is imported from it; `None` of the package itself."""
    home = imported.rpartition(".")[0]
    return next((name for name in (imported, home) if name in files), None)
