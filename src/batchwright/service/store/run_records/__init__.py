"""Records of runs as rows: checked, taken once, handed out few at a time."""
