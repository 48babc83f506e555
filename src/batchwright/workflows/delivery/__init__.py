"""DELIVER: a trained network for people who do not have this package, with a model card."""
