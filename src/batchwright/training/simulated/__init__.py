"""All workers of a plan in one process, in simulated time: what is computed is real."""
