"""Code that all benchmarks share."""
