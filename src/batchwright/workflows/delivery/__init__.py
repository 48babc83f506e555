"""`deliver`: writes a trained network with a model card for people without this package."""
