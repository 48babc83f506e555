"""The training step: backward passes, the exchange, the update."""
