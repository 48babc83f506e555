"""The parameter server: rounds out, models in, merged as the plan says."""
