"""A registry: members by name, ours and those of other packages' entry points."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from importlib import metadata
from typing import Any, Generic, Protocol, TypeVar

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import PydanticKnownError, core_schema

from batchwright.errors import JobError


class Member(Protocol):
    """Anything with a name."""

    @property
    def name(self) -> str:
        """The value of the job key that names this member."""


M = TypeVar("M", bound=Member)


class Registry(Mapping[str, M], Generic[M]):
    """Members by name. Those of other packages are looked up for names that are not ours.

    Args:
        key: The job key whose values are members' names.
        *members: Our own members.
        group: Entry point group by which other packages add members; empty: they cannot.
        auto: The member that `auto` stands for until a plan is made; `auto` itself is no member.
    """

    def __init__(self, key: str, *members: M, group: str = "", auto: M | None = None) -> None:
        self.own = {one.name: one for one in members}
        self._key, self._group = key, group
        self._found = self.own | ({} if auto is None else {"auto": auto})

    def __getitem__(self, name: str) -> M:
        if name not in self._found:
            self._found[name] = self._load(self._points[name])
        return self._found[name]

    def __contains__(self, name: object) -> bool:
        return name != "auto" and super().__contains__(name)

    def __iter__(self) -> Iterator[str]:
        return iter((*self.own, *self._points))

    def __len__(self) -> int:
        return len(self.own) + len(self._points)

    @cached_property
    def _points(self) -> dict[str, metadata.EntryPoint]:
        """Entry points of other packages, by name; our own members cannot be replaced."""
        found = metadata.entry_points(group=self._group) if self._group else ()
        return {one.name: one for one in found if one.name not in {*self.own, "auto"}}

    def _load(self, point: metadata.EntryPoint) -> M:
        wanted = type(next(iter(self.own.values())))
        place = f"{self._key}={point.name}: entry point {self._group} = {point.value}"
        try:
            member = point.load()
        except Exception as error:  # a package may fail in any way
            cause = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise JobError(
                f"{place} cannot be loaded ({cause}): mend or remove the package that adds it"
            ) from error
        if not isinstance(member, wanted) or member.name != point.name:
            raise JobError(f"{place} is no {wanted.__name__} called {point.name}")
        return member


def listed(words: Iterable[str]) -> str:
    """Words as code, separated by commas, for a key's description."""
    return ", ".join(f"`{word}`" for word in words)


def explained(*members: Any) -> str:
    """Members' names and descriptions (`words`), for a key's description."""
    return "; ".join(f"`{one.name}`: {one.words}" for one in members) + "."


class Named:
    """For a field's annotation: the field's value is a member's name, or one of some other words.

    Args:
        registry: The registry; it is searched whenever a record is validated.
        *words: Other words, such as `auto`.
    """

    def __init__(self, registry: Registry[Any], *words: str) -> None:
        self._registry, self._words = registry, words

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        """Schema of a text that `_known` checks."""
        del source, handler
        return core_schema.no_info_before_validator_function(self._known, core_schema.any_schema())

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Schema with all names that are known when it is written."""
        del schema, handler
        return {"enum": self.words, "type": "string"}

    @property
    def words(self) -> list[str]:
        """All values that are allowed with the packages installed here."""
        return [*self._words, *self._registry]

    def _known(self, name: Any) -> Any:
        if isinstance(name, str) and (name in self._words or name in self._registry):
            return name
        *names, last = map(repr, self.words)
        raise PydanticKnownError("literal_error", {"expected": f"{', '.join(names)} or {last}"})
