"""Which room may import which, how large rooms are, and who starts without torch."""

from __future__ import annotations

import ast
import functools
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Container, Iterator
from pathlib import Path

import pytest

import batchwright

ROOT = Path(batchwright.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))

# Rooms are the folders and files directly below the package. What each may import of ours, besides
# itself; data flow down this list, so that no room imports one that stands below it.
ARROWS = {
    "errors": set(),
    "storage": {"errors"},
    "records": {"errors", "storage"},
    "prediction": {"errors", "records"},
    "algorithms": {"errors", "records", "prediction.drift"},
    "workload": {"errors", "storage", "records"},
    "distributed": {"errors", "storage", "records", "workload.allocator", "workload.host"},
    "reporting": {"errors", "storage", "records"},
    "client": {"errors", "storage", "records", "distributed"},
    "planning": {"errors", "records", "prediction", "algorithms"},
    "training": {
        "errors",
        "storage",
        "records",
        "prediction.accuracy.forecast",
        "prediction.noise_scale",
        "algorithms",
        "workload",
        "distributed",
        "client.reporter_process",
    },
    "probing": {
        "errors",
        "records",
        "prediction",
        "algorithms",
        "workload",
        "distributed",
        "planning",
        "training.batches",
        "training.evaluate",
        "training.step",
    },
    "workflows": {
        "errors",
        "storage",
        "records",
        "prediction",
        "algorithms",
        "workload",
        "distributed",
        "reporting",
        "client",
        "planning",
        "training",
        "probing",
    },
    "service": {
        "errors",
        "storage",
        "records",
        "prediction",
        "algorithms",
        "reporting",
        "planning",
        "workflows",
    },
    "cli": {
        "__init__",
        "errors",
        "storage",
        "records",
        "distributed",
        "reporting",
        "client",
        "planning",
        "workflows",
        "service",
    },
    "__main__": {"cli", "distributed", "errors"},
    "__init__": {
        "errors",
        "storage.version",
        "records",
        "prediction.memory",
        "workload.muon",
        "workload.model_files",
        "training.session",
        "training.batches.unequal",
        "workflows",
    },
}
MAX_ROOMS, MAX_ARROWS = 17, 90
MAX_FILES, MAX_AT_THE_TOP = 15, 3  # in one folder, its __init__.py aside

WITHOUT_TORCH = {
    *("__init__", "__main__", "cli", "workflows", "service", "client"),
    *("planning", "reporting", "algorithms", "prediction", "records", "storage", "errors"),
    "distributed.joining.environments",
    "distributed.fork_server",
    "distributed.launch",
    "distributed.launch_with_server",
    "distributed.processes",
    "distributed.server_child",
    "distributed.supervisor",
    "distributed.worker_processes",
}


