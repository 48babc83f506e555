"""ACT: a plan and a workload become a trained network and its records."""
