"""Each branch of the source on the kind of device is one that a test on a GPU comes by."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import batchwright
import test_gpu

ROOT = Path(batchwright.__file__).parent

ELSEWHERE = {
    **dict.fromkeys(
        (
            "probing.measure.memory:_peak_of_fakes",
            "records.agent_rules:needs_of",
            "workflows.engines.ray_train:_unused_gpus",
            "workflows.engines.ray_train:submit",
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
    "training.session_checks:refuse_synchronized_on_cpu": "says what the CPU cannot do",
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
        return node.attr == "is_cuda" or ast.unparse(node.value) == "torch.cuda"
    return isinstance(node, ast.Constant) and str(node.value).endswith(":nccl")


def _asks_for_device(node: ast.Compare) -> bool:
    sides = [node.left, *node.comparators]
    told = {one.value for s in sides for one in ast.walk(s) if isinstance(one, ast.Constant)}
    kinds = {ast.unparse(one) for one in sides}
    on_type = any(kind.endswith((".type", "job.device")) for kind in kinds)
    return "cuda" in told or ("cpu" in told and on_type)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def branches() -> set[str]:
    found = set()
    for path in sorted(ROOT.rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found |= {f"{module}:{name}" for name in branches_in(tree_of(path)) if name}
    return found


def test_every_branch_on_the_kind_of_device_has_a_test_on_a_gpu():
    named = {site for sites in test_gpu.REACHED.values() for site in sites}
    missing = branches() - named - ELSEWHERE.keys()
    assert not missing, f"name them in @reaches(...) of a test in {test_gpu.__file__}"


def test_what_tests_say_that_they_reach_is_there():
    named = {site for sites in test_gpu.REACHED.values() for site in sites if "(" not in site}
    known = set()
    for path in sorted(ROOT.rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        known |= {f"{module}:{name}" for name in _functions(tree_of(path))}
    assert named <= known, named - known
    assert ELSEWHERE.keys() <= known


def _functions(tree: ast.AST, names: tuple[str, ...] = ()) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        inner = names
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            inner = (*names, node.name)
            yield ".".join(inner)
        yield from _functions(node, inner)


def test_a_new_branch_would_be_seen():
    source = "class A:\n def f(self, d):\n  if d.type == 'cuda':\n   torch.cuda.synchronize()"
    assert set(branches_in(ast.parse(source))) == {"A.f"}
    assert set(branches_in(ast.parse("def g(d): return d.type != 'cpu'"))) == {"g"}
    assert set(branches_in(ast.parse("def i(d): return d.type in ('cuda', 'mps')"))) == {"i"}
    assert not set(branches_in(ast.parse("def h(name): return name == 'cpu'")))
