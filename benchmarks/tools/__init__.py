"""Programs that make assets of the package, or explore data for it."""
