"""Mutation testing: change a module in small ways, each of which should make one of its tests fail.

    python tools/mutants.py sampler knees --most 100 --out mutants.json
    python tools/mutants.py sampler knees --again mutants.json --out mutants.json

A mutant is the module with one comparison, operator, number, condition, returned value or
statement changed. Its tests run in a copy of the tree, in a process forked after the heavy
imports, with a time limit; a mutant that fails a test or exceeds the limit is killed. Which
mutants are tried depends on the seed alone. Survivors are printed: each shows a missing test, or
is a change without effect (docs/testing.md lists the latter).
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Found = dict[str, Any]

ROOT = Path(__file__).parent.parent
PACKAGE = "src/batchwright"

MODULES = {
    "reducer": (
        ["distributed/reducer.py", "distributed/buckets.py"],
        ["test_reducer", "test_host_waits"],
    ),
    "sampler": (
        ["training/batches/sampler.py", "training/batches/epoch_steps.py"],
        ["test_sampler"],
    ),
    "rounds": (
        ["training/parameter_server/rounds.py"],
        ["test_rounds", "test_parameter_server", "test_liveness"],
    ),
    "partition": (["algorithms/partition.py"], ["test_partition"]),
    "dual_batch": (["algorithms/dual_batch.py"], ["test_dual_batch"]),
    "knees": (["planning/candidates/knees.py"], ["test_knees", "test_cluster_options"]),
}
"""By name: files, and the test files that should notice changes in them, the fastest first."""

COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
SWAPPED = {"min": "max", "max": "min", "floor": "ceil", "ceil": "floor", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """One changed module.

    Attributes:
        file: Path in the package.
        line: Line of the change.
        was: The code before.
        now: The code after.
        source: The whole module after.
    """

    file: str
    line: int
    was: str
    now: str
    source: str

    def __str__(self) -> str:
        """File, line and change."""
        return f"{self.file}:{self.line}: {self.was}  ->  {self.now}"


def mutants(file: str) -> list[Mutant]:
    """All mutants of a file, in the order of its code."""
    tree = ast.parse((ROOT / PACKAGE / file).read_text(encoding="utf-8"))
    found = []
    for place, (node, field, index) in enumerate(_sites(tree)):
        value = getattr(node, field) if index is None else getattr(node, field)[index]
        for change in range(len(_changes(value))):
            changed = copy.deepcopy(tree)
            new_node, _, _ = list(_sites(changed))[place]
            new = _changes(value)[change]
            if index is None:
                setattr(new_node, field, new)
            else:
                getattr(new_node, field)[index] = new
            found.append(
                Mutant(
                    file,
                    value.lineno,
                    _shown(value),
                    _shown(new),
                    ast.unparse(ast.fix_missing_locations(changed)),
                )
            )
    return found


def _shown(node: ast.AST) -> str:
    if isinstance(node, ast.If):
        node = ast.If(node.test, [ast.Expr(ast.Constant(...))], [])
    return " ".join(ast.unparse(ast.fix_missing_locations(copy.copy(node))).split())


def _sites(tree: ast.AST) -> Iterator[tuple[ast.AST, str, int | None]]:
    """Every expression and statement, by its parent, the parent's field and its place there.

    Annotations, docstrings, error messages and code for type checkers are left out.
    """
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "decorator_list", "type_params", "format_spec"):
            continue
        if isinstance(tree, (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr)):
            continue
        if isinstance(tree, ast.If) and ast.unparse(tree.test) == "TYPE_CHECKING":
            continue
        several = value if isinstance(value, list) else [value]
        for index, child in enumerate(several):
            if not isinstance(child, (ast.expr, ast.stmt, ast.keyword, ast.comprehension)):
                continue
            if isinstance(child, (ast.expr, ast.stmt)):
                yield tree, field, index if isinstance(value, list) else None
            yield from _sites(child)


def _changes(node: ast.AST) -> list[ast.AST]:
    """The nodes that may replace a node."""
    match node:
        case ast.Compare(left, [operator], right) if type(operator) in COMPARISONS:
            return [ast.Compare(left, [COMPARISONS[type(operator)]()], right)]
        case ast.BinOp(left, operator, right) if type(operator) in OPERATORS:
            return [ast.BinOp(left, OPERATORS[type(operator)](), right)]
        case ast.BoolOp(ast.And(), values):
            return [ast.BoolOp(ast.Or(), values)]
        case ast.BoolOp(ast.Or(), values):
            return [ast.BoolOp(ast.And(), values)]
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            return [operand]
        case ast.Constant(bool(value)):
            return [ast.Constant(not value)]
        case ast.Constant(int(value) | float(value)):
            return [ast.Constant(value + 1), *([ast.Constant(0)] if value == 1 else [])]
        case ast.Call(ast.Name(name), arguments, named) if name in SWAPPED:
            return [ast.Call(ast.Name(SWAPPED[name]), arguments, named)]
        case ast.IfExp(test, body, other) if not _changes(test):  # else that negates it
            return [ast.IfExp(ast.UnaryOp(ast.Not(), test), body, other)]
        case ast.If(test, body, other) if not _changes(test):
            return [ast.If(ast.UnaryOp(ast.Not(), test), body, other)]
        case ast.Return(value) if value is not None and not _is_none(value):
            return [ast.Return(ast.Constant(None))]
        case ast.Expr(ast.Call()) | ast.AugAssign() | ast.Raise() | ast.Continue() | ast.Break():
            return [ast.Pass()]
        case ast.Assign([ast.Attribute() | ast.Subscript()], _):
            return [ast.Pass()]
    return []


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


# Hypothesis needs only some counterexample, and keeps none for the next mutant. The two workers of
# `crew` are forked, which starts them at once.
QUICK = """

