"""Files: atomic writing, locks for one writer at a time, and following a file that grows."""
