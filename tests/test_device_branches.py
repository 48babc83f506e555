"""Each branch of the source on the kind of device is one that a test on a GPU comes by."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import batchwright
import test_gpu

ROOT = Path(batchwright.__file__).parent

ELSEWHERE = {
    **dict.fromkeys(
        (
            "client.job_work:JobWork._short_of_gpus",
            "probing.measure.memory:_peak_of_fakes",
            "records.agent_rules:needs_of",
            "workflows.engines.ray_train:_unused_gpus",
            "workflows.engines.ray_train:check",
            "workflows.exports.launchers:_accelerator",
            "workflows.exports.launchers:_devices",
            "workflows.exports.launchers:ray",
            "workflows.exports.trainers:accelerate",
            "workflows.exports.trainers:lightning",
            "workflows.exports.trainers:transformers",
        ),
        "reads what a plan or job says of the device, and touches none",
    ),
    "distributed.reducer:Reducer._lay_out": "in processes, by the tests of several workers",
    "training.session_checks:refuse_default_device": "asks for that of a script, whatever it is",
    "training.session_checks:refuse_synchronized_on_cpu": "says what the CPU cannot do",
    "workflows.prepare_job:_warn_of_emulation": "says what the CPU cannot do",
    "workload.passes.recorded_passes:Recorder._let_go": "with PyTorch before 2.14 alone",
}
"""Branches that a test on a GPU need not name, and why."""


def branches_in(tree: ast.AST, names: tuple[str, ...] = ()) -> Iterator[str]:
    """Functions that ask for the kind of device, or use what only CUDA has."""
    for node in ast.iter_child_nodes(tree):
        inner = names
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            inner = (*names, node.name)
        elif _is_of_cuda(node) or (isinstance(node, ast.Compare) and _asks_for_device(node)):
            yield ".".join(names)
        yield from branches_in(node, inner)


def _is_of_cuda(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        of_cuda = getattr(node.value, "attr", "") == "cuda"  # few are, as below
        return node.attr == "is_cuda" or (of_cuda and ast.unparse(node.value) == "torch.cuda")
    return isinstance(node, ast.Constant) and str(node.value).endswith(":nccl")


def _asks_for_device(node: ast.Compare) -> bool:
    sides = [node.left, *node.comparators]
    told = {one.value for s in sides for one in ast.walk(s) if isinstance(one, ast.Constant)}
    if "cpu" not in told:  # few have it: unparsing takes long
        return "cuda" in told
    kinds = {ast.unparse(one) for one in sides}
    return "cuda" in told or any(one.endswith((".type", "job.device")) for one in kinds)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def branches() -> set[str]:
    found = set()
    for path in sorted(ROOT.rglob("*.py")):
        if re.search("cuda|cpu|nccl", path.read_text(encoding="utf-8")):  # others have none
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found |= {f"{module}:{name}" for name in branches_in(tree_of(path)) if name}
    return found


def test_every_branch_on_the_kind_of_device_has_a_test_on_a_gpu():
    named = {site for sites in test_gpu.REACHED.values() for site in sites}
    missing = branches() - named - ELSEWHERE.keys()
    assert not missing, f"name them in @reaches(...) of a test in {test_gpu.__file__}"


def test_what_tests_say_that_they_reach_is_there():
    named = {site for sites in test_gpu.REACHED.values() for site in sites if "(" not in site}
    named |= ELSEWHERE.keys()
    known = set()
    for module in {site.partition(":")[0] for site in named}:
        path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
        known |= {f"{module}:{name}" for name in _functions(tree_of(path))}
    assert named <= known, named - known


def _functions(tree: ast.AST, names: tuple[str, ...] = ()) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.expr):  # most of a tree, and without functions
            continue
        inner = names
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            inner = (*names, node.name)
            yield ".".join(inner)
        yield from _functions(node, inner)


def misfits(tree: ast.Module, known: dict[str, Any]) -> Iterator[str]:
    """Calls of functions that have no such parameters, and names that are not there."""
    known = dict(known)
    for node in ast.walk(tree):  # those that a test imports for itself
        if isinstance(node, ast.ImportFrom) and node.module != "__future__":
            module = import_module(node.module or "")
            known |= {one.asname or one.name: getattr(module, one.name) for one in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and inspect.ismodule(_named(node.value, known)):
            if not hasattr(_named(node.value, known), node.attr):
                yield ast.unparse(node)
        elif isinstance(node, ast.Call) and not _is_open(node):
            try:
                signature = inspect.signature(_named(node.func, known))
            except (TypeError, ValueError):  # nothing that is known, or written in C
                continue
            try:
                signature.bind(*node.args, **{one.arg: one for one in node.keywords if one.arg})
            except TypeError as error:
                yield f"{ast.unparse(node)}: {error}"


def _is_open(node: ast.Call) -> bool:
    """Whether it has more arguments than are written there."""
    starred = any(isinstance(one, ast.Starred) for one in node.args)
    return starred or any(one.arg is None for one in node.keywords)


def _named(node: ast.AST, known: dict[str, Any]) -> Any:
    """What an expression such as ``module.name`` stands for; `None`: something else."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    inner = _named(node.value, known) if isinstance(node, ast.Attribute) else None
    return getattr(inner, node.attr, None) if inspect.ismodule(inner) else None


def test_calls_of_tests_on_a_gpu_are_those_of_the_functions_that_there_are():
    """Where there is no GPU nobody else would notice."""
    path = Path(test_gpu.__file__)
    assert not list(misfits(tree_of(path), vars(test_gpu)))
    wrong = "host.enter(1, 2)\nhost.gone\nstore(sides=3)\nstore(8, *more)\nstore(8, side=2)"
    found = misfits(ast.parse(wrong), vars(test_gpu))
    assert {one.partition(":")[0] for one in found} == {
        "host.enter(1, 2)",
        "host.gone",
        "store(sides=3)",
    }


def test_a_new_branch_would_be_seen():
    source = "class A:\n def f(self, d):\n  if d.type == 'cuda':\n   torch.cuda.synchronize()"
    assert set(branches_in(ast.parse(source))) == {"A.f"}
    assert set(branches_in(ast.parse("def g(d): return d.type != 'cpu'"))) == {"g"}
    assert set(branches_in(ast.parse("def i(d): return d.type in ('cuda', 'mps')"))) == {"i"}
    assert not set(branches_in(ast.parse("def h(name): return name == 'cpu'")))