def pytest_sessionstart():
    from hypothesis import Phase, settings

    settings.register_profile(
        "first", deadline=None, database=None, phases=[Phase.explicit, Phase.generate]
    )
    settings.load_profile("first")


@pytest.fixture(scope="session")
def crew():
    from multiprocessing import get_context

    from gloo import Crew, Worker, serve

    class Forked(Worker):
        def _begin(self, pipe, server):
            process = get_context("fork").Process(target=serve, args=(self._rank, pipe))
            process.start()
            process.wait = process.join
            return process

    crew = Crew(Forked)
    yield crew
    crew.close()
"""


class Bench:
    """A copy of the tree in which tests run against mutants."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for part in ("src", "tests", "docs", "benchmarks", "examples"):
            shutil.copytree(
                ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__")
            )
        for file in ("pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"):
            shutil.copy(ROOT / file, folder)
        with (folder / "tests/conftest.py").open("a", encoding="utf-8") as conftest:
            conftest.write(QUICK)

    def passes(self, tests: list[str], seconds: float) -> bool:
        """Whether all tests pass within ``seconds``, in a process of their own."""
        started, child = time.monotonic(), os.fork()
        if not child:
            self._run(tests)
        try:
            while time.monotonic() - started < seconds:
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    return status == 0
                time.sleep(0.02)
            return False
        finally:
            self._end(child)

    def write(self, file: str, source: str) -> None:
        """Write the source of a module of the copy."""
        path = self.folder / PACKAGE / file
        path.write_text(source, encoding="utf-8")
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            compiled.unlink()  # chosen by size and second, in which two mutants may agree

    def _run(self, tests: list[str]) -> None:
        """Run pytest on the copy, in the child process, and end it."""
        import pytest

        code = 1
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.setsid()
            os.chdir(self.folder)
            nowhere = os.open(os.devnull, os.O_RDWR)
            for stream in range(3):
                os.dup2(nowhere, stream)
            paths = [str(self.folder / "src"), str(self.folder / "tests"), str(self.folder)]
            sys.path[:0] = paths
            sys.dont_write_bytecode = True
            os.environ["PYTHONPATH"] = os.pathsep.join(paths)
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
            files = [f"tests/{test}.py" for test in tests]
            quiet = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
            code = int(pytest.main([*quiet, *files]))
        finally:
            os._exit(code)

    @staticmethod
    def _end(child: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # with the processes that it started
        with suppress(ChildProcessError):
            os.waitpid(child, 0)


def examine(name: str, bench: Bench, most: int, seed: int, before: Found | None) -> Found:
    """Try mutants of one entry of `MODULES`, and return their numbers and the survivors.

    Args:
        name: Name of the entry.
        bench: The copy of the tree.
        most: Largest number of mutants.
        seed: Decides which mutants are tried.
        before: Result of an earlier run, whose survivors alone are tried again.
    """
    files, tests = MODULES[name]
    all_of_them = [mutant for file in files for mutant in mutants(file)]
    if before and before["mutants"] != len(all_of_them):
        sys.exit(f"{name} has changed since the earlier run: try all of it")
    tried = before["tried"] if before else min(most, len(all_of_them))
    chosen = sorted(random.Random(seed).sample(range(len(all_of_them)), tried))
    if before:
        chosen = [index for index in chosen if _told(all_of_them[index]) in before["survivors"]]
    started = time.monotonic()
    if not bench.passes(tests, 1200):
        sys.exit(f"{name}: its tests fail without any change")
    usual = time.monotonic() - started
    print(f"{name}: {len(chosen)} of {len(all_of_them)} mutants, {usual:.1f} s each", flush=True)
    survivors = []
    for index in chosen:
        mutant = all_of_them[index]
        original = (ROOT / PACKAGE / mutant.file).read_text(encoding="utf-8")
        bench.write(mutant.file, mutant.source)
        if bench.passes(tests, 5 + 5 * usual):
            survivors.append(mutant)
            print(f"  survived  {mutant}", flush=True)
        bench.write(mutant.file, original)
    killed = tried - len(survivors)
    print(f"{name}: {killed} of {tried} killed, {killed / tried:.1%}", flush=True)
    told = [_told(one) for one in survivors]
    return {"mutants": len(all_of_them), "tried": tried, "killed": killed, "survivors": told}


def _told(mutant: Mutant) -> dict[str, object]:
    return {key: value for key, value in asdict(mutant).items() if key != "source"}


def main() -> None:
    """Read the command line, try the mutants, write the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("modules", nargs="*", choices=[*MODULES, []], help="default: all")
    parser.add_argument("--most", type=int, default=100, help="most mutants of each module")
    parser.add_argument("--seed", type=int, default=0, help="decides which mutants are tried")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument(
        "--again", type=Path, help="results of an earlier run: try its survivors alone"
    )
    asked = parser.parse_args()
    before = json.loads(asked.again.read_text(encoding="utf-8")) if asked.again else {}
    import fastapi  # noqa: F401 - slow imports come before the fork
    import hypothesis  # noqa: F401
    import matplotlib  # noqa: F401
    import pydantic  # noqa: F401
    import pytest  # noqa: F401
    import sqlalchemy.orm  # noqa: F401
    import torch._dynamo

    torch.set_num_threads(1)  # threads do not outlive a fork
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # so that the copy is deleted
    seed = before.get("seed", asked.seed)
    found: dict[str, Any] = {**before, "seed": seed}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        bench = Bench(Path(folder))
        for name in asked.modules or MODULES:
            found[name] = examine(name, bench, asked.most, seed, before.get(name))
            if asked.out:
                asked.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
