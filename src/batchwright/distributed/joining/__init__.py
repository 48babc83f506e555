"""Processes that another launcher has started: what it says to them, and how they work together."""
