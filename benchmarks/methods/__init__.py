"""What the methods of training gain, and what they cost."""
