"""The lines of metrics.jsonl, which a run writes while it goes on; each line is a record."""
