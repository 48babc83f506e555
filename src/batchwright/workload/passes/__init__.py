"""How forward and backward passes are taken: compiled, computed again, replayed."""
