"""What steps and batches take."""
