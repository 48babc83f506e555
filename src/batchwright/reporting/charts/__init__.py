"""Charts as plain data, each described once for pages and files."""
