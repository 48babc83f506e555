"""Trackers: a run's lines in TensorBoard, MLflow, Weights & Biases or trackio, by a process.

`following` reads the run folder and hands on what a tracker does not have, `companion` starts that
beside a run; each other module is for one tracker, and imports it.
"""
