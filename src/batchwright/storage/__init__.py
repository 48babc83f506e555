"""Files: whole or not at all, one writer at a time, followed while they grow."""
