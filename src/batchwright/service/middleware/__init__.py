"""What every request passes through, each a small ASGI application around the next."""
