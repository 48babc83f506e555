"""The verbs: probe, plan, check, schedule, train, report, run, sweep and doctor."""
