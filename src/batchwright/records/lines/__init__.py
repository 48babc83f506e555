"""What a run tells while it goes on: the lines of metrics.jsonl, each a record."""
