"""DECIDE: models and a goal become a plan. Pure functions; needs no torch."""
