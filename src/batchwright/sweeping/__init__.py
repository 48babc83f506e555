"""SWEEP: one job over a grid of its keys and several seeds, as many runs at once as there is room."""
