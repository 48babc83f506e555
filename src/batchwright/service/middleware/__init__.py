"""Middleware that every request passes, each a small ASGI application around the next."""
