"""Clusters that are described rather than there: what one is imagined to be, what it costs."""
