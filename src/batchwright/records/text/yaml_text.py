"""YAML texts as plain values, with one line for what is wrong in them."""

from __future__ import annotations

from typing import Any

import yaml

from batchwright.records.text.problems import shorten

_BOOL = "tag:yaml.org,2002:bool"


class _Loader(yaml.SafeLoader):
    """Names a value that looks like a date or a number and is none, and its line.

    Of YAML 1.1's many words for yes and no only ``true`` and ``false`` are such, as in YAML 1.2:
    ``off`` is a word that keys take. As there, too, a key that stands twice is refused.
    """

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
            return super().construct_object(node, deep)
        except (ValueError, KeyError, AttributeError) as error:
            problem = f"{shorten(node.value)} cannot be read as a value"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error


_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in known if tag != _BOOL or first in "tTfF"]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class _PlainLoader(_Loader):
    """YAML without references."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "a reference", None)
        return super().compose_node(parent, index)


def parse_yaml(text: str, *, references: bool = True) -> Any:
    """The plain values of a YAML text.

    Args:
        text: From a file, or from a job key.
        references: Whether it may have some, by which a short text can grow long.

    Raises:
        yaml.YAMLError: It is not YAML, a value in it is none, or it is nested too deeply.
    """
    try:
        return yaml.load(text, _Loader if references else _PlainLoader)  # noqa: S506 - safe ones
    except RecursionError:
        raise yaml.composer.ComposerError(None, None, "it is nested too deeply", None) from None


def yaml_problem(error: yaml.YAMLError) -> str:
    """What a text that is not YAML has wrong, in a few words."""
    told = getattr(error, "problem", None) or getattr(error, "reason", None)  # of a character
    return told or "it cannot be read"
