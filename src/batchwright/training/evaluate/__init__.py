"""Held-out evaluation, and what precedes it."""
