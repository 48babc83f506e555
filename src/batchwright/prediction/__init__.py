"""EXPLAIN: a profile becomes fitted models, each with its error. Needs no torch."""
