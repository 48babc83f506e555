"""A training on clusters that nobody here has: its time and cost, simulated."""
