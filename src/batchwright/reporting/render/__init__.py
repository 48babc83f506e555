"""What draws: charts as SVG for pages and by matplotlib for files, tables in a terminal."""