def name_of(path: Path) -> str:
    """``training/session.py`` is ``training.session``."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def home_of(path: Path) -> str:
    return name_of(path).partition(".")[0]


@functools.cache
def imports_in(path: Path) -> list[tuple[int, str]]:
    """Line and full name of everything imported, wherever the import stands."""
    return [*imports_below(parse(path))]


def imports_below(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in statements_in(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: relative import"
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def statements_in(tree: ast.AST) -> Iterator[ast.AST]:
    """A block and all statements in it; most of a tree is expressions, which import nothing."""
    yield tree
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.expr):
            yield from statements_in(node)


def room_first(imported: str) -> str:
    """``records.job.Job`` of ``batchwright.records.job.Job``; ``__init__`` for the package."""
    name = imported.removeprefix("batchwright.")
    return name if name.partition(".")[0] in ARROWS else "__init__"


def within(name: str, allowed: str) -> bool:
    return name == allowed or name.startswith(f"{allowed}.")


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def test_imports_of_ours_follow_the_arrows():
    strays = [
        f"{path}:{line}: {name}"
        for path in MODULES
        for line, name in imports_in(path)
        if name.startswith("batchwright.")
        and not any(
            within(room_first(name), one) for one in ARROWS[home_of(path)] | {home_of(path)}
        )
    ]
    assert not strays


def test_no_room_imports_one_further_down():
    rooms = list(ARROWS)
    for room, allowed in ARROWS.items():
        before = {*rooms[: rooms.index(room)], "__init__"}
        assert {one.partition(".")[0] for one in allowed} <= before


def test_rooms_and_arrows_between_them_are_few():
    homes = {home_of(path) for path in MODULES}
    arrows = {
        (home_of(path), target)
        for path in MODULES
        for _, name in imports_in(path)
        if name.startswith("batchwright.")
        for target in [room_first(name).partition(".")[0]]
        if target != home_of(path)
    }
    assert homes == ARROWS.keys()
    assert len(homes) <= MAX_ROOMS
    assert len(arrows) <= MAX_ARROWS


def test_no_folder_holds_too_many_files():
    files = Counter(path.parent for path in MODULES if path.name != "__init__.py")
    assert files.pop(ROOT) <= MAX_AT_THE_TOP
    assert max(files.values()) <= MAX_FILES


def test_libraries_of_extras_are_imported_by_import_library_alone():
    extras = {"torchvision", "timm", "datasets", "lmdb", "huggingface_hub"}
    strays = [
        f"{path}:{line}: {name}"
        for path in MODULES
        for line, name in imports_in(path)
        if name.partition(".")[0] in extras
    ]
    assert not strays


def test_modules_that_start_without_torch_import_it_inside_functions_only():
    strays = [
        f"{path}:{line}"
        for path in MODULES
        if {home_of(path), name_of(path)} & WITHOUT_TORCH
        for block in parse(path).body
        if not is_block(block)
        for line, name in imports_below(block)
        if name.partition(".")[0] == "torch"
    ]
    assert not strays


def is_block(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef | ast.ClassDef | ast.If)


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "import batchwright; dir(batchwright); batchwright.Job; batchwright.plan",
        "import sys; sys.argv = ['batchwright', '--help']\n"
        "from batchwright.cli.commands import main\n"
        "try: main()\nexcept SystemExit: pass",
        "import io, sys; sys.path.insert(0, TESTS); sys.argv = ['batchwright', 'plan', '-']\n"
        "from samples import make_profile\n"
        "sys.stdin = io.StringIO(make_profile().model_dump_json())\n"
        "from batchwright.cli.commands import main\n"
        "try: main()\nexcept SystemExit as end: assert not end.code, end.code",
        "import sys; sys.path.insert(0, TESTS)\n"
        "from samples import make_plan; make_plan().explain()\n"
        "import batchwright.reporting.pages.page, batchwright.reporting.render.figures\n"
        "import batchwright.reporting.render.tables, batchwright.reporting.render.progress",
    ],
    ids=["import", "help", "plan", "reporting"],
)
def test_torch_is_not_loaded_by(code):
    loaded = loaded_by(code)
    assert "batchwright" in loaded
    assert not loaded & {"torch", "torchvision", "timm"}


@pytest.mark.slow
def test_operators_commands_load_no_server(tmp_path):
    pytest.importorskip("sqlalchemy")
    code = "import sys\nfrom batchwright.cli.commands import main\n" + "".join(
        f"sys.argv = ['batchwright', *{words!r}, '--database', 'sqlite:///{tmp_path}/a.sqlite']\n"
        "try: main()\nexcept SystemExit as end: assert not end.code, end.code\n"
        for words in (["token", "list"], ["sign-in"], ["backup", f"{tmp_path}/copy.sqlite"])
    )
    loaded = loaded_by(code.rstrip())
    assert "sqlalchemy" in loaded
    assert not loaded & {"fastapi", "starlette", "uvicorn", "torch"}


def loaded_by(code):
    """Packages that a process has loaded after some code."""
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
    return set(json.loads(done.stdout))


def test_no_files_import_each_other_in_a_circle():
    files = {name_of(path).removesuffix(".__init__"): path for path in MODULES}
    ahead = {
        name: {
            found
            for _, imported in imports_in(path)
            for found in [file_of(imported.removeprefix("batchwright."), files)]
            if imported.partition(".")[0] == "batchwright" and found != name
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


def file_of(imported: str, files: Container[str]) -> str:
    """The file of a module or of what is imported from it, which may be the package's own."""
    home = imported.rpartition(".")[0]
    return next((name for name in (imported, home) if name in files), "__init__")
