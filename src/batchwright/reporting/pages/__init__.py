"""Pages: HTML files that open without a network."""
