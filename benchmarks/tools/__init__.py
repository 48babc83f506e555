"""What makes assets, or only explores."""
