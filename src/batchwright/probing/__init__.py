"""MEASURE: a workload on given hardware becomes a profile."""
