"""Trackers: a run's lines in TensorBoard, MLflow, Weights & Biases or trackio, by a process.

`following` is that process: it reads the run folder and logs what a tracker does not have.
`companion` starts it beside a run. Each module ``in_*`` adapts one tracker, and imports its
package.
"""
