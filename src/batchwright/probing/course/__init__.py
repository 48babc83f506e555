"""What a probe measures when, within its budget."""
