"""Processes: started, joined into a group, watched, and gradients exchanged between them."""
