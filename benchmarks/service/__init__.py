"""The service under load."""
