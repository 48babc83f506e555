"""What plans choose and predict, against what came of it."""
