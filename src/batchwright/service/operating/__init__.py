"""The service as an operator meets it: settings, logs, metrics, backup, the process itself."""
