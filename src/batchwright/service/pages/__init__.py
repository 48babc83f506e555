"""The service's pages: rendered on the server, whole without any script, kept up to date by one.

Templates are in `templates/`; charts come from `batchwright.reporting`. Each module has a `router`.
"""
