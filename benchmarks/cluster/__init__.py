"""Workers of unequal speed, and workers that are killed."""
