"""YAML: parsing texts into plain values, with errors of one line, and writing values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from batchwright.records.text.problems import shorten

_BOOL, _INT, _FLOAT = (f"tag:yaml.org,2002:{kind}" for kind in ("bool", "int", "float"))
_NUMBERS = {
    _INT: r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F]+)$",
    _FLOAT: r"[-+]?(([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?"
    r"|[0-9][0-9_]*[eE][-+]?[0-9]+|\.(inf|Inf|INF))$|\.(nan|NaN|NAN)$",
}
"""Forms of numbers. PyYAML's own lack ``1e-3``, and take ``12:30:00`` and ``010`` for numbers."""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with five changes.

    As in YAML 1.2, only ``true`` and ``false`` are booleans, since ``off`` is a value of job keys,
    numbers have the forms of `_NUMBERS`, and a key that comes twice is refused. So is a value that
    contains itself. The error for a value that looks like a date or a number and is none shows the
    value and its line.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        node = super().compose_node(parent, index)
        if node is not None and node.end_mark is None:  # a reference to what is still being read
            raise yaml.composer.ComposerError(
                None, None, "a value contains itself", node.start_mark
            )
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in lines:
                problem = f"{shorten(key.value)} is given twice, first in line {lines[key.value]}"
                raise yaml.composer.ComposerError(None, None, problem, key.start_mark)
            lines[key.value] = key.start_mark.line + 1
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            made = super().construct_object(node, deep)
            # A ValueError: half a surrogate pair, which no file could hold; a hexadecimal number
            # with more digits than Python writes; a zero byte, which no path could hold.
            if isinstance(made, str | int) and b"\0" in str(made).encode():
                raise ValueError(made)
            return made
        except (ValueError, KeyError, AttributeError) as error:
            problem = f"{shorten(node.value)} cannot be read as a value"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, form)
        for tag, form in known
        if tag not in _NUMBERS and (tag != _BOOL or first in "tTfF")
    ]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper, which also quotes texts that `_Loader` would read as numbers."""


for _tag, _form in _NUMBERS.items():
    _Loader.add_implicit_resolver(_tag, re.compile(_form), list("-+.0123456789"))
    _Dumper.add_implicit_resolver(_tag, re.compile(_form), list("-+.0123456789"))


class _PlainLoader(_Loader):
    """A loader that refuses references."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "a reference", None)
        return super().compose_node(parent, index)


def parse_yaml(text: str, *, references: bool = True) -> Any:
    """The plain values of a YAML text.

    Args:
        text: The content of a file, or of a job key.
        references: Whether references are allowed; with them a short text can grow very long.

    Raises:
        yaml.YAMLError: The text is not YAML, holds a malformed value, or is nested too deeply.
    """
    try:
        return yaml.load(text, _Loader if references else _PlainLoader)  # noqa: S506 - both safe
    except RecursionError:
        raise yaml.composer.ComposerError(None, None, "it is nested too deeply", None) from None


def yaml_of(values: Mapping[str, Any]) -> str:
    """Plain values as a YAML text that `parse_yaml` reads again, in their order."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def yaml_problem(error: yaml.YAMLError) -> str:
    """The problem of a text that is not YAML, in a few words."""
    # The error about a character has a `reason`, all others have a `problem`.
    problem = getattr(error, "problem", None) or getattr(error, "reason", None)
    return problem or "it cannot be read"
