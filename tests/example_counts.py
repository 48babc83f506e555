"""How many examples a test tries: a quarter in the quick tests, as `conftest` sets it up."""

from __future__ import annotations

from hypothesis import settings

USUAL = 100
"""Of all tests that do not say otherwise; Hypothesis' own."""


def examples(count: int, *, derandomize: bool = False) -> settings:
    """For a test that tries ``count`` of them where all tests run."""
    usual = settings()
    return settings(
        max_examples=max(10, count * usual.max_examples // USUAL),
        derandomize=derandomize or usual.derandomize,
    )


def times(count: int) -> int:
    """How often a test that draws for itself tries what it tries ``count`` times of all tests."""
    return max(1, count * settings().max_examples // USUAL)
