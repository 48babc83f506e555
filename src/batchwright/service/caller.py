"""Who asks, and what they may do."""

from __future__ import annotations

from typing import NamedTuple


class Caller(NamedTuple):
    """Who sent a request."""

    name: str
    """A token's name; `browser` for a page that is signed in."""
    scopes: frozenset[str]

    def may(self, *scopes: str) -> bool:
        """Whether any of ``scopes`` is among the caller's; `admin` may do everything."""
        return "admin" in self.scopes or not self.scopes.isdisjoint(scopes)

    def owns(self, owner: str) -> bool:
        """Whether what belongs to ``owner`` may be changed: it is the caller's own, or all is."""
        return self.name == owner or "admin" in self.scopes
