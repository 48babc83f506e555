"""Checkpoints: written, found again, and gone on from."""
