"""What somebody meets who brings data and a network."""
