"""What draws a chart: as SVG for a page, by matplotlib for a file."""
