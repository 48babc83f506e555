"""The service's pages: rendered on the server, complete without a script; a script updates them.

Templates are in `templates/`; charts come from `batchwright.reporting`. Each module has a `router`.
"""
