"""Clients of a service: reporters of runs, submission of jobs, agents that carry jobs out."""
