"""`deliver` and `predict`: a trained network for people without this package, and its use."""
