"""Clusters as they are described: in sections of a job, or to be simulated."""
