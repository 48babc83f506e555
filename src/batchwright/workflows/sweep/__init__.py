"""SWEEP: one job over a grid of its keys and several seeds, runs beside each other."""
