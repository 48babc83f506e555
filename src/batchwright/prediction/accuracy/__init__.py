"""How a network learns: held-out accuracy from trials and runs, with its error."""
