"""Records as text: in words for a person, and values of job keys as people write them."""
