"""Published mathematics as pure functions: shares, rates, batch sizes, the simulated clock."""
