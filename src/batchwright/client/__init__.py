"""What speaks to a service: reporters of runs, those who submit jobs, agents that do them."""
