"""Measurements, one a file: step time, memory, exchange, gradient noise, trials."""
