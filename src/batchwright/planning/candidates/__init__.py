"""Candidates, each with its time, cost and accuracy, and the choice among them."""
