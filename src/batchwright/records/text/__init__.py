"""Records in words for a person."""
