"""What Batchwright is measured by; each module runs as ``python -m benchmarks.NAME``."""
