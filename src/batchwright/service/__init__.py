"""The online service: a thin shell over the same functions that the command line calls."""
